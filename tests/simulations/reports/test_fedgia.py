"""FedGiA in the app: what a run reports, what is refused, and the paper's table."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fl_admm_strategies import FedGiA
from simulations.data import load
from simulations.experiments.experiment import RunConfig, load_experiment
from simulations.methods import run_here
from tests.simulations.quick_runs import result_of, run

SMALL = ("data.options.clients=4",)


@pytest.mark.slow
def test_a_run_reports_table_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(RunConfig("fedgia-v1", changes=SMALL, out=tmp_path / "run"))
    result, text = result_of(out), capsys.readouterr().out
    data = load("synthetic-v1", 1, clients=4)
    # The optimum by the normal equations; f is uniform in the clients, whatever their sizes
    gram = sum(a.T @ a / len(b) for a, b in data.clients)
    x = np.linalg.solve(gram, sum(a.T @ b / len(b) for a, b in data.clients))
    best = np.mean([np.mean((a @ x - b) ** 2) / 2 for a, b in data.clients])
    assert result["squared_gradient"] <= 100 * 1e-9
    assert result["objective"] == pytest.approx(best, rel=1e-5)
    assert result["cells"]["one global model"]["cr"] == result["rounds"] - 1
    assert result["models"]["one global model"]["mean"] == pytest.approx(best, rel=1e-5)
    assert "did not get there" not in text
    assert "FedGiA_D, k0=5 on fedgia-v1" in text
    assert "Published" not in text  # which are of more clients
    assert (out / "gradient.png").stat().st_size > 10_000


FORMS = [(hessian, k0) for hessian in ("gram", "diagonal") for k0 in (1, 5, 10)]


def of_the_end(name: str, hessian: str, k0: int, seed: int = 1) -> FedGiA:
    """Return FedGiA where the gradient is small."""
    changes = (f"algorithm.hessian={hessian}", f"algorithm.local-steps={k0}")
    experiment = load_experiment(RunConfig(name, changes=changes, seed=seed))
    federation = experiment.federation
    strategy: FedGiA = federation.strategy()
    rounds, stop = experiment.settings.training.num_rounds, strategy.gradient_tolerance(1e-9)
    run_here(federation, strategy, num_rounds=rounds, evaluate_every=rounds, stop=stop)
    return strategy


@pytest.fixture
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.usefixtures("_quiet")
def test_example_v1_takes_the_published_number_of_rounds() -> None:
    """Table III, 20 trials: G 13.6, 7.4, 6.1 and D 18.4, 10.1, 7.0 for k0 = 1, 5, 10.

    How the three distributions are mixed is not printed, and with it r = max r_i is not: of ours,
    CR at k0 = 10 goes from 6.8 to 11.7 where t goes from 0.13 to 0.18.
    """
    trials = [
        [of_the_end("fedgia-v1", h, k0, seed).communication_rounds for h, k0 in FORMS]
        for seed in range(6)
    ]
    np.testing.assert_allclose(np.mean(trials, axis=0), [13.6, 7.4, 6.1, 18.4, 10.1, 7.0], atol=3)


@pytest.mark.slow
@pytest.mark.skipif(
    not (Path(os.environ.get("FL_ADMM_DATA", "")) / "qsar-oral-toxicity").is_dir(),
    reason="FL_ADMM_DATA has no qsar-oral-toxicity",
)
@pytest.mark.usefixtures("_quiet")
def test_qsar_reaches_the_published_objective() -> None:
    """Table III: f = 0.236 after 19.8 or 19.9 rounds; CR goes with the smallest client's r_i."""
    for hessian, k0 in FORMS:
        found = of_the_end("fedgia-qsar", hessian, k0)
        assert found.metrics("train", {}, {})["objective"] == pytest.approx(0.236, abs=0.01)
        assert found.communication_rounds == pytest.approx(19.9, abs=3)
