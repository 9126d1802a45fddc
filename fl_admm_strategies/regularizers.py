"""Regularisers by their proximal operator: what FedMC-ADMM puts on its factors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Regularizer(Protocol):
    """A convex function R of an array, of which two things are asked.

    Any object with these two methods will do: a norm, or the indicator of a closed convex set,
    whose `prox` is the projection onto it and whose `value` in it is 0.
    """

    def prox(self, x: NDArray[Any], step: float) -> NDArray[Any]:
        """Return argmin_u step R(u) + |u - x|^2 / 2, of the shape and dtype of x; x is kept."""

    def value(self, x: NDArray[Any]) -> float:
        """Return R(x)."""


def check_regularizer(name: str, regularizer: object) -> None:
    """Raise TypeError unless an object has the methods of a `Regularizer`."""
    if not all(callable(getattr(regularizer, method, None)) for method in ("prox", "value")):
        raise TypeError(
            f"{name} is {regularizer!r}, expected an object with prox(x, step) and value(x), e.g. "
            "SquaredL2(lam) or L1Norm(lam)."
        )


def _check_weight(lam: object) -> None:
    if isinstance(lam, bool) or not isinstance(lam, int | float | np.number):
        raise TypeError(f"lam is {lam!r}, expected a number >= 0.")
    if not (math.isfinite(float(lam)) and float(lam) >= 0):
        raise ValueError(f"lam is {lam}, expected a finite number >= 0.")


@dataclass(frozen=True)
class SquaredL2:
    """R(x) = (lam/2) |x|_F^2.

    Parameters
    ----------
    lam : float
        lam >= 0; 0 is no regularisation.
    """

    lam: float

    def __post_init__(self) -> None:
        _check_weight(self.lam)

    def prox(self, x: NDArray[Any], step: float) -> NDArray[Any]:
        """Return x / (1 + step lam)."""
        shrunk: NDArray[Any] = x / (1 + step * self.lam)
        return shrunk

    def value(self, x: NDArray[Any]) -> float:
        """Return (lam/2) |x|_F^2."""
        return self.lam / 2 * float(np.vdot(x, x))


@dataclass(frozen=True)
class L1Norm:
    """R(x) = lam |x|_1, entry by entry.

    Parameters
    ----------
    lam : float
        lam >= 0.
    """

    lam: float

    def __post_init__(self) -> None:
        _check_weight(self.lam)

    def prox(self, x: NDArray[Any], step: float) -> NDArray[Any]:
        """Return the soft threshold of x at step lam (FedMC-ADMM (72))."""
        shrunk: NDArray[Any] = np.sign(x) * np.maximum(np.abs(x) - step * self.lam, 0)
        return shrunk

    def value(self, x: NDArray[Any]) -> float:
        """Return lam |x|_1."""
        return self.lam * float(np.abs(x).sum())
