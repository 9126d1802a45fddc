"""The proximal operators against their definition and the paper's formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fl_admm_strategies.maths.regularizers import L1Norm, Regularizer, SquaredL2
from tests.support.refusals import refused

BOTH = [SquaredL2(0.7), L1Norm(0.7)]


@pytest.mark.parametrize("regularizer", BOTH, ids=repr)
@pytest.mark.parametrize("step", [0.1, 3.0])
def test_prox_is_the_minimiser(regularizer: Regularizer, step: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 3))
    kept = x.copy()
    u = regularizer.prox(x, step)
    np.testing.assert_array_equal(x, kept)

    def objective(v: np.ndarray) -> float:
        return step * regularizer.value(v) + 0.5 * float(((v - x) ** 2).sum())

    # Strongly convex with modulus 1: any other v is worse by half its squared distance at least.
    for size in (1e-3, 0.1, 2.0):
        v = u + size * rng.normal(size=u.shape)
        assert objective(v) >= objective(u) + 0.5 * ((v - u) ** 2).sum() - 1e-12


def test_values_and_formulas_by_hand() -> None:
    x = np.array([3.0, -0.5, 1.0])
    assert SquaredL2(2.0).value(x) == pytest.approx(9 + 0.25 + 1)  # (2/2) sum of squares
    assert L1Norm(2.0).value(x) == pytest.approx(2 * 4.5)
    np.testing.assert_allclose(SquaredL2(2.0).prox(x, 0.5), x / 2)  # x / (1 + 0.5 * 2)
    np.testing.assert_allclose(L1Norm(2.0).prox(x, 0.5), [2.0, 0.0, 0.0])  # threshold 1 (72)
    assert SquaredL2(0).prox(x, 0.5).tolist() == x.tolist()


@pytest.mark.parametrize("regularizer", BOTH, ids=repr)
def test_single_precision_stays(regularizer: Regularizer) -> None:
    assert regularizer.prox(np.ones(3, np.float32), 0.3).dtype == np.float32


@pytest.mark.parametrize("kind", [SquaredL2, L1Norm])
@pytest.mark.parametrize("lam", [-1.0, float("nan"), float("inf"), "1", None, True])
def test_a_weight_must_be_finite_and_not_negative(kind: type, lam: Any) -> None:
    with refused(ValueError if isinstance(lam, float) else TypeError, "lam", lam):
        kind(lam)
