"""Clients that fail in every way they can, at random, in every round of a long run.

A client that is refused counts as not sampled: the run must end with the bits, on the server and
on the clients, of a run in which exactly those clients were not sampled. So every test here is a
comparison of two runs, with the same seed and one schedule of faults.
"""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MessageType
from flwr.client import NumPyClient
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray

from clients import client_app
from fl_admm_strategies import InProcessGrid, StatefulStrategy
from fl_admm_strategies.runtime.messages import identity
from tests.support.cases import CASES, CHEAP, NUM_CLIENTS, Case, case_of, each_case, run
from tests.support.federation import (
    assert_same_bits,
    assert_same_runs,
    client_fn_of,
    make_client,
    node_of,
    not_asking,
    run_on_ray,
    trained,
)
from tests.support.pace import fast
from tests.support.refusals import Warned, refused

# By client, the rounds in which it fails and how.
Schedule = Mapping[int, Mapping[int, str]]

SHARE_OF_FAULTS = 0.3


Spoil = Callable[[Message], list[Message]]


def last_array(change: Callable[[NDArray[Any]], NDArray[Any]]) -> Spoil:
    def spoil(reply: Message) -> list[Message]:
        # Where nothing is uploaded, an array that nobody wants will do.
        arrays = dict(reply.content.array_records["arrays"]) or {"extra": Array(np.zeros(2))}
        name = list(arrays)[-1]
        arrays[name] = Array(change(arrays[name].numpy()))
        reply.content["arrays"] = ArrayRecord(arrays)
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
    rounds = sorted({r for own in faults.values() for r in own})
    return not_asking(strategy, {r: [c for c in faults if r in faults[c]] for r in rounds})


def held(grid: InProcessGrid, strategy: StatefulStrategy) -> dict[str, NDArray[Any]]:
    """Return what every client holds of the round that the server takes it to be in.

    What it evaluated last is of no round, and is gone after a training, even one that failed.
    """
    arrays: dict[str, NDArray[Any]] = {}
    for client, version in strategy.membership.last_accepted.items():
        for key, record in grid.context(node_of(client)).state.array_records.items():
            ours = key == f"memory.{version}" if key.startswith("memory.") else key != "evaluated"
            if ours:
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
    assert_same_runs(strategy, expected)
    assert_same_bits(held(grid, strategy), held(well, expected))
    for node in grid.get_node_ids():  # what the server knows of, and what came after it
        assert sum(key.startswith("memory.") for key in grid.context(node).state) <= 2
    return strategy


@each_case
def test_clients_that_fail_are_as_if_not_sampled(case: Case) -> None:
    assert_no_trace(case, random_faults(5), 5)


@pytest.mark.long
@each_case
def test_clients_that_fail_are_as_if_not_sampled_for_100_rounds(case: Case) -> None:
    assert_no_trace(case, random_faults(100), 100)


VICTIM = 3


def test_a_client_that_vanishes_for_some_rounds_goes_on_where_it_was() -> None:
    case = case_of("FPFC")
    strategy = assert_no_trace(case, {VICTIM: dict.fromkeys((2, 3), AWAY)}, 4, fraction=1.0)
    assert [r for r, clients in trained(strategy).items() if VICTIM in clients] == [1, 4]


@pytest.mark.slow
def test_a_client_whose_process_dies_is_as_if_not_sampled(warned: Warned) -> None:
    faults = {client: {2: "dies"} for client in (0, VICTIM)}
    assert_no_trace(case_of("FPFC"), faults, 3, fraction=1.0, workers=2)
    assert warned("died")


# Others must not be late only because the machine is busy.
PATIENCE = 15.0


@pytest.mark.slow
def test_a_client_that_is_late_is_as_if_not_sampled(warned: Warned) -> None:
    faults = {client: {2: "late"} for client in (0, 1)}
    assert_no_trace(CHEAP, faults, 3, fraction=1.0, workers=3, timeout=PATIENCE)
    assert warned("timeout")


each_unlike_case = pytest.mark.parametrize(
    "case", [case for case in CASES if not case.variant], ids=lambda case: case.name
)


