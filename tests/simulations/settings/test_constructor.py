"""Tables derived from constructors: their types, what they build, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from pydantic import ValidationError

from fl_admm_strategies import (
    MCP,
    SmoothedSCAD,
    StepDecay,
)
from fl_admm_strategies.maths.checks import check_positive
from fl_admm_strategies.maths.penalties import Penalty
from simulations.experiments.loading import load_settings
from simulations.settings.constructor import table_of
from tests.support.refusals import refused


@dataclass(frozen=True)
class Box:
    """An object with two numbers."""

    low: float
    high: float = 1.0

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"low is {self.low}, expected less than high = {self.high}.")


class Base:
    def __init__(self, *, shared: int = 3, seed: int = 0) -> None:
        self.shared, self.seed = shared, seed


class Thing(Base):
    """A bit of everything."""

    def __init__(
        self,
        box: Box,
        *,
        step_size: float | Callable[[int], float] = 0.5,
        penalty: Penalty | None = None,
        mode: Literal["fast", "slow"] = "fast",
        limit: int | Mapping[int, int] | None = None,
        loud: bool = False,
        hook: Callable[[str], str] | None = None,
        **base: Any,
    ) -> None:
        super().__init__(**base)
        if not callable(step_size):
            check_positive("step_size", step_size)
        self.box, self.step_size, self.penalty, self.mode = box, step_size, penalty, mode


TABLE = table_of(Thing, withheld={"seed": "It is the run's."})


def build(raw: dict[str, Any]) -> Any:
    return TABLE.model_validate(raw).build()


def test_parameters_that_toml_can_hold_are_settings_those_passed_on_among_them() -> None:
    fields = {field.alias: field for field in TABLE.model_fields.values()}
    names = ["box", "step-size", "penalty", "mode", "limit", "loud", "shared"]
    assert list(fields) == names  # neither the function nor what is withheld
    assert [name for name, field in fields.items() if field.is_required()] == ["box"]
    thing = build({"box": {"low": 0}, "shared": 5})
    assert (thing.box, thing.step_size, thing.mode, thing.shared) == (Box(0.0), 0.5, "fast", 5)


@pytest.mark.parametrize(
    ("raw", "parameter", "value"),
    [
        ({"step-size": 2}, "step_size", 2.0),  # an integer is a number
        (
            {"step-size": {"initial": 0.1, "factor": 0.9, "every": 5}},
            "step_size",
            StepDecay(0.1, 0.9, 5),
        ),
        ({"penalty": {"type": "scad", "lam": 0.6}}, "penalty", SmoothedSCAD(0.6)),
        ({"penalty": {"type": "mcp", "lam": 1, "gamma": 2.5}}, "penalty", MCP(1.0, 2.5)),
        ({"box": {"low": -1, "high": 0.5}}, "box", Box(-1.0, 0.5)),
    ],
)
def test_a_setting_is_the_argument(raw: dict[str, Any], parameter: str, value: object) -> None:
    table = TABLE.model_validate({"box": {"low": 0}} | raw)
    assert getattr(table.build(), parameter) == value
    # As a file, and back.
    written = table.model_dump(by_alias=True, exclude_none=True)
    assert TABLE.model_validate(written) == table


@pytest.mark.parametrize(
    ("raw", "kind", "place"),
    [
        ({}, "missing", ("box",)),
        ({"box": {}}, "missing", ("box", "<table>", "low")),
        ({"box": {"low": "0"}}, "float_type", ("box", "<table>", "low")),
        ({"step-size": "fast"}, "float_type", ("step-size", "<value>")),
        ({"penalty": {"type": "ridge", "lam": 1}}, "choice", ("penalty",)),
        ({"penalty": {"type": "l1", "lam": 1, "a": 3}}, "value_error", ("penalty", "<l1>")),
        ({"seed": 1}, "value_error", ()),
    ],
)
def test_another_type_is_refused(raw: dict[str, Any], kind: str, place: tuple[str, ...]) -> None:
    box = {} if raw == {} or "box" in raw else {"box": {"low": 0}}
    with pytest.raises(ValidationError) as mistakes:
        TABLE.model_validate(box | raw)
    assert (kind, place) in [(one["type"], one["loc"]) for one in mistakes.value.errors()]


# --- The methods that there are -------------------------------------------------------------------


SCAD = "algorithm.penalty={type='scad', lam=0.6}"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("algorithm.lam=1", ["algorithm.lam", "FPFC", "penalty"]),
        ("algorithm.eta=1", ["algorithm.eta", "lr"]),  # as others call it
        ("algorithm.fraction-fit=1", ["algorithm.fraction-fit", "training.fraction-train"]),
        ("algorithm.penalty.lam=-1", ["algorithm.penalty.lam", "-1.0"]),
        ("algorithm.penalty=ridge", ["algorithm.penalty", "ridge", "scad", "path", "auto"]),
        ("algorithm.local-epochs={ type = 'random', most = 0 }", ["algorithm.local-epochs.most"]),
        ("client.model=1", ["client.model", "[model]"]),
    ],
)
def test_mistakes_are_named_by_their_dotted_key(change: str, named: list[object]) -> None:
    with refused(ValueError, *named):
        load_settings("digits-fpfc", changes=[SCAD, change])
