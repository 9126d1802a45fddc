"""The step that FLAME and Lp-Proj share: ADMM on the Moreau envelope.

    minimise  sum_i alpha_i (f_i(theta_i) + lambda/2 ||theta_i - w_i||^2)   subject to   w_i = w

With a_i = lambda alpha_i every round ends with pi_i = a_i (theta_i - w_i) (FLAME, Lemma 3), so pi_i
need not be kept, and rounding does not add up in it over the rounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def advance(
    theta: NDArray[Any],
    before: NDArray[Any],
    w_i: NDArray[Any],
    w: NDArray[Any],
    *,
    a: float,
    rho: float,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Move one client's w_i and message to those of its new theta_i, FLAME (12) and (13).

    Parameters
    ----------
    theta, before : ndarray of shape (d,)
        theta_i, new and old.
    w_i, w : ndarray of shape (d,)
        The old w_i and the w that the server sent.
    a : float
        lambda alpha_i.
    rho : float

    Returns
    -------
    w_i, change : ndarray of shape (d,)
        The new w_i, and the change of the message u_i = w_i + pi_i/rho.
    """
    dual = a * (before - w_i)
    new = (a * theta + rho * w - dual) / (a + rho)
    change = (new + a * (theta - new) / rho) - (w_i + dual / rho)
    return new, change


def messages(
    theta: NDArray[Any], w_i: NDArray[Any], *, a: NDArray[np.float64], rho: float
) -> NDArray[Any]:
    """Return u_i = w_i + pi_i/rho of several clients, shape (k, d).

    Parameters
    ----------
    theta, w_i : ndarray of shape (k, d)
    a : ndarray of shape (k,)
        lambda alpha_i.
    rho : float
    """
    result: NDArray[Any] = w_i + a[:, None] / rho * (theta - w_i)
    return result