@pytest.mark.slow
@each_unlike_case
def test_faults_do_not_pile_up_in_the_clients_state(case: Case) -> None:
    faults = {c: {r: "lost" for r in range(3, 8) if (c + r) % 2} for c in range(NUM_CLIENTS)}
    grid, without = FaultyGrid(case, faults), FaultyGrid(case, {})
    run(case, grid, 8, strategy=strategy_of(case))
    run(case, without, 8, strategy=strategy_of(case))
    assert sizes(grid) == sizes(without)


# --- Nothing leaks ------------------------------------------------------------------------------


def what_stays(
    case: Case, faults: Schedule, num_rounds: int, width: int, in_use: Callable[[], int]
) -> int:
    """Return how many bytes more are in use after a run than before, with all that it made.

    A model has some 7 `width` numbers, so that beside its messages a history is nothing, and a
    message that stays behind now and then is a good part of what a run holds at its end.
    """
    large = case.enlarged(case, width)
    run(large, FaultyGrid(large, {}), 1)  # what is made once in a process
    gc.collect()
    before = in_use()
    with FaultyGrid(large, faults) as grid:
        strategy = run(large, grid, num_rounds, strategy=strategy_of(large, fraction=1.0))
        gc.collect()
        stays = in_use() - before
    # Nobody fails but who is meant to.
    trained = {len(clients) for clients in strategy.train_metrics.values()}
    assert len(strategy.train_metrics) == num_rounds
    assert (len(trained) > 1) == bool(faults)
    return stays


def large_in_cycles(least: int) -> list[str]:
    """Return the kinds of large arrays that nothing but the collector of cycles would free."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        found = [*gc.garbage, *gc.get_referents(*gc.garbage)]
        large = [item for item in found if type(item) is bytes and len(item) >= least]
        arrays = [item for item in found if isinstance(item, np.ndarray | torch.Tensor)]
        large += [array for array in arrays if array.nbytes >= least]
        return [type(item).__name__ for item in large]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.parametrize("case", fast(["FPFC"], CASES))
@pytest.mark.parametrize(
    "packed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["a node each", "packed"]
)
def test_no_large_array_outlives_its_round(case: Case, packed: bool) -> None:
    width = 6_000
    if not (case.two_heads or case.small_messages):
        case = case.enlarged(case, width)
    client_fn = client_fn_of(case.client_class)
    app = client_app(client_fn, num_clients=NUM_CLIENTS if packed else None)
    with InProcessGrid(app, 2 if packed else NUM_CLIENTS) as grid:
        gc.collect()
        gc.freeze()  # what was made before is not looked at
        gc.disable()
        try:
            strategy = run(case, grid, 2)  # kept: a strategy and its run refer to each other
            assert large_in_cycles(2 * width) == []
        finally:
            gc.enable()
            gc.unfreeze()
    assert strategy.last_round == 2


@pytest.mark.parametrize("name", fast(["FPFC"], ["FedAvg", "FPFC", "AsyncFPFC"]))
def test_a_strategy_whose_run_is_over_does_not_hold_the_clients_data(name: str) -> None:
    # The data are in the app's closure, the app in the grid.
    gc.collect()
    gc.disable()
    try:
        grid = InProcessGrid(client_app(client_fn_of(case_of(name).client_class)), NUM_CLIENTS)
        held = weakref.ref(grid)
        strategy = run(case_of(name), grid, 2)
        del grid
        assert held() is None
    finally:
        gc.enable()
    assert strategy.last_round == 2


def traced() -> int:
    return tracemalloc.get_traced_memory()[0]


# One that keeps most on the server and one that keeps most on the clients; all in the long form.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["FPFC", "FedAPM"])
def test_faults_leave_nothing_behind(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="flwr")  # pytest keeps all that is logged
    tracemalloc.start()
    try:
        well, ill = (
            what_stays(case_of(name), f, 10, 4_000, traced) for f in ({}, random_faults(10))
        )
    finally:
        tracemalloc.stop()
    assert well > 100_000
    assert ill <= 1.05 * well


def resident() -> int:
    """Return the bytes of this process in memory: PyTorch's, too, which Python does not trace."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def stays_in_a_process(case: Case, num_rounds: int, what: str) -> int:
    """Return what stays of a run in a process of its own."""
    # Every array is a mapping of its own, so that what is freed goes back to the system at once.
    exact = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "tests.contract.test_faults"]
    done = subprocess.run(
        [*command, case.name, str(num_rounds), what],
        cwd=Path(__file__).parents[2],
        env=os.environ | exact,
        capture_output=True,
        check=True,
        text=True,
    )
    return int(done.stdout)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize(
    "case",
    # What stays of a message that is smaller than a page of memory is not seen.
    [case for case in CASES if not case.small_messages],
    ids=lambda case: case.name,
)
def test_faults_leave_nothing_behind_in_100_rounds(case: Case) -> None:
    well, ill = (stays_in_a_process(case, 100, what) for what in ("well", "ill"))
    assert well > 1_000_000
    assert ill <= 1.05 * well


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text(encoding="ascii").split():
            found += [int(child), *descendants(int(child))]
    return found


