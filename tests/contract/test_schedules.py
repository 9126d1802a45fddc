"""A step size is a number or a function of the round, in every method."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import pytest
from flwr.app import MessageType

from fl_admm_strategies import StepDecay
from fl_admm_strategies.runtime.common.settings import parameters_of
from tests.support.cases import Case, at_any_pace, case_of, each_case, grid_of, run

STEP_SIZES = {"lr", "personal_lr", "outer_lr", "weight_lr", "alpha"}


def step_sizes(case: Case) -> set[str]:
    """Return the step sizes of a method, each of which may be a function of the round."""
    hints = get_type_hints(type(case.strategy()))
    found = STEP_SIZES & parameters_of(type(case.strategy())).keys()
    found -= {"alpha"} if case.name == "FedDyn" else set()  # a penalty there
    schedules = {name for name, hint in hints.items() if Callable[[int], float] in get_args(hint)}
    assert found == schedules
    return found


@each_case
def test_a_step_size_is_that_of_the_round(case: Case) -> None:
    schedules: dict[str, Any] = {
        name: StepDecay(0.02 + place / 100, 0.5) for place, name in enumerate(step_sizes(case))
    }
    if case.name == "FPFC-path":  # every lambda of a path begins its schedule anew
        return
    grid = grid_of(case)
    run(case, grid, 2, case.strategy(fraction_evaluate=0.0, **schedules))
    for server_round in (1, 2):
        for message in grid.phase(MessageType.TRAIN, server_round):
            for name, schedule in schedules.items():
                assert message.content["config"][name.replace("_", "-")] == schedule(server_round)


def check_refused(case: Case, bad: Any) -> None:
    for name in step_sizes(case):
        with pytest.raises((ValueError, TypeError), match=rf"{name} in round 1 is"):
            run(case, grid_of(case), 1, case.strategy(**{name: lambda server_round: bad}))


@at_any_pace
def test_a_bad_step_size_of_a_round_is_refused_by_name(case: Case) -> None:
    check_refused(case, -0.1)


@pytest.mark.parametrize("bad", [math.nan, "0.1", None], ids=repr)
def test_so_is_one_that_is_no_number(bad: Any) -> None:
    check_refused(case_of("FPFC"), bad)
