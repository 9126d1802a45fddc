"""Where clients are hosted, and what runs them: the same to rounding, whatever a client raises.

One client a node or several, alone or together, are a check of `checks.py`. Here are Ray, worker
processes and Flower's legacy API, and the clients that fail in them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from clients import DittoClient, FedProxClient, client_app
from fl_admm_strategies import InProcessGrid, StatefulStrategy
from fl_admm_strategies.runtime.messages import identity
from tests.support.cases import (
    CASES,
    CHEAP,
    NUM_CLIENTS,
    Case,
    case_of,
    each_case,
    grid_of,
    plain,
    run,
    sampling,
)
from tests.support.federation import (
    ClientFn,
    Federation,
    assert_equal_to_rounding,
    assert_same_runs,
    client_fn_of,
    make_client,
    run_on_ray,
    trained,
)
from tests.support.legacy import run_legacy
from tests.support.refusals import Warned, refused

# --- Every method on every engine -----------------------------------------------------------------


@each_case
def test_the_legacy_api_gives_the_same(case: Case) -> None:
    strategy = sampling(case)
    grid = InProcessGrid(ClientApp(client_fn=client_fn_of(case.client_class)), NUM_CLIENTS)
    run_legacy(grid, strategy, case.initial_arrays(), 3)
    assert_equal_to_rounding(strategy, plain(case)[0])


@pytest.mark.slow
@each_case
def test_workers_give_the_same(case: Case) -> None:
    with grid_of(case, workers=2) as grid:
        assert_equal_to_rounding(run(case, grid, strategy=sampling(case)), plain(case)[0])


class AllCases(ClientApp):
    """The clients of all cases, under both APIs: a message says which one it is for.

    Every run has a state of its own on the nodes, as if it were a simulation of its own.
    """

    def __call__(self, message: Message, context: Context) -> Message:
        named = [c for c in message.content.config_records.values() if "case" in c]
        if not named:  # a question to all cases' clients, which answer it with their ids
            legacy = message.metadata.message_type != MessageType.QUERY
            return self.app(CASES[0], legacy)(message, context)
        (config,) = named
        prefix = f"{config['case']}/{config['legacy']}/"
        mine = {
            key.removeprefix(prefix): record
            for key, record in context.state.items()
            if key.startswith(prefix)
        }
        own = Context(
            run_id=context.run_id,
            node_id=context.node_id,
            node_config=context.node_config,
            state=RecordDict(mine),
            run_config=context.run_config,
        )
        app = self.app(case_of(str(config["case"])), bool(config["legacy"]))
        reply = app(message, own)
        context.state = RecordDict({prefix + key: record for key, record in own.state.items()})
        return reply

    @staticmethod
    def app(case: Case, legacy: bool) -> ClientApp:
        client_fn = client_fn_of(case.client_class)
        return ClientApp(client_fn=client_fn) if legacy else client_app(client_fn)


@pytest.mark.slow
def test_ray_gives_the_same() -> None:
    """All cases share one simulation: to start it takes longer than all of their runs."""
    server = ServerApp()
    compared: list[str] = []

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        grid.pull_interval = 0.01  # type: ignore[attr-defined] # seconds, Flower's is 0.1
        for case in CASES:
            for legacy in (False, True):
                config = ConfigRecord({"case": case.name, "legacy": legacy})
                configs: Any = {"train_config": config, "evaluate_config": config}
                strategy, arrays = sampling(case), case.initial_arrays()
                if legacy:
                    run_legacy(grid, strategy, arrays, 3, context, **configs)
                else:
                    strategy.start(grid, arrays, 3, **configs)
                assert_equal_to_rounding(strategy, plain(case)[0])
            compared.append(case.name)

    run_on_ray(server, AllCases(), NUM_CLIENTS)
    assert len(compared) == len(CASES)


# --- Clients that a process keeps, or trains together ---------------------------------------------


def counting(client_fn: ClientFn, made: Counter[int]) -> ClientFn:
    """Return a client_fn that counts how often it made each client."""

    def counted(context: Context) -> Any:
        made[int(context.node_config["partition-id"])] += 1
        return client_fn(context)

    return counted


@pytest.mark.parametrize("cohort", [False, True])
def test_a_client_that_fails_fails_alone_and_is_made_anew(cohort: bool, warned: Warned) -> None:
    made: Counter[int] = Counter()

    class Failing(DittoClient):
        def train(self, asked: Any, config: Any) -> Any:
            if config["server-round"] == 2 and self.context.node_config["partition-id"] == 4:
                raise OSError("the disk is full")
            return super().train(asked, config)

    Failing.__module__ = DittoClient.__module__  # else none is kept
    case = case_of("Ditto")
    options: Any = {"num_clients": NUM_CLIENTS, "keep_clients": True, "cohort": cohort}
    app = client_app(counting(client_fn_of(Failing), made), **options)
    strategy = case.strategy(seed=1, fraction_evaluate=0)
    run(case, Federation(app, 2), 4, strategy)
    assert trained(strategy)[2] == [0, 1, 2, 3, 5]
    assert trained(strategy)[4] == list(range(NUM_CLIENTS))
    assert warned("client 4", "OSError: the disk is full")
    assert made == Counter([*range(NUM_CLIENTS), 4])


def test_a_client_fn_that_raises_fails_its_client_alone(warned: Warned) -> None:
    case = case_of("FedProx")

    def client_fn(context: Context) -> Any:
        if context.node_config["partition-id"] == 4:
            raise SystemExit(3)
        return client_fn_of(case.client_class)(context)

    app = client_app(client_fn, num_clients=NUM_CLIENTS, cohort=True)
    strategy = run(case, Federation(app, 2), 1)
    assert trained(strategy)[1] == [0, 1, 2, 3, 5]
    assert warned("client 4", "SystemExit: 3")


# --- Whatever a client raises ---------------------------------------------------------------------


class Mute(Exception):  # noqa: N818
    """An error that raises another one when it is shown."""

    def __str__(self) -> str:
        raise LookupError

    __repr__ = __str__


class Exiting(ValueError):  # noqa: N818
    def __str__(self) -> str:
        sys.exit(3)


class BadNotes(ValueError):  # noqa: N818
    @property
    def __notes__(self) -> list[str]:
        raise KeyboardInterrupt


STRANGE: dict[str, Callable[[], BaseException]] = {
    "Mute: (no text: its __str__ raises LookupError)": Mute,
    "__str__ raises SystemExit": Exiting,
    "BadNotes": BadNotes,
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit: 0": lambda: SystemExit(0),
    "GeneratorExit": GeneratorExit,
    "xxxxx": lambda: ValueError("\x1b[2J\u202e" + "x" * 10**6),
}
VICTIM = 3
ROUNDS = 1 + len(STRANGE)


class StrangeClient(FedProxClient):
    """A client that in every round raises something else."""

    def train(self, asked: Any, config: Any) -> Any:
        result = super().train(asked, config)
        # A client that has never answered leaves the run; this one has, in round 1.
        if self.context.node_config["partition-id"] == VICTIM and config["server-round"] > 1:
            raise list(STRANGE.values())[config["server-round"] - 2]()
        return result


def assert_that_only_the_victim_failed(strategy: StatefulStrategy, warned: Warned) -> None:
    others = [client for client in range(NUM_CLIENTS) if client != VICTIM]
    assert all(trained(strategy)[server_round] == others for server_round in range(2, ROUNDS + 1))
    lines = warned(f"client {VICTIM} refused")
    for line, name in zip(lines, STRANGE, strict=True):
        assert name in line
        assert line.isprintable()
        assert len(line) < 600


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_whatever_a_client_raises_it_fails_alone(workers: int, warned: Warned) -> None:
    case = case_of("FedProx")
    app = client_app(client_fn_of(StrangeClient), num_clients=NUM_CLIENTS)
    with Federation(app, 2, workers=workers) as grid:
        strategy = run(case, grid, ROUNDS, case.strategy(fraction_evaluate=0.0))
    assert_that_only_the_victim_failed(strategy, warned)


@pytest.mark.slow
def test_on_ray_too(warned: Warned) -> None:
    case, server = case_of("FedProx"), ServerApp()
    strategy = case.strategy(fraction_evaluate=0.0)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        run(case, grid, ROUNDS, strategy)

    run_on_ray(server, client_app(client_fn_of(StrangeClient)), NUM_CLIENTS)
    assert_that_only_the_victim_failed(strategy, warned)


# --- Processes that die ---------------------------------------------------------------------------


class Mortal:
    """A client_fn whose clients end their process when they train in some round."""

    def __init__(self, client_class: Any, deaths: dict[int, int]) -> None:
        self.client_class, self.deaths = client_class, deaths

    def __call__(self, context: Context) -> Any:
        client: Any = make_client(self.client_class, context)
        fit, last = client.fit, self.deaths.get(int(context.node_config["partition-id"]))

        def mortal_fit(parameters: Any, config: Any) -> Any:
            if config["server-round"] == last:
                os._exit(1)
            return fit(parameters, config)

        client.fit = mortal_fit
        return client.to_client()


def in_hand() -> dict[str, int]:
    """Return how many files and threads the process has."""
    return {"files": len(list(Path("/dev/fd").iterdir())), "threads": threading.active_count()}


@pytest.mark.slow
def test_a_client_whose_process_dies_fails_alone_and_leaves_nothing(warned: Warned) -> None:
    case = case_of("FPFC")
    app = client_app(Mortal(case.client_class, {0: 2, VICTIM: 2}))
    with Federation(app, NUM_CLIENTS, workers=2) as grid:
        before = in_hand()
        strategy = run(case, grid, 3)
        assert all(number <= before[name] for name, number in in_hand().items())
    lost = {client: {2: "away"} for client in (0, VICTIM)}
    assert_equal_to_rounding(strategy, run(case, grid_of(case, faults=lost), 3))
    assert warned("client 0 refused", "exit code 1")
    assert warned(f"client {VICTIM} refused", "exit code 1")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "is killed for memory"])
def test_a_lost_ray_actor_is_reported_at_once(how: str) -> None:
    """Ray's own monitor kills it: to a hundredth of the memory, every machine is full."""
    full: Any = {"memory_usage_threshold": 0.01, "memory_monitor_refresh_ms": 100}
    options = {} if how == "dies" else {"_system_config": full}
    deaths = {VICTIM: 2} if how == "dies" else {}
    strategy = CHEAP.strategy(node_timeout=600, seed=1)  # Ray may start slowly
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy.start(grid, CHEAP.initial_arrays(), 6)

    with refused(RuntimeError, "Ray actor", "--resume"):
        app = client_app(Mortal(CHEAP.client_class, deaths))
        run_on_ray(server, app, NUM_CLIENTS, **options)
    assert sorted(strategy.train_metrics) == ([1] if how == "dies" else [])


@pytest.mark.parametrize("error", ["ActorDiedError", "ActorUnavailableError", "OutOfMemoryError"])
def test_every_way_to_lose_a_ray_actor_ends_the_run(
    error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine Ray calls an actor unavailable, until it has heard that it died."""
    monkeypatch.setattr(identity, "runs_on_ray", lambda: True)
    with refused(RuntimeError, "Ray actor", "--resume", error):
        identity.check_actor(f"<class 'ray.exceptions.{error}'>:<'The actor ...'>")


# --- A fixed layout repeats its bits --------------------------------------------------------------


@pytest.mark.parametrize("name", ["FPFC", "FedAPM"])
def test_a_cohort_repeats_its_bits(name: str) -> None:
    case, options = case_of(name), {"num_clients": NUM_CLIENTS, "cohort": True}
    runs = [
        run(case, grid_of(case, 2, app_options=options), strategy=sampling(case)) for _ in range(2)
    ]
    assert_same_runs(*runs)
