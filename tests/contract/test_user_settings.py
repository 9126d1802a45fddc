"""Settings that the user gives: those given twice, and those that do not exist."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, MessageType, RecordDict

from clients import (
    FedGiALinearClient,
    FedMCADMMClient,
    FPFCClient,
    LeastSquares,
    Ratings,
)
from fl_admm_strategies import FPFC, FedGiA, FedProx, SmoothedSCAD, SquaredL2
from fl_admm_strategies.runtime.common.settings import parameters_of
from fl_admm_strategies.runtime.reserved import OF_EVERY_MESSAGE
from tests.support.cases import Case, at_any_pace, case_of, each_case, grid_of, plain
from tests.support.federation import initial_arrays, make_client
from tests.support.refusals import refused

# --- Given twice --------------------------------------------------------------------------------


UNTOUCHED: Any = object()
"""A grid that nobody may ask anything."""

CONFIGS = {"train_config": MessageType.TRAIN, "evaluate_config": MessageType.EVALUATE}


def sent(case: Case, message_type: str) -> set[str]:
    """Return the settings in the messages of a run."""
    _, grid = plain(case)
    handshake = [0] if case.shakes_hands and message_type == MessageType.TRAIN else []
    messages = [message for r in [*handshake, 1, 2, 3] for message in grid.phase(message_type, r)]
    return {key for message in messages for key in message.content["config"]}


@pytest.mark.parametrize("which", CONFIGS)
@each_case
def test_what_the_strategy_sends_is_refused_before_anything_is_sent(case: Case, which: str) -> None:
    strategy, arrays = case.strategy(), case.initial_arrays()
    name = type(strategy).__name__
    keys = sent(case, CONFIGS[which])
    stamp = {f"made-by.{name}"} if strategy.method else set()
    assert {"server-round", "seed", "groups"} | stamp <= keys
    for key in sorted(keys | OF_EVERY_MESSAGE):
        config: dict[str, Any] = {which: ConfigRecord({"mine": 1, key: 1})}
        with refused(ValueError, which, f"'{key}'", name):
            strategy.start(UNTOUCHED, arrays, **config)
    assert not strategy.run.has_begun


@each_case
def test_a_parameter_of_the_strategy_is_no_setting_of_the_clients(case: Case) -> None:
    strategy = case.strategy()
    name = type(strategy).__name__
    for parameter in parameters_of(type(strategy)):
        for key in (parameter, parameter.replace("_", "-")):
            with refused(ValueError, f"'{key}'", f"{name}({parameter}"):
                config = ConfigRecord({key: 1})
                strategy.start(UNTOUCHED, case.initial_arrays(), train_config=config)


def test_a_loop_of_ones_own_is_refused_as_well() -> None:
    strategy, config = fpfc(), ConfigRecord({"rho": 1.0})
    for call in (strategy.configure_train, strategy.configure_evaluate):
        with refused(ValueError, "'rho'", "FPFC"):
            call(1, initial_arrays(), config, UNTOUCHED)


def test_settings_of_the_users_own_are_welcome() -> None:
    strategy, grid = fpfc(), grid_of(case_of("FPFC"))
    config = ConfigRecord({"mine": 3})
    strategy.start(grid, initial_arrays(), 1, train_config=config, evaluate_config=config)
    for kind in CONFIGS.values():
        assert all(m.content["config"]["mine"] == 3 for m in grid.phase(kind, 1))


def fpfc(**settings: Any) -> FPFC:
    return FPFC(SmoothedSCAD(0.5), lr=0.2, **settings)


# --- Unknown parameters -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("fraction_fit", "fraction_train"),
        ("fraction_trian", "fraction_train"),
        ("min_fit_clients", "min_train_nodes"),
        ("min_evaluate_clients", "min_evaluate_nodes"),
        ("min_available_clients", "min_available_nodes"),
        ("rhos", "rho"),
        ("learning_rate", "lr"),
        ("epochs", "local_epochs"),
        ("sead", "seed"),
    ],
)
def test_a_typo_gets_the_right_name(given: str, meant: str) -> None:
    with refused(TypeError, given, "FPFC", meant):
        fpfc(**{given: 1})


@at_any_pace
def test_so_it_does_for_every_strategy_and_client(case: Case) -> None:
    name = type(case.strategy()).__name__
    with refused(TypeError, "sed", name, "seed"):
        case.strategy(sed=1)
    if not isinstance(case.client_class, type):  # a function of the tests
        return
    client_class = partial(case.client_class, state_dirr="x")
    with refused(TypeError, "state_dirr", "state_dir"):
        make_client(client_class, new_context())


def new_context() -> Context:
    return Context(1, 2, {}, RecordDict(), {})


def test_other_mistakes_are_told_too() -> None:
    with refused(TypeError, "proximal_mu", "FedProx", "mu"):
        FedProx(proximal_mu=0.1)  # type: ignore[call-arg]
    with refused(TypeError, "FPFC", "evaluate_fn", "start"):
        fpfc(evaluate_fn=print)
    with refused(TypeError, "FedGiA", "seed"):
        FedGiA(zzz=1)  # type: ignore[call-arg]
    with refused(TypeError, "rho", "FPFCClient", "FPFC"):
        make_client(partial(FPFCClient, rho=1), new_context())
    problem = LeastSquares(np.eye(2), np.zeros(2))
    with refused(TypeError, "test_probelm", "test_problem"):
        FedGiALinearClient(new_context(), problem, test_probelm=problem)  # type: ignore[arg-type]
    users = Ratings(np.zeros(1, int), np.zeros(1, int), np.ones(1), 1, 1)
    with refused(TypeError, "tset", "FedMCADMMClient", "test"):
        FedMCADMMClient(new_context(), users, SquaredL2(1), tset=users)  # type: ignore[arg-type]
