"""Settings are what the constructor takes: for the log, for the resume identity, for the app."""

from __future__ import annotations

import inspect
from dataclasses import field
from typing import Any, ClassVar, Literal

import pytest

from fl_admm_strategies import (
    SmoothedSCAD,
    StepDecay,
)
from fl_admm_strategies.maths.blocks import Pattern
from fl_admm_strategies.maths.checks import WholeNumber
from fl_admm_strategies.maths.schedules import StepSize
from fl_admm_strategies.runtime.common.settings import (
    HasSettings,
    as_text,
    changed_settings,
    parameters_of,
    settings_of,
)
from tests.support.refusals import refused

# --- Settings as fields -------------------------------------------------------------------------


class Base(HasSettings):
    seed: WholeNumber = 0
    note: ClassVar[str] = "no setting"


class Left(Base):
    head: Pattern | None = field(kw_only=False)
    lr: StepSize | None = None


class Right(Base):
    mode: Literal["a", "b"] = "a"
    rows: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rows = {self.mode: self.seed}


class Both(Left, Right):
    seed: WholeNumber = 7


class ByHand(Both):
    """A constructor of its own, as of settings that no annotation can say."""

    def __init__(self, extra: float = 1.0, **base: Any) -> None:
        super().__init__("^head", **base)
        self.extra = extra


def test_fields_make_the_constructor() -> None:
    assert list(parameters_of(Both)) == ["head", "seed", "lr", "mode"]
    assert settings_of(Both(None)) == {"head": None, "seed": 7, "lr": None, "mode": "a"}
    assert Both("^x", seed=3).rows == {"a": 3}
    made = ByHand(2.0, mode="b")
    assert settings_of(made) == {"extra": 2.0, "head": "^head", "seed": 7, "lr": None, "mode": "b"}
    assert list(inspect.signature(ByHand).parameters) == ["extra", "base"]


@pytest.mark.parametrize(
    ("error", "named", "settings"),
    [
        (ValueError, ["seed", "-1"], {"seed": -1}),
        (TypeError, ["seed", "True"], {"seed": True}),
        (ValueError, ["mode", "'c'"], {"mode": "c"}),
        (ValueError, ["lr", "0"], {"lr": 0}),
        (TypeError, ["lr", "'x'"], {"lr": "x"}),
        (TypeError, ["modes", "mode"], {"modes": "a"}),
        (TypeError, ["note", "Both"], {"note": "a"}),
    ],
)
def test_fields_are_checked_by_their_types(
    error: type[Exception], named: list[str], settings: dict[str, Any]
) -> None:
    with refused(error, *named):
        Both("^x", **settings)
    with refused(error, *named[:1]):
        ByHand(**settings)


def test_what_is_needed_is_asked_for() -> None:
    with refused(TypeError, "Both", "head"):
        Both()
    with refused(ValueError, "head"):
        Both("(")


# --- As text ------------------------------------------------------------------------------------


class Opaque:
    """Without a repr of its own."""


class Named:
    def __repr__(self) -> str:
        return "Named()"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("w_i", "w_i"),
        (0.1, "0.1"),
        (None, "None"),
        ({3: 0.5}, "{3: 0.5}"),
        (SmoothedSCAD(0.5), repr(SmoothedSCAD(0.5))),
        (StepDecay(0.1, 0.9, every=5), "StepDecay(initial=0.1, factor=0.9, every=5)"),
        (Named(), "Named()"),
        (lambda server_round: 0.1, None),
        (Opaque(), None),
        ([Opaque()], None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_what_reads_the_same_in_every_process_has_a_text(value: Any, text: str | None) -> None:
    assert as_text(value) == text


def test_what_changed_is_said_by_name() -> None:
    before = {"lr": "0.1", "rho": "1.0", "gone": "3", "epochs": None, "schedule": None}
    now = {"lr": "0.1", "rho": "2.0", "epochs": None, "schedule": "5", "max_steps": "9"}
    assert changed_settings(before, now) == [
        "rho 2.0 (was 1.0)",
        "gone not given (was 3)",
        "epochs is a function, which cannot be compared with the saved run's",
        "schedule is a function, which cannot be compared with the saved run's",
        "max_steps 9 (was not given)",
    ]
    assert changed_settings(before | {"epochs": "1", "schedule": "5"}, before) == [
        "epochs is a function, which cannot be compared with the saved run's",
        "schedule is a function, which cannot be compared with the saved run's",
    ]
    assert changed_settings(now | {"epochs": "1"}, now | {"epochs": "1"}) == []


# --- StepDecay ----------------------------------------------------------------------------------


def test_a_step_decay_by_hand() -> None:
    schedule = StepDecay(0.8, factor=0.5, every=2)
    assert [schedule(server_round) for server_round in range(1, 7)] == [
        0.8,
        0.8,
        0.4,
        0.4,
        0.2,
        0.2,
    ]
    assert [StepDecay(1.0, 0.5)(server_round) for server_round in (1, 2, 3)] == [1.0, 0.5, 0.25]
    assert StepDecay(0.01, 0.9) == StepDecay(0.01, 0.9, every=1)


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ((0, 0.5), ValueError, ["initial", 0]),
        ((0.1, 0), ValueError, ["factor", 0]),
        ((0.1, 1.5), ValueError, ["factor", 1.5]),
        ((0.1, 0.5, 0), ValueError, ["every", 0]),
        ((0.1, 0.5, 1.0), TypeError, ["every", 1.0]),
    ],
)
def test_a_step_decay_refuses(arguments: Any, error: type[Exception], named: list[Any]) -> None:
    with refused(error, *named):
        StepDecay(*arguments)
