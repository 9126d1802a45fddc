"""What a method leaves with its client leaves it only if the client's app says that it may."""

from __future__ import annotations

import contextvars
from typing import Any

import pytest
from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from clients import LocalClient, answer, client_app
from fl_admm_strategies import InProcessGrid, Local
from tests.support.cases import Case, case_of, grid_of
from tests.support.federation import client_fn_of, initial_arrays, make_client, run_on_ray
from tests.support.refusals import Warned, refused

SPLIT = [case_of(n) for n in ("FedAPM", "FedAlt", "FedRoD", "FedCP", "FedSim", "LG-FedAvg")]


class Deployed(InProcessGrid):
    """A grid whose clients know of no simulation, as on a site of their own."""

    def __init__(self, app: Any, num_nodes: int) -> None:
        def alone(message: Message, context: Context) -> Message:
            reply: Message = contextvars.Context().run(app, message, context)
            return reply

        super().__init__(alone, num_nodes)


def collected(app: Any, num_nodes: int = 3) -> dict[int, Any]:
    strategy = Local(lr=0.1)
    strategy.start(Deployed(app, num_nodes), initial_arrays(), 1, collect=True)
    return dict(strategy.models().personal)


@pytest.mark.parametrize("settings", [{}, {"num_clients": 3}])
def test_a_site_is_asked_whether_its_models_may_be_collected(
    settings: dict[str, Any], warned: Warned
) -> None:
    client_fn = client_fn_of(LocalClient)
    assert not collected(client_app(client_fn, **settings))
    assert all(warned(f"client {client}", "may_collect=True") for client in range(3))
    assert sorted(collected(client_app(client_fn, may_collect=True, **settings))) == [0, 1, 2]


def test_each_site_may_decide_for_itself(warned: Warned) -> None:
    app = client_app(
        client_fn_of(LocalClient),
        may_collect=lambda context: context.node_config["partition-id"] != 1,
    )
    assert sorted(collected(app)) == [0, 2]
    assert warned("client 1", "may_collect=True")


@pytest.mark.parametrize("may_collect", [False, True])
def test_handlers_of_ones_own_decide_as_well(may_collect: bool) -> None:
    app = client_app()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = make_client(LocalClient, context)
        return answer(client, message, may_collect=may_collect)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return answer(make_client(LocalClient, context), message)

    assert bool(collected(app)) == may_collect


@pytest.mark.parametrize("case", SPLIT, ids=lambda case: case.name)
def test_a_server_that_names_personal_arrays_does_not_get_them(case: Case) -> None:
    strategy: Any = case.strategy(seed=1)
    strategy.upload_spec = lambda: strategy.model_spec
    with refused(RuntimeError, strategy.personal, "not sent"):
        strategy.start(grid_of(case), case.initial_arrays(), 1)


@pytest.mark.slow
def test_flowers_simulation_is_one() -> None:
    strategy, app = Local(lr=0.1), ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy.start(grid, initial_arrays(), 1, collect=True)

    run_on_ray(app, client_app(client_fn_of(LocalClient)), 2)
    assert sorted(strategy.models().personal) == [0, 1]
