"""Convex regularisers, given by their proximal operators, on the factors of a completed matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .checks import Checked, NotNegative


class Regularizer(Protocol):
    """A convex function R of an array.

    Any object with these two methods will do: a norm, or the indicator of a closed convex set,
    with the projection onto the set as `prox` and a `value` of 0 in it.
    """

    def prox(self, x: NDArray[Any], step: float) -> NDArray[Any]:
        """Return argmin_u step R(u) + ||u - x||^2 / 2, of the shape and dtype of x; x is kept."""

    def value(self, x: NDArray[Any]) -> float:
        """Return R(x)."""


def check_regularizer(name: str, regularizer: object) -> None:
    """Raise TypeError unless an object has the methods of a `Regularizer`."""
    if not all(callable(getattr(regularizer, method, None)) for method in ("prox", "value")):
        raise TypeError(
            f"{name} is {regularizer!r}, expected an object with prox(x, step) and value(x), e.g. "
            "SquaredL2(lam) or L1Norm(lam)."
        )


def squared_l2_weight(name: str, regularizer: Regularizer) -> float:
    """Return lambda of a `SquaredL2`, for methods that take gradient steps on it.

    Raises
    ------
    TypeError
        If it is another.
    """
    if not isinstance(regularizer, SquaredL2):
        raise TypeError(
            f"{name} is {regularizer!r}, expected SquaredL2(lam): this method takes gradient "
            "steps. FedMCADMM takes any regularizer."
        )
    return regularizer.lam


@dataclass(frozen=True)
class SquaredL2(Checked):
    """R(x) = (lambda/2) ||x||_F^2.

    Parameters
    ----------
    lam : float
        lambda >= 0; 0 is no regularisation.
    """

    lam: NotNegative

    def prox(self, x: NDArray[Any], step: float) -> NDArray[Any]:
        """Return x / (1 + step lambda)."""
        shrunk: NDArray[Any] = x / (1 + step * self.lam)
        return shrunk

    def value(self, x: NDArray[Any]) -> float:
        """Return R(x)."""
        return self.lam / 2 * float(np.vdot(x, x))


@dataclass(frozen=True)
class L1Norm(Checked):
    """R(x) = lambda ||x||_1, the sum over the entries.

    Parameters
    ----------
    lam : float
        lambda >= 0; 0 is no regularisation.
    """

    lam: NotNegative

    def prox(self, x: NDArray[Any], step: float) -> NDArray[Any]:
        """Return x with its entries moved towards 0 by step lambda (FedMC-ADMM (72))."""
        shrunk: NDArray[Any] = np.sign(x) * np.maximum(np.abs(x) - step * self.lam, 0)
        return shrunk

    def value(self, x: NDArray[Any]) -> float:
        """Return R(x)."""
        return self.lam * float(np.abs(x).sum())
