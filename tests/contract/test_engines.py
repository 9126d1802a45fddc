"""Where clients are hosted, and what runs them: the same to rounding, whatever a client raises.

One client a node or several, alone or together, are a check of `checks.py`. Here are Ray, worker
processes and Flower's legacy API, and the clients that fail in them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp

from clients import DittoClient, client_app
from fl_admm_strategies import InProcessGrid
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
    """The clients of all cases: a message says which one it is for.

    Every run has a state of its own on the nodes, as if it were a simulation of its own.
    """

    def __call__(self, message: Message, context: Context) -> Message:
        named = [str(c["case"]) for c in message.content.config_records.values() if "case" in c]
        case = case_of((named or [CASES[0].name])[0])  # a question is to all, who answer alike
        app, prefix = client_app(client_fn_of(case.client_class)), f"{case.name}/"
        whole = context.state
        context.state = RecordDict(
            {k.removeprefix(prefix): whole[k] for k in whole if k.startswith(prefix)}
        )
        reply = app(message, context)
        own = {prefix + key: record for key, record in context.state.items()}
        others = {key: record for key, record in whole.items() if not key.startswith(prefix)}
        context.state = RecordDict(others | own)
        return reply


@pytest.mark.slow
def test_ray_gives_the_same() -> None:
    """All cases share one simulation: to start it takes longer than all of their runs."""
    server = ServerApp()
    compared: list[str] = []

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        grid.pull_interval = 0.01  # type: ignore[attr-defined] # seconds, Flower's is 0.1
        for case in CASES:
            config, strategy = ConfigRecord({"case": case.name}), sampling(case)
            configs: Any = {"train_config": config, "evaluate_config": config}
            strategy.start(grid, case.initial_arrays(), 3, **configs)
            assert_equal_to_rounding(strategy, plain(case)[0])
            compared.append(case.name)

    run_on_ray(server, AllCases(), NUM_CLIENTS)
    assert len(compared) == len(CASES)


# --- Whatever a client raises ---------------------------------------------------------------------

VICTIM = 3


class Mute(Exception):  # noqa: N818
    """An error that raises another one when it is shown."""

    def __str__(self) -> str:
        raise LookupError


STRANGE: dict[str, Callable[[], BaseException]] = {
    "OSError: the disk is full": lambda: OSError("the disk is full"),
    "Mute: (no text: its __str__ raises LookupError)": Mute,
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit: 0": lambda: SystemExit(0),
    "xxxxx": lambda: ValueError("\x1b[2J\u202e" + "x" * 10**6),
}


class StrangeClient(DittoClient):
    """A client that in every round but the first raises something else."""

    def train(self, asked: Any, config: Any) -> Any:
        result = super().train(asked, config)
        # A client that has never answered leaves the run; this one has, in round 1.
        if self.context.node_config["partition-id"] == VICTIM and config["server-round"] > 1:
            raise list(STRANGE.values())[config["server-round"] - 2]()
        return result


@pytest.mark.parametrize(
    ("workers", "cohort"), [(0, False), (0, True), pytest.param(2, False, marks=pytest.mark.slow)]
)
def test_whatever_a_client_raises_it_fails_alone(
    workers: int, cohort: bool, warned: Warned, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cohort:  # a client of a user's own class is not kept
        monkeypatch.setattr(StrangeClient, "__module__", DittoClient.__module__)
    case, num_rounds = case_of("Ditto"), 1 + len(STRANGE)
    options: Any = {"num_clients": NUM_CLIENTS, "keep_clients": True, "cohort": cohort}
    app = client_app(client_fn_of(StrangeClient), **options)
    with Federation(app, 2, workers=workers) as grid:
        strategy = run(case, grid, num_rounds, case.strategy(fraction_evaluate=0.0))
    others = [client for client in range(NUM_CLIENTS) if client != VICTIM]
    assert all(trained(strategy)[r] == others for r in range(2, num_rounds + 1))
    lines = warned(f"client {VICTIM} refused")
    for line, name in zip(lines, STRANGE, strict=True):
        assert name in line
        assert line.isprintable()
        assert len(line) < 600


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


@pytest.mark.slow
def test_a_client_whose_process_dies_fails_alone(warned: Warned) -> None:
    case = case_of("FPFC")
    app = client_app(Mortal(case.client_class, {0: 2, VICTIM: 2}))
    with Federation(app, NUM_CLIENTS, workers=2) as grid:
        strategy = run(case, grid, 3)
    lost = {client: {2: "away"} for client in (0, VICTIM)}
    assert_equal_to_rounding(strategy, run(case, grid_of(case, faults=lost), 3))
    assert warned("client 0 refused", "exit code 1")
    assert warned(f"client {VICTIM} refused", "exit code 1")


@pytest.mark.slow
def test_a_lost_ray_actor_is_reported_at_once() -> None:
    strategy = CHEAP.strategy(node_timeout=600, seed=1)  # Ray may start slowly
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy.start(grid, CHEAP.initial_arrays(), 6)

    with refused(RuntimeError, "Ray actor", "--resume"):
        run_on_ray(server, client_app(Mortal(CHEAP.client_class, {VICTIM: 2})), NUM_CLIENTS)
    assert sorted(strategy.train_metrics) == [1]


@pytest.mark.parametrize("error", ["ActorDiedError", "ActorUnavailableError", "OutOfMemoryError"])
def test_every_way_to_lose_a_ray_actor_ends_the_run(
    error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine Ray calls an actor unavailable, until it has heard that it died."""
    monkeypatch.setattr(identity, "runs_on_ray", lambda: True)
    reason = f"<class 'ray.exceptions.{error}'>:<'The actor ...'>"
    with refused(RuntimeError, "Ray actor", "--resume", error):
        identity.check_actor(Error(ErrorCode.UNKNOWN, reason))
    identity.check_actor(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason))  # a client's words


def test_ray_may_be_half_imported_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    assert not identity.runs_on_ray()


# --- A fixed layout repeats its bits --------------------------------------------------------------


@pytest.mark.parametrize("name", ["FPFC", "FedAPM"])
def test_a_cohort_repeats_its_bits(name: str) -> None:
    case, options = case_of(name), {"num_clients": NUM_CLIENTS, "cohort": True}
    runs = [
        run(case, grid_of(case, 2, app_options=options), strategy=sampling(case)) for _ in range(2)
    ]
    assert_same_runs(*runs)
