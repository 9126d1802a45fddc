"""The equations of a pair, with numbers by hand.

One pair with rho = 2 and the paper's penalty, lambda = 0.6, a = 3.7, xi = 1e-4. Its last update
left delta = (0.3, 0.4) and s = 0.6; now omega_i - omega_j = (0.48, 0.64).

    v/rho    = (1 - 0.6) (0.3, 0.4) = (0.12, 0.16)
    delta    = (0.48, 0.64) + (0.12, 0.16) = (0.6, 0.8), of norm 1
    s        : lambda + lambda/rho = 0.9 < 1 <= a lambda = 2.22, the third case of (6), where
               (a - 1) rho = 5.4: s = (1 - 2.22/5.4) / (1 - 1/5.4) = 3.18/4.4 = 159/220
    theta    = 159/220 (0.6, 0.8)
    v        = 2 (1 - 159/220) (0.6, 0.8) = 61/110 (0.6, 0.8)
    theta - v/rho = (2 159/220 - 1) (0.6, 0.8) = 49/110 (0.6, 0.8)
"""

from __future__ import annotations

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

from fl_admm_strategies.maths.pairs import algebra
from fl_admm_strategies.maths.penalties import SmoothedSCAD

RHO = 2.0
SCAD = SmoothedSCAD(lam=0.6)
BEFORE, LAST = np.array([0.3, 0.4]), np.array(0.6)
DIFFERENCE = np.array([0.48, 0.64])
DELTA, S = np.array([0.6, 0.8]), np.array(159 / 220)


def test_the_vector_of_a_pair() -> None:
    delta = algebra.next_delta(DIFFERENCE, algebra.carried(LAST), BEFORE.copy())
    assert_allclose(delta, DELTA, rtol=1e-15)


def test_the_scale_of_a_pair() -> None:
    """The four cases of (6): xi rho/(lambda + xi rho) = 1/3001; 1 - 0.3/0.5; above; far."""
    norms = np.array([0.2, 0.5, 1.0, 2.3])
    assert_allclose(SCAD.prox_scale(norms, RHO), [1 / 3001, 0.4, 159 / 220, 1.0], rtol=1e-12)


def test_the_dual() -> None:
    """As (A.3) is printed, from the dual before."""
    dual = algebra.dual_weight(S, RHO) * DELTA
    assert_allclose(dual, [61 / 110 * 0.6, 61 / 110 * 0.8], rtol=1e-14)
    before = algebra.dual_weight(LAST, RHO) * BEFORE
    assert_allclose(before, [0.24, 0.32], rtol=1e-15)
    assert_allclose(dual, before + RHO * (DIFFERENCE - S * DELTA), rtol=1e-14)


def test_the_factors_of_many_pairs() -> None:
    """For s = 0, 0.25, 159/220, 1: 1 - s, rho (1 - s) and 2 s - 1."""
    scales = np.array([0.0, 0.25, 159 / 220, 1.0])
    assert_allclose(algebra.carried(scales), [1, 0.75, 61 / 220, 0], rtol=1e-15)
    assert_allclose(algebra.dual_weight(scales, RHO), [2, 1.5, 61 / 110, 0], rtol=1e-15)
    assert_allclose(algebra.zeta_weight(scales), [-1, -0.5, 49 / 110, 1], rtol=1e-15)


def test_which_pairs_need_no_vector() -> None:
    # Plain before: unless it pulls (s < 1) on models that differ.
    norms, scales = np.array([0.0, 0.0, 0.7, 9.0]), np.array([0.2, 1.0, 0.2, 1.0])
    assert_array_equal(algebra.stays_plain(norms, scales), [True, True, False, True])
    # With a vector: only in the second update with s = 1.
    before, now = np.array([0.2, 0.2, 1.0, 1.0]), np.array([0.2, 1.0, 0.2, 1.0])
    assert_array_equal(algebra.turns_plain(before, now), [False, False, False, True])


def test_zeta() -> None:
    """Of client 0 of three: 0-1 has delta = (0.4, 0.8) and s = 0.75, 0-2 is plain.

    omega = (1, 2), (0.8, 1.5), (9, 9). theta_01 - v_01/rho = 0.5 (0.4, 0.8) = (0.2, 0.4), so
    zeta_0 = ((1, 2) + (0.8 + 0.2, 1.5 + 0.4) + (9, 9) + (1 - 9, 2 - 9)) / 3 = (3, 5.9) / 3.
    N_0 = {0, 1}: the sum over it is (1, 2) + (1, 1.9) = (2, 3.9).
    """
    omega = np.array([[1.0, 2.0]])
    zeta = algebra.zeta(np.array([[2.0, 3.9]]), omega, np.array([2]), 3)
    assert_allclose(zeta, [[1.0, 5.9 / 3]], rtol=1e-15)


def test_zeta_of_a_client_that_is_plain_with_all_is_its_model_to_the_last_bit() -> None:
    omega = np.array([[0.1, -1 / 3, 1e30]], np.float32)
    zeta = algebra.zeta(omega.astype(np.float64), omega, np.array([1]), 7)
    assert_array_equal(zeta.astype(np.float32), omega)