def in_hand() -> dict[str, int]:
    gc.collect()
    return {
        "files and pipes": len(list(Path("/dev/fd").iterdir())),
        "threads": threading.active_count(),
        "processes": len(descendants(os.getpid())),
    }


def more_in_hand(before: dict[str, int]) -> dict[str, int]:
    return {what: number for what, number in in_hand().items() if number > before[what]}


@pytest.mark.slow
def test_workers_that_die_leave_no_pipe_thread_or_process() -> None:
    case, faults = CHEAP, random_faults(4)
    dying = {client: dict.fromkeys(rounds, "dies") for client, rounds in faults.items()}
    with FaultyGrid(case, dying, workers=2) as grid:
        before = in_hand()
        strategy = run(case, grid, 4, strategy=strategy_of(case, fraction=1.0))
        assert sum(map(len, strategy.train_metrics.values())) < 4 * NUM_CLIENTS - 3
        assert not more_in_hand(before)


def on_ray(case: Case, strategy: StatefulStrategy, faults: Schedule, **init_args: Any) -> None:
    """Run a strategy on two Ray actors, with clients that fail as scheduled."""
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy.start(grid, case.initial_arrays(), 6)

    def client_fn(context: Context) -> Any:
        own = faults.get(int(context.node_config["partition-id"]), {})
        return FailingClient(make_client(case.client_class, context), own).to_client()

    run_on_ray(server, client_app(client_fn), NUM_CLIENTS, **init_args)


@pytest.mark.slow
def test_a_dead_ray_actor_is_reported_at_once() -> None:
    strategy = strategy_of(CHEAP, fraction=1.0)
    with refused(RuntimeError, "Ray actor", "--resume"):
        on_ray(CHEAP, strategy, {VICTIM: {2: "dies"}})
    assert sorted(strategy.train_metrics) == [1]  # the round of the death changes nothing
    assert set(strategy.membership.last_accepted.values()) == {1}


@pytest.mark.parametrize("error", ["ActorDiedError", "ActorUnavailableError", "OutOfMemoryError"])
def test_every_way_to_lose_a_ray_actor_ends_the_run(
    error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine Ray calls an actor unavailable, until it has heard that it died."""
    monkeypatch.setattr(identity, "runs_on_ray", lambda: True)
    with refused(RuntimeError, "Ray actor", "--resume", error):
        identity.check_actor(f"<class 'ray.exceptions.{error}'>:<'The actor ...'>")


@pytest.mark.slow
def test_a_ray_actor_that_is_killed_for_memory_is_reported() -> None:
    """Ray's own monitor kills it: to a hundredth of the memory, every machine is full."""
    full = {"memory_usage_threshold": 0.01, "memory_monitor_refresh_ms": 100}
    strategy = CHEAP.strategy(fraction_train=1.0, node_timeout=600, seed=1)  # Ray may start slowly
    with refused(RuntimeError, "Ray actor", "--resume", "memory"):
        on_ray(CHEAP, strategy, {}, _system_config=full)
    assert not strategy.train_metrics


if __name__ == "__main__":  # for `stays_in_a_process`
    _, name, num_rounds, what = sys.argv
    torch.set_num_threads(1)
    faults = random_faults(int(num_rounds)) if what == "ill" else {}
    print(what_stays(case_of(name), faults, int(num_rounds), 40_000, resident))
