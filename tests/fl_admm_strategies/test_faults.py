"""Clients that fail in every way they can, at random, in every round of a long run.

A client that is refused counts as not sampled: the run must end with the bits, on the server and
on the clients, of a run in which exactly those clients were not sampled. So every test here is a
comparison of two runs, with the same seed and one schedule of faults.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MessageType
from flwr.client import NumPyClient
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from numpy.typing import NDArray

from clients import client_app
from fl_admm_strategies import InProcessGrid, StatefulStrategy
from tests.cases import CASES, NUM_CLIENTS, Case, each_case, forks, run
from tests.support import (
    assert_same_bits,
    make_client,
    node_of,
    warnings_in,
)

# By client, the rounds in which it fails and how.
Schedule = Mapping[int, Mapping[int, str]]

SHARE_OF_FAULTS = 0.3


Spoil = Callable[[Message], list[Message]]


def last_array(change: Callable[[NDArray[Any]], NDArray[Any]]) -> Spoil:
    def spoil(reply: Message) -> list[Message]:
        record = reply.content.array_records["arrays"]
        name = list(record)[-1]
        changed = {**record, name: Array(change(record[name].numpy()))}
        reply.content["arrays"] = ArrayRecord(changed)
        return [reply]

    return spoil


# What becomes of a reply on its way to the server. The client has moved on by then.
SPOILT: dict[str, Spoil] = {
    "wrong shape": last_array(lambda array: array.reshape(-1)[:-1]),
    "NaN": last_array(lambda array: np.full_like(array, np.nan)),
    "lost": lambda reply: [],
    "twice": lambda reply: [reply, reply],
}


def raise_error() -> None:
    raise OSError("the disk is full")


# What a client does at the end of its training, when its state has changed.
MISDEEDS: dict[str, Callable[[], None]] = {
    "raises": raise_error,
    "dies": lambda: os._exit(1),  # with workers only
    "late": lambda: time.sleep(600),  # with workers only, which are killed after the timeout
}

AWAY = "away"  # it does not get the message
KINDS = ["raises", AWAY, *SPOILT]


def random_faults(num_rounds: int) -> Schedule:
    rng = np.random.default_rng(7)
    return {
        client: {
            server_round: str(rng.choice(KINDS))
            for server_round in range(1, num_rounds + 1)
            if rng.random() < SHARE_OF_FAULTS
        }
        for client in range(NUM_CLIENTS)
    }


class FailingClient(NumPyClient):
    """A client that trains well and then does what the schedule says."""

    def __init__(self, client: NumPyClient, faults: Mapping[int, str]) -> None:
        self.client, self.faults = client, faults

    def fit(self, parameters: Any, config: Any) -> Any:
        result = self.client.fit(parameters, config)
        if misdeed := MISDEEDS.get(self.faults.get(config["server-round"], "")):
            misdeed()
        return result

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return self.client.evaluate(parameters, config)


class FaultyGrid(InProcessGrid):
    """Six clients, and a network between them and the server, that fail as scheduled."""

    def __init__(self, case: Case, faults: Schedule, **kwargs: Any) -> None:
        def client_fn(context: Context) -> Any:
            own = faults.get(int(context.node_config["partition-id"]), {})
            return FailingClient(make_client(case.client_class, context), own).to_client()

        super().__init__(client_app(client_fn), NUM_CLIENTS, **kwargs)
        self.faults = faults

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        delivered = [m for m in messages if self._fault(m, m.metadata.dst_node_id) != AWAY]
        arrived: list[Message] = []
        for reply in super().send_and_receive(delivered, timeout=timeout):
            spoil = SPOILT.get(self._fault(reply, reply.metadata.src_node_id))
            arrived += spoil(reply) if spoil else [reply]
        return arrived

    def _fault(self, message: Message, node: int) -> str:
        if message.metadata.message_type != MessageType.TRAIN:
            return ""
        faults = self.faults.get(node - node_of(0), {})
        return faults.get(int(message.metadata.group_id), "")


def strategy_of(case: Case, fraction: float = 0.67) -> StatefulStrategy:
    """Return a strategy that trains four of six, unless its algorithm needs them all."""
    fraction = 1.0 if case.everybody_trains else fraction
    return case.strategy(fraction_train=fraction, fraction_evaluate=0.17, seed=1)


def spare(strategy: StatefulStrategy, faults: Schedule) -> StatefulStrategy:
    """Make a strategy not ask the clients that would fail."""
    orders = strategy.train_orders

    def fewer_orders(server_round: int, client_ids: Sequence[int]) -> Any:
        well = [c for c in client_ids if server_round not in faults.get(c, {})]
        return orders(server_round, well)

    strategy.train_orders = fewer_orders  # type: ignore[method-assign]
    return strategy


def held(grid: InProcessGrid, strategy: StatefulStrategy) -> dict[str, NDArray[Any]]:
    """Return what every client holds of the round that the server takes it to be in."""
    arrays: dict[str, NDArray[Any]] = {}
    for client, version in strategy.accepted_in.items():
        for key, record in grid.context(node_of(client)).state.array_records.items():
            if not key.startswith("memory.") or key == f"memory.{version}":
                arrays |= {f"{client}/{key}/{name}": a.numpy() for name, a in record.items()}
    return arrays


def sizes(grid: InProcessGrid) -> dict[int, int]:
    """Return the bytes of every client's state."""
    return {
        node: sum(
            len(array.data)
            for record in grid.context(node).state.array_records.values()
            for array in record.values()
        )
        for node in grid.get_node_ids()
    }


