"""The penalties and their proximal operators against their definitions and hand-made numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_admm_strategies.maths.penalties import L1, MCP, Penalty, Rescaled, SmoothedSCAD
from tests.support.refusals import refused

SCAD = SmoothedSCAD(lam=0.6)  # a = 3.7, xi = 1e-4: the paper's own values
# (penalty, rho): every one passes check(rho).
CASES: list[tuple[Penalty, float]] = [
    (SmoothedSCAD(lam=lam, xi=xi), rho)
    for lam in (0.3, 0.6, 2.0)
    for xi in (1e-4, 0.05)
    for rho in (0.5, 1.0, 3.0)
]
CASES += [(L1(lam), rho) for lam in (0.3, 2.0) for rho in (0.5, 3.0)]
CASES += [(MCP(lam), rho) for lam in (0.3, 2.0) for rho in (0.5, 3.0)]
CASES += [(Rescaled(one, 3.0), 0.1) for one in (SCAD, L1(0.6), MCP(0.6))]


def test_scad_values() -> None:
    # P(1) = [3.7*.6*1 - .5(1 + .36)]/2.7 = 1.54/2.7; P(t > 2.22) = .36*4.7/2;
    # P(t <= xi) = 3000 t^2 + 3e-5.
    t = np.array([0.0, 5e-5, 1e-4, 0.3, 0.6, 1.0, 2.22, 5.0, 1e200])
    expected = [3e-5, 3.75e-5, 6e-5, 0.18, 0.36, 1.54 / 2.7, 0.846, 0.846, 0.846]
    np.testing.assert_allclose(SCAD.value(t), expected, rtol=1e-12)


def test_mcp_values() -> None:
    # lam t - t^2/(2 gamma): .6*.9 - .81/6 = .405; constant gamma lam^2/2 = .54 from 1.8 on.
    np.testing.assert_allclose(MCP(0.6).value([0.0, 0.9, 1.8, 9.0]), [0, 0.405, 0.54, 0.54])


def test_scad_prox_vector() -> None:
    # By hand from (6) with rho = 1: first regime .0001/.6001 delta; second delta - .6; third
    # (2.7 delta - 2.22)/1.7; last delta.
    delta = np.array([0.3, 0.5, 0.8, 1.0, 1.2, 1.5, 1.8, 2.2, 2.22, 3.0])
    first = 1e-4 / 0.6001
    third = (2.7 * delta[5:8] - 2.22) / 1.7
    expected = [0.3 * first, 0.5 * first, 0.2, 0.4, 0.6, *third, 2.22, 3.0]
    np.testing.assert_allclose(SCAD.prox_scale(delta, 1.0) * delta, expected, atol=1e-12)
    printed = [4.99916681e-5, 8.33194468e-5, 0.2, 0.4, 0.6, 1.07647059, 1.55294118, 2.18823529]
    np.testing.assert_allclose(expected[:8], printed, rtol=1e-8)


@pytest.mark.parametrize(("penalty", "rho"), CASES)
def test_prox_is_the_minimiser(penalty: Penalty, rho: float) -> None:
    penalty.check(rho)
    for r in (1e-5, 0.01, 0.3, 0.7, 1.1, 1.7, 3.0, 6.0, 9.0):
        grid = np.linspace(0, 1.2 * r, 20001)
        objective = penalty.value(grid) + rho / 2 * (r - grid) ** 2
        best = penalty.prox_scale(r, rho) * r
        ours = penalty.value(best) + rho / 2 * (r - best) ** 2
        assert ours <= objective.min() + 1e-12
        # The objective is strongly convex, so the argument agrees as well.
        assert abs(best - grid[objective.argmin()]) <= 1.2 * r / 20000 + 1e-9


@settings(max_examples=30)
@given(r=st.floats(0, 1e300), case=st.sampled_from(CASES))
def test_scale_is_in_the_unit_interval_and_the_dual_is_bounded(r, case):
    penalty, rho = case
    s = float(penalty.prox_scale(r, rho))
    assert 0 <= s <= 1
    assert rho * (1 - s) * r <= penalty.lam * (1 + 1e-9) + 1e-14 * rho * r  # type: ignore[attr-defined]


def test_scale_at_zero_and_beyond_the_far_border() -> None:
    assert SCAD.prox_scale(0.0, 1.0) == pytest.approx(1e-4 / 0.6001)
    assert L1(0.6).prox_scale(0.0, 1.0) == 0.0
    assert MCP(0.6).prox_scale(0.0, 1.0) == 0.0
    far = [np.nextafter(2.22, 3), 3.0, 1e300, np.inf]
    assert (SCAD.prox_scale(far, 1.0) == 1.0).all()
    assert (MCP(0.6).prox_scale([np.nextafter(1.8, 3), np.inf], 1.0) == 1.0).all()
    assert np.isnan(SCAD.prox_scale(np.nan, 1.0))


@pytest.mark.parametrize("penalty", [SmoothedSCAD(0.0), L1(0.0), MCP(0.0)])
def test_without_strength_there_is_no_fusion(penalty: Penalty) -> None:
    penalty.check(1e-3)  # any rho > 0 will do
    r = np.array([0.0, 1e-9, 1.0, 1e9])
    assert (penalty.prox_scale(r, 1e-3) == 1.0).all()
    assert (penalty.value(r) == 0).all()


@pytest.mark.parametrize(
    ("make", "name", "value", "error"),
    [
        *((penalty, "lam", -0.1, ValueError) for penalty in (SmoothedSCAD, L1, MCP)),
        (SmoothedSCAD, "a", 1.0, ValueError),
        (SmoothedSCAD, "xi", 0.0, ValueError),
        (SmoothedSCAD, "xi", 0.6, ValueError),
        (SmoothedSCAD, "xi", False, TypeError),
        (MCP, "gamma", 0, ValueError),
        *((p.check, "rho", 0.0, ValueError) for p in (SCAD, L1(0.6), MCP(0.6))),
        (SmoothedSCAD(0.0).check, "rho", np.inf, ValueError),
    ],
)
def test_bad_parameters_are_refused(make: Any, name: str, value: Any, error: Any) -> None:
    lam = {"lam": 0.6} if make in (SmoothedSCAD, MCP) else {}
    with refused(error, name, value):
        make(**lam | {name: value})


def test_rho_too_small_for_a_unique_minimiser_is_refused() -> None:
    with refused(ValueError, "rho", 0.5, "a = 3"):
        SmoothedSCAD(0.6, a=3).check(0.5)
    SmoothedSCAD(0.6, a=3).check(0.51)
    with refused(ValueError, "rho", 0.5, "gamma = 2"):
        MCP(0.6, gamma=2).check(0.5)
    MCP(0.6, gamma=2).check(0.51)


def test_numpy_numbers_are_accepted() -> None:
    SmoothedSCAD(np.float32(0.5), a=np.int64(4)).check(np.float64(1))
