"""One bad of m: every method, at every stage of a run, beside every kind of bad client.

The others' run starts, goes on and ends, all of them take part in every round, and their models are
about as good as without the bad client. What is said beside the training changes no bit of it.
What is far beyond the others is refused by default; the papers' forms need `max_norm="auto"` for
that, and so does everybody for lies that are as large as honest uploads (docs/robustness.md).
AsyncFPFC and quick clients: test_async_fpfc.py; ids that a node claims: test_one_bad.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import pytest

from clients import client_app
from fl_admm_strategies import StatefulStrategy
from fl_admm_strategies.runtime.saving.state import arrays_of
from tests.support.cases import AT_ANY_PACE, Case, case_of
from tests.support.federation import assert_same_bits, client_fn_of
from tests.support.onebad import BEHAVIOURS, CLAIMS, HUGE, LATE, LIES, SILENT, OneBad
from tests.support.pace import fast

M, BAD = 6, 4
OTHERS = [client for client in range(M) if client != BAD]
ROUNDS = 4
BESIDE = ("layout", "evaluate", "collect")
"""What does not enter the state."""
JOINING = {0: [2 + c for c in OTHERS], 2: [2 + c for c in range(M)]}
WITHIN = {("FedMC-ADMM-client-duals", LIES)}
"""Handshakes in which three times the opposite is as large as honest answers are: no bound sees it,
and Y_i^0 counts with a client's share."""


SHAKING = [case for case in AT_ANY_PACE if case.shakes_hands]
behaviours = pytest.mark.parametrize("behaviour", fast([SILENT, LIES, CLAIMS], BEHAVIOURS))


def run(
    case: Case,
    clients: Iterable[int] = range(M),
    stages: Iterable[str] = (),
    behaviour: str = "",
    rounds: int = ROUNDS,
    online: Any = None,
    **settings: Any,
) -> StatefulStrategy:
    strategy, is_async = case.strategy(seed=1, **settings), case.name == "AsyncFPFC"
    rounds *= M if is_async else 1
    app = client_app(client_fn_of(case.client_class))
    with OneBad(app, clients, BAD, tuple(stages), behaviour, online) as grid:
        strategy.start(
            grid,
            case.initial_arrays(),
            rounds,
            timeout=0.2 if is_async else 3600,  # a simulated clock waits for who is due
            evaluate_every=rounds,
            collect=True,
        )
    assert strategy.last_round == rounds
    return strategy


@cache
def good(case: Case, clients: tuple[int, ...] = tuple(range(M)), **settings: Any) -> Any:
    """Return a run in which nobody is bad; only to read."""
    return run(case, clients, **settings)


def loss(strategy: StatefulStrategy) -> float:
    """Return the others' mean loss with the model that the method shows first."""
    last = strategy.evaluate_metrics[strategy.last_round]
    assert set(OTHERS) <= last.keys()
    name = f"{next(iter(strategy.kinds))}-loss"
    return float(np.mean([last[c].get(name, last[c]["loss"]) for c in OTHERS]))


def assert_unharmed(strategy: StatefulStrategy, case: Case, **settings: Any) -> None:
    """Compare with runs in which the bad client is honest, and in which it is not there."""
    assert set(OTHERS) <= set(strategy.client_ids)
    if case.name != "AsyncFPFC" and not settings:
        assert all(set(OTHERS) <= set(found) for found in strategy.train_metrics.values())
    usual = max(loss(good(case, **settings)), loss(good(case, tuple(OTHERS), **settings)))
    assert loss(strategy) < 1.25 * usual + 0.1


def bounded(case: Case, behaviour: str) -> dict[str, Any]:
    """Return the settings under which a method holds false uploads."""
    is_papers = getattr(case.strategy(), "published", False)
    if behaviour != LIES and not (behaviour == HUGE and is_papers):
        return {}
    return {"max_norm": "auto"}


@pytest.mark.parametrize("case", fast(["FedMC-ADMM"], AT_ANY_PACE))
@behaviours
def test_beside_the_training(case: Case, behaviour: str) -> None:
    strategy, honest = run(case, stages=BESIDE, behaviour=behaviour), good(case)
    if behaviour == LATE:  # its reply about the layout comes beside that of round 1: both are lost
        assert_unharmed(strategy, case)
        return
    assert_same_bits(arrays_of(strategy.state), arrays_of(honest.state))
    last = strategy.last_round
    for client in OTHERS:
        assert strategy.evaluate_metrics[last][client] == honest.evaluate_metrics[last][client]
    if "personal" in strategy.kinds:
        assert set(OTHERS) <= strategy.personal_models().keys()


@pytest.mark.parametrize("case", fast(["FedMC-ADMM"], AT_ANY_PACE))
@behaviours
def test_in_training(case: Case, behaviour: str) -> None:
    settings = bounded(case, behaviour)
    strategy = run(case, stages=["train"], behaviour=behaviour, **settings)
    assert_unharmed(strategy, case, **settings)


@pytest.mark.parametrize("case", fast(["FedGiA-gram"], SHAKING))
@behaviours
def test_in_the_handshake(case: Case, behaviour: str) -> None:
    strategy = run(case, stages=["handshake"], behaviour=behaviour)
    if (case.name, behaviour) not in WITHIN:
        assert_unharmed(strategy, case)


@pytest.mark.parametrize(
    "case",
    fast(["FedGiA-gram"], [case for case in AT_ANY_PACE if case.shakes_hands or not case.variant]),
)
@behaviours
def test_in_joining(case: Case, behaviour: str) -> None:
    settings = bounded(case, behaviour)
    strategy = run(
        case, stages=["handshake", "train"], behaviour=behaviour, online=JOINING, **settings
    )
    assert_unharmed(strategy, case, **settings)


@pytest.mark.slow
@behaviours
def test_in_the_search_of_fpfc(behaviour: str) -> None:
    case = case_of("FPFC-auto")
    strategy = run(case, stages=["train"], behaviour=behaviour, rounds=40)
    usual = max(loss(run(case, clients, rounds=40)) for clients in (range(M), OTHERS))
    assert loss(strategy) < 1.25 * usual + 0.1


@pytest.mark.slow
@behaviours
def test_of_clients_that_take_turns(behaviour: str) -> None:
    case = case_of("FedADMM")
    settings = {"fraction_train": 0.5, **bounded(case, behaviour)}
    strategy = run(case, stages=["train"], behaviour=behaviour, rounds=12, **settings)
    taken = [client for clients in strategy.train_metrics.values() for client in clients]
    assert all(taken.count(client) >= 4 for client in OTHERS)
    usual = max(loss(run(case, clients, rounds=12, **settings)) for clients in (range(M), OTHERS))
    assert loss(strategy) < 1.25 * usual + 0.1