def assert_no_trace(
    case: Case,
    faults: Schedule,
    num_rounds: int,
    *,
    fraction: float = 0.67,
    workers: int = 0,
    timeout: float = 600,
) -> StatefulStrategy:
    """Compare a run with faults to one in which the clients that fail are not asked."""
    with FaultyGrid(case, faults, workers=workers) as grid:
        strategy = strategy_of(case, fraction)
        strategy.start(grid, case.initial_arrays(), num_rounds, timeout=timeout)
    well = FaultyGrid(case, {})
    expected = run(case, well, num_rounds, strategy=spare(strategy_of(case, fraction), faults))
    assert_same_bits(strategy.state_dict(), expected.state_dict())
    assert strategy.train_metrics == expected.train_metrics
    assert strategy.evaluate_metrics == expected.evaluate_metrics
    assert_same_bits(held(grid, strategy), held(well, expected))
    for node in grid.get_node_ids():  # what the server knows of, and what came after it
        assert sum(key.startswith("memory.") for key in grid.context(node).state) <= 2
    return strategy


@each_case
def test_clients_that_fail_are_as_if_not_sampled(case: Case) -> None:
    assert_no_trace(case, random_faults(8), 8)


@pytest.mark.long
@each_case
def test_clients_that_fail_are_as_if_not_sampled_for_100_rounds(case: Case) -> None:
    assert_no_trace(case, random_faults(100), 100)


VICTIM = 3


@each_case
def test_a_client_that_vanishes_for_some_rounds_goes_on_where_it_was(case: Case) -> None:
    strategy = assert_no_trace(case, {VICTIM: dict.fromkeys((2, 3), AWAY)}, 4, fraction=1.0)
    took_part = [r for r, clients in strategy.train_metrics.items() if VICTIM in clients]
    assert took_part == [1, 4]


@forks
@each_case
def test_a_client_whose_process_dies_is_as_if_not_sampled(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    assert_no_trace(case, {c: {2: "dies"} for c in (0, VICTIM)}, 3, fraction=1.0, workers=2)
    assert any("died while it ran" in line for line in warnings_in(caplog.records))


# Others must not be late only because the machine is busy.
PATIENCE = 5.0

LATE_CASES = [
    pytest.param(case, id=case.name, marks=[pytest.mark.long] if number else [])
    for number, case in enumerate(CASES)
]


@forks
@pytest.mark.parametrize("case", LATE_CASES)
def test_a_client_that_is_late_is_as_if_not_sampled(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    faults = {client: {2: "late"} for client in (0, 1)}
    assert_no_trace(case, faults, 3, fraction=1.0, workers=3, timeout=PATIENCE)
    assert any("no reply within the timeout" in line for line in warnings_in(caplog.records))


@pytest.mark.slow
@each_case
def test_faults_do_not_pile_up_in_the_clients_state(case: Case) -> None:
    faults = {c: {r: "lost" for r in range(3, 8) if (c + r) % 2} for c in range(NUM_CLIENTS)}
    grid, without = FaultyGrid(case, faults), FaultyGrid(case, {})
    run(case, grid, 8, strategy=strategy_of(case))
    run(case, without, 8, strategy=strategy_of(case))
    assert sizes(grid) == sizes(without)


def on_ray(case: Case, strategy: StatefulStrategy, faults: Schedule) -> None:
    """Run a strategy on two Ray actors, with clients that fail as scheduled."""
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy.start(grid, case.initial_arrays(), 6)

    def client_fn(context: Context) -> Any:
        own = faults.get(int(context.node_config["partition-id"]), {})
        return FailingClient(make_client(case.client_class, context), own).to_client()

    run_simulation(
        server,
        client_app(client_fn),
        num_supernodes=NUM_CLIENTS,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": 2, "log_to_driver": False, "logging_level": "ERROR"},
        },
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
@pytest.mark.filterwarnings("ignore:unclosed :ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_dead_ray_actor_is_reported_at_once() -> None:
    strategy = strategy_of(CASES[0], fraction=1.0)
    with pytest.raises(RuntimeError, match=r"A Ray actor died.*--resume.*fewer workers"):
        on_ray(CASES[0], strategy, {VICTIM: {2: "dies"}})
    assert sorted(strategy.train_metrics) == [1]  # the round of the death changes nothing
    assert set(strategy.accepted_in.values()) == {1}
