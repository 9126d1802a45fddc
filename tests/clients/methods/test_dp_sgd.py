"""The client of docs/dp-sgd.md, with Opacus itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord

from clients import client_app
from fl_admm_strategies import FedADMM, InProcessGrid
from tests.support.federation import client_fn_of, initial_arrays
from tests.test_guides import snippets

opacus = pytest.importorskip("opacus", reason="needs the extra 'privacy'")
pytestmark = pytest.mark.filterwarnings("ignore")  # Opacus warns of much

NUM_CLIENTS, EPOCHS, BATCHES = 3, 2, 2  # 10 to 12 samples, 8 at a time


@pytest.fixture(scope="module")
def client_class() -> Any:
    names: dict[str, Any] = {"__name__": "snippet"}
    (snippet,) = snippets("dp-sgd.md")
    exec(snippet, names)
    return names["DPSGDClient"]


def run(client_class: Any, num_rounds: int, epochs: int = EPOCHS, **settings: Any) -> FedADMM:
    strategy = FedADMM(seed=1, lr=0.1, local_epochs=epochs, fraction_evaluate=0, **settings)
    grid = InProcessGrid(client_app(client_fn_of(client_class)), NUM_CLIENTS)
    strategy.start(grid, initial_arrays(), num_rounds)
    return strategy


def numbers(arrays: ArrayRecord) -> Any:
    return np.concatenate([array.numpy().ravel() for array in arrays.values()])


def test_epsilon_is_of_all_rounds(client_class: Any) -> None:
    strategy = run(client_class, 3, rho=0.1)
    for server_round in (1, 2, 3):
        accountant = opacus.accountants.RDPAccountant()
        for _ in range(server_round * EPOCHS * BATCHES):
            accountant.step(noise_multiplier=1.0, sample_rate=1 / BATCHES)
        for metrics in strategy.train_metrics[server_round].values():
            expected = accountant.get_epsilon(1e-5)
            assert metrics["dp-sgd-epsilon"] == pytest.approx(expected, rel=1e-9)


def test_the_methods_terms_hold_against_the_noise(client_class: Any) -> None:
    start = numbers(initial_arrays())
    free, held = (run(client_class, 1, 20, rho=rho).global_arrays for rho in (1e-6, 9.0))
    # A step of 0.1 * 9 takes nine tenths of the way back to w, so that little but the last step's
    # noise is left; without it the noise of all 40 adds up, to six times that on average.
    assert np.linalg.norm(numbers(held) - start) < 0.5 * np.linalg.norm(numbers(free) - start)


def test_the_noise_does_not_follow_from_the_servers_seed(client_class: Any) -> None:
    one, other = (numbers(run(client_class, 1, rho=0.1).global_arrays) for _ in range(2))
    assert np.abs(one - other).min() > 0
