"""The step that FLAME and Lp-Proj share: ADMM on the Moreau envelope.

    minimise  sum_i alpha_i (f_i(theta_i) + lambda/2 ||theta_i - w_i||^2)   subject to   w_i = w

With a_i = lambda alpha_i every round ends with pi_i = a_i (theta_i - w_i) (FLAME, Lemma 3), so pi_i
need not be kept, and rounding does not add up in it over the rounds.

The augmented Lagrangian is quadratic in w_i. Its minimiser is (12), whatever theta_i is; put in, it
leaves for theta_i

    alpha_i f_i(theta) + (a_i rho/(a_i + rho))/2 ||theta - (w - pi_i/rho)||^2,

so a pull to w - pi_i/rho moves theta_i and w_i jointly, where one to the last w_i moves one after
the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .blocks import pieces


def joint_weight(lam: float, alpha: float, rho: float) -> float:
    """Return the weight of the joint theta-step's pull beside f_i: lambda rho/(a_i + rho)."""
    return lam * rho / (lam * alpha + rho)


def moved(
    theta: NDArray[Any],
    dual: NDArray[Any],
    w: NDArray[Any],
    out: NDArray[Any],
    *,
    a: float,
    rho: float,
) -> NDArray[Any]:
    """Return the w_i of a client's new theta_i, FLAME (12).

    Parameters
    ----------
    theta : ndarray of shape (d,)
        The new theta_i.
    dual : ndarray of shape (d,)
        The old pi_i.
    w : ndarray of shape (d,)
        The w that the server sent.
    out : ndarray of shape (d,)
        Where to put it; it may be the old w_i.
    a : float
        lambda alpha_i.
    rho : float
    """
    flat = [np.ravel(array) for array in (theta, dual, w)]
    for part in pieces(theta.size):
        t, d, sent = (array[part] for array in flat)
        new = out.reshape(-1)[part]  # (a t + rho sent - d) / (a + rho)
        np.multiply(t, a, out=new)
        new += rho * sent
        new -= d
        new /= a + rho
    return out


def change_of(
    theta: NDArray[Any],
    new: NDArray[Any],
    dual: NDArray[Any],
    w_i: NDArray[Any],
    w: NDArray[Any],
    *,
    a: float,
    rho: float,
    of_participants: bool,
) -> NDArray[Any]:
    """Return the change of a client's message with its new theta_i and w_i, FLAME (13).

    Parameters are those of `moved`; and the new w_i, the old one, which is unused with
    `of_participants`, and whether a message is pi_i/rho, and w of the participants' w_i: else it is
    u_i = w_i + pi_i/rho. See `Consensus`.
    """
    change = np.empty(theta.shape, np.result_type(theta, new, dual, w, a, rho))
    flat = [np.ravel(array) for array in (theta, new, dual, w_i, w)]
    for part in pieces(theta.size):
        t, after, d, before, sent = (array[part] for array in flat)
        change.reshape(-1)[part] = (
            after - sent
            if of_participants
            else (after + a * (t - after) / rho) - (before + d / rho)
        )
    return change


def slope(*, a: float, rho: float, of_participants: bool) -> float:
    """Return by how much a message changes when the new theta_i does by 1; see `change_of`."""
    return (1 if of_participants else 2) * a / (a + rho)


def still(
    dual: NDArray[Any],
    w_i: NDArray[Any],
    w: NDArray[Any],
    *,
    a: float,
    rho: float,
    of_participants: bool,
) -> NDArray[Any]:
    """Return the new theta_i with which a message stays as it is, shape (d,); see `moved`."""
    at: NDArray[Any] = w if of_participants else ((a + rho) * w_i - (rho - a) * w) / (2 * a)
    return at + dual / a


def messages(
    theta: NDArray[Any],
    w_i: NDArray[Any],
    *,
    a: NDArray[np.float64],
    rho: float,
    of_participants: bool,
) -> NDArray[Any]:
    """Return u_i = w_i + pi_i/rho of several clients, or pi_i/rho, shape (k, d).

    Parameters
    ----------
    theta, w_i : ndarray of shape (k, d)
    a : ndarray of shape (k,)
        lambda alpha_i.
    rho : float
    of_participants : bool
        As for `change_of`.
    """
    dual: NDArray[Any] = a[:, None] / rho * (theta - w_i)
    return dual if of_participants else w_i + dual
