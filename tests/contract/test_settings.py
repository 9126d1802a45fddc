"""Settings: what a setting cannot be, and what is no setting, is refused by name."""

from __future__ import annotations

import inspect
from functools import partial
from math import inf, nan
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, MessageType, RecordDict

import fl_admm_strategies as library
from clients import FedGiALinearClient, FedMCADMMClient, FPFCClient, LeastSquares, Ratings
from fl_admm_strategies import FPFC, FedProx, SmoothedSCAD, SquaredL2, StatefulStrategy
from fl_admm_strategies.runtime.common.settings import parameters_of
from tests.support.cases import case_of, grid_of
from tests.support.federation import initial_arrays, make_client
from tests.support.refusals import refused

# By the type of a setting: values that are of its kind but out of range, and others that are none.
CHOICE: Any = ["?", 3], []
UNTESTED: Any = [], []
WRONG: dict[str, tuple[Any, Any]] = {
    "Positive": ([0, -1.0, nan, inf], ["x", True]),
    "StepSize": ([0, -1.0, nan, inf], ["x", True]),
    "NotNegative": ([-1.0, nan, inf], ["x", True]),
    "StepSizeOrZero": ([-1.0, nan, inf], ["x", True]),
    "Count": ([0, -1], [1.5, "x", True]),
    "EpochSchedule": ([0, -1], [1.5, "x", True]),
    "WholeNumber": ([-1], [1.5, "x", True]),
    "Fraction": ([0, 1.5, nan], ["x", True]),
    "Share": ([-0.1, 1.5, nan], ["x", True]),
    "Pattern": (["("], []),
    "MaxNorm": ([0, nan, "median"], [True]),
    "MetricsAggrFn": ([], [3, "mean"]),
    **dict.fromkeys(["Weights", "Duals", "Measure", "Linkage", "Aggregation"], CHOICE),
    # Objects, whose own tests say what they cannot be.
    **dict.fromkeys(["bool", "ClientDP", "WireDtype", "GivenPenalty"], UNTESTED),
    **dict.fromkeys(["str | Mapping[int, str]", "Penalty | Literal['auto']"], UNTESTED),
    "NotNegative | Callable[[int, int], float]": UNTESTED,
    "Annotated[Regularizer, check_regularizer]": UNTESTED,
}

# What constructors cannot do without.
NEEDED: dict[str, dict[str, Any]] = {
    "eps1": {"eps1": 0.1, "eps2": 0.2},
    "num_clusters": {"num_clusters": 2},
    "threshold": {"threshold": 10.0},
    "penalty": {"penalty": SmoothedSCAD(0.5)},
    "personal": {"personal": None},
    "regularizer": {"regularizer": SquaredL2(0.1)},
}

STRATEGIES = [
    kind
    for name in library.__all__
    if inspect.isclass(kind := getattr(library, name))
    and issubclass(kind, StatefulStrategy)
    and not inspect.isabstract(kind)
]
each_strategy = pytest.mark.parametrize("kind", STRATEGIES, ids=lambda kind: kind.__name__)


def given(kind: Any, **settings: Any) -> Any:
    needed = [own for name, own in NEEDED.items() if name in parameters_of(kind)]
    return kind(**{k: v for own in needed for k, v in own.items()} | settings)


@each_strategy
def test_what_a_setting_cannot_be_is_refused_by_name(kind: Any) -> None:
    for name, parameter in parameters_of(kind).items():
        annotation = str(parameter.annotation).removesuffix(" | None")
        values, types = CHOICE if annotation.startswith("Literal") else WRONG[annotation]
        for error, wrong in ((ValueError, values), (TypeError, types)):
            for value in wrong:
                with refused(error, name, value):
                    given(kind, **{name: value})


@each_strategy
def test_a_strategy_made_of_its_settings_has_the_same(kind: Any) -> None:
    parameters = parameters_of(kind)
    strategy = given(kind, seed=3, node_timeout=7.0)
    settings = strategy.settings()
    assert list(settings) == list(parameters)
    assert (settings["seed"], settings["node_timeout"]) == (3, 7.0)
    for name in parameters.keys() - {"seed", "node_timeout", *NEEDED, "eps2"}:
        assert settings[name] == parameters[name].default, name
    assert kind(**settings).settings() == settings


# --- What is no setting ---------------------------------------------------------------------------


def fpfc(**settings: Any) -> FPFC:
    return FPFC(SmoothedSCAD(0.5), lr=0.2, **settings)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("fraction_fit", "fraction_train"),
        ("min_evaluate_clients", "min_evaluate_nodes"),
        ("rhos", "rho"),
        ("learning_rate", "lr"),
        ("epochs", "local_epochs"),
        ("sead", "seed"),
    ],
)
def test_a_typo_gets_the_right_name(given: str, meant: str) -> None:
    with refused(TypeError, given, "FPFC", meant):
        fpfc(**{given: 1})


def test_a_setting_in_the_wrong_place_is_told_its_place() -> None:
    context = Context(1, 2, {}, RecordDict(), {})
    with refused(TypeError, "proximal_mu", "FedProx", "mu"):
        FedProx(proximal_mu=0.1)  # type: ignore[call-arg]
    with refused(TypeError, "FPFC", "evaluate_fn", "start"):
        fpfc(evaluate_fn=print)
    with refused(TypeError, "rho", "FPFCClient", "FPFC"):
        make_client(partial(FPFCClient, rho=1), context)
    with refused(TypeError, "state_dirr", "state_dir"):
        make_client(partial(FPFCClient, state_dirr="x"), context)
    problem = LeastSquares(np.eye(2), np.zeros(2))
    with refused(TypeError, "test_probelm", "test_problem"):
        FedGiALinearClient(context, problem, test_probelm=problem)  # type: ignore[arg-type]
    users = Ratings(np.zeros(1, int), np.zeros(1, int), np.ones(1), 1, 1)
    with refused(TypeError, "tset", "FedMCADMMClient", "test"):
        FedMCADMMClient(context, users, SquaredL2(1), tset=users)  # type: ignore[arg-type]


def test_settings_of_the_users_own_are_welcome() -> None:
    strategy, grid = fpfc(), grid_of(case_of("FPFC"))
    config = ConfigRecord({"mine": 3})
    strategy.start(grid, initial_arrays(), 1, train_config=config, evaluate_config=config)
    for kind in (MessageType.TRAIN, MessageType.EVALUATE):
        assert all(m.content["config"]["mine"] == 3 for m in grid.phase(kind, 1))
    with refused(ValueError, "'rho'", "FPFC"):
        strategy.configure_train(1, initial_arrays(), ConfigRecord({"rho": 1.0}), grid)
