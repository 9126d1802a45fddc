"""A Ray actor that dies under Flower's legacy API: the run ends at once, and the remedy works.

Flower's legacy loops turn every error of a client into a failure among others, which a strategy may
pass over. On Ray the first one after a death would not be the last.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fl_admm_strategies import LegacyStrategy, StatefulStrategy, run_in_process
from fl_admm_strategies.runtime.messages import identity
from tests.support.cases import NUM_CLIENTS, case_of
from tests.support.federation import assert_same_runs, make_client, run_on_ray
from tests.support.legacy import with_server_fn, with_workflow
from tests.support.refusals import refused

# Its server shakes hands, and its clients hold what the server does not.
CASE = case_of("FedADMM-client-duals")
NUM_ROUNDS = 3
VICTIM = 3

Engine = Callable[[ServerApp, ClientApp], object]
Loop = Callable[[LegacyStrategy, int], ServerApp]


def in_process(server: ServerApp, clients: ClientApp) -> None:
    run_in_process(server, clients, NUM_CLIENTS)


def on_ray(server: ServerApp, clients: ClientApp) -> None:
    run_on_ray(server, clients, NUM_CLIENTS)


def die() -> None:
    os._exit(1)


def pretend() -> None:
    """Raise what Flower makes of the death of an actor."""
    raise RuntimeError(
        "<class 'ray.exceptions.ActorDiedError'>:<'The actor died unexpectedly before finishing "
        "this task.\n\tclass_name: ClientAppActor\n\tpid: 28990\nThe actor is dead because ...'>"
    )


class Mortal(NumPyClient):
    """A client that may die when it is asked who it is, shakes hands, trains or evaluates."""

    def __init__(self, client: NumPyClient, where: str, end: Callable[[], None]) -> None:
        self.client, self.where, self.end = client, where, end

    def _pass(self, where: str) -> None:
        if where == self.where:
            self.end()

    def get_properties(self, config: Any) -> Any:
        self._pass("query")
        return self.client.get_properties(config)

    def fit(self, parameters: Any, config: Any) -> Any:
        result = self.client.fit(parameters, config)
        self._pass(f"training {config['server-round']}")
        return result

    def evaluate(self, parameters: Any, config: Any) -> Any:
        self._pass(f"evaluation {config['server-round']}")
        return self.client.evaluate(parameters, config)


def start(
    strategy: StatefulStrategy,
    loop: Loop,
    engine: Engine,
    folder: Path,
    where: str = "",
    end: Callable[[], None] = die,
) -> None:
    """Run a strategy, or resume it, with a victim that dies somewhere."""
    arrays = CASE.initial_arrays()
    checkpoints = folder / "checkpoints"
    legacy = LegacyStrategy(strategy, arrays, checkpoint_dir=checkpoints, resume=True)
    client_class = partial(CASE.client_class, state_dir=folder / "clients")

    def client_fn(context: Context) -> Any:
        victim = int(context.node_config["partition-id"]) == VICTIM
        client = make_client(client_class, context)
        return Mortal(client, where if victim else "", end).to_client()

    engine(loop(legacy, NUM_ROUNDS), ClientApp(client_fn=client_fn))


# By where the victim dies, the rounds of training that are over by then.
DEATHS = {"query": [], "training 0": [], "training 2": [1], "evaluation 2": [1, 2]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> StatefulStrategy:
    """Return a run in which nobody died."""
    strategy = CASE.strategy(seed=1)
    start(strategy, with_workflow, in_process, tmp_path_factory.mktemp("whole"))
    return strategy


def check(
    loop: Loop,
    engine: Engine,
    folder: Path,
    where: str,
    whole: StatefulStrategy,
    end: Callable[[], None] = die,
) -> None:
    """Let an actor die in a run, then resume it and compare with a run in which none did."""
    strategy = CASE.strategy(seed=1)
    with refused(RuntimeError, "Ray actor", "--resume"):
        start(strategy, loop, engine, folder, where, end)
    assert list(strategy.train_metrics) == DEATHS[where]
    resumed = CASE.strategy(seed=1)
    start(resumed, loop, in_process, folder)
    assert_same_runs(resumed, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "where"),
    [
        (with_server_fn, "training 2"),
        *((with_workflow, where) for where in ("query", "training 0", "evaluation 2")),
    ],
)
def test_a_dead_actor_ends_the_run_with_what_to_do(loop, where, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "runs_on_ray", lambda: True)
    check(loop, in_process, tmp_path, where, whole, pretend)


@pytest.mark.parametrize(
    ("loop", "where"),
    [
        pytest.param(with_workflow, "training 2", marks=pytest.mark.slow),
        *(pytest.param(with_server_fn, where, marks=pytest.mark.long) for where in DEATHS),
    ],
)
def test_a_dead_ray_actor_is_reported_at_once(loop, where, whole, tmp_path):
    check(loop, on_ray, tmp_path, where, whole)
