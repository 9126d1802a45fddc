"""Tables derived from constructors: what they build, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from fl_admm_strategies import L1, MCP, GrowingEpochs, SmoothedSCAD, StepDecay
from simulations.experiments.loading import load_settings
from tests.support.refusals import refused


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("algorithm.lr=2", 2.0),  # an integer is a number
        ("algorithm.lr={ initial = 0.1, factor = 0.9, every = 5 }", StepDecay(0.1, 0.9, 5)),
        ("algorithm.penalty={ type = 'scad', lam = 0.6 }", SmoothedSCAD(0.6)),
        ("algorithm.penalty={ type = 'l1', lam = 1 }", L1(1.0)),
        ("algorithm.penalty={ type = 'mcp', lam = 1, gamma = 2.5 }", MCP(1.0, 2.5)),
        ("algorithm.local-epochs={ type = 'growing', every = 2 }", GrowingEpochs(2)),
    ],
)
def test_a_setting_is_the_argument(change: str, value: Any) -> None:
    name = change.partition("=")[0].partition(".")[2].replace("-", "_")
    table = load_settings("digits-fpfc", changes=[change]).algorithm
    assert getattr(table.build(), name) == value
    # As a file, and back.
    written = table.model_dump(by_alias=True, exclude_none=True)
    assert type(table).model_validate(written) == table


SCAD = "algorithm.penalty={type='scad', lam=0.6}"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("algorithm.lam=1", ["algorithm.lam", "FPFC", "penalty"]),
        ("algorithm.eta=1", ["algorithm.eta", "lr"]),  # as others call it
        ("algorithm.lr='0.1'", ["algorithm.lr", "'0.1'", "number"]),
        ("algorithm.rho=true", ["algorithm.rho", "True"]),
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
