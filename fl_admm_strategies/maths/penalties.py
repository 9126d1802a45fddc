"""Fusion penalties on the distance of two models, and their proximal operators.

A penalty g is a function of the Euclidean norm of a whole vector, so its proximal operator only
shortens the vector:

    argmin_theta g(||theta||) + rho/2 ||delta - theta||^2 = s delta

with s in [0, 1] a function of ||delta|| alone (`prox_scale`).

`SmoothedSCAD` is (3), with the operator (6), and `L1` the second branch of Algorithm 2 of Yu, Liu,
Wang, Sun, "Clustered Federated Learning based on Nonconvex Pairwise Fusion", arXiv:2211.04218v3.
`MCP` is not in that paper. See docs/methods/fpfc.md for when to use which.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .checks import Checked, NotNegative, Positive, check_above, check_positive

Float64Array = NDArray[np.float64]


class Penalty(Protocol):
    """What FPFC needs of a penalty; the functions work elementwise."""

    @property
    def lam(self) -> float:
        """The strength lambda."""

    def value(self, t: ArrayLike) -> Float64Array:
        """Return g(t) for t >= 0."""

    def prox_scale(self, r: ArrayLike, rho: float) -> Float64Array:
        """Return s with prox(delta) = s delta for ||delta|| = r; where r = 0 the limit."""

    def check(self, rho: float) -> None:
        """Raise if `rho` is no finite number > 0, or so small that there are several minimisers."""


@dataclass(frozen=True)
class SmoothedSCAD(Checked):
    """The smoothed SCAD penalty of FPFC, (2) and (3).

    A parabola up to xi, which makes it differentiable at 0; lambda t up to lambda; bent down
    between lambda and a lambda; constant beyond, where two models do not pull on each other.

    Parameters
    ----------
    lam : float
        lambda >= 0, the strength, in the unit of a model distance. With 0 there is no fusion.
    a : float (default: 3.7)
        a > 1, the shape; the default is that of the paper's experiments.
    xi : float (default: 1e-4)
        xi, the smoothing width, 0 < xi < lambda (with lambda = 0 any xi > 0). Fused models end up
        within xi of each other.

    Raises
    ------
    TypeError, ValueError
        If a parameter is not a finite number in its range.
    """

    lam: NotNegative
    a: Annotated[float, partial(check_above, bound=1)] = 3.7
    xi: Positive = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lam > 0 and self.xi >= self.lam:
            raise ValueError(
                f"xi is {self.xi} with lam = {self.lam}, expected xi < lam. Choose a smaller xi "
                "(the paper uses 1e-4) or a larger lam."
            )

    @property
    def flat_from(self) -> float:
        """The distance a lambda, from which on models do not pull on each other."""
        return self.a * self.lam

    def check(self, rho: float) -> None:
        """Raise unless rho > 0 and (a - 1) rho > 1, or lambda = 0.

        Then g(theta) + rho/2 (delta - theta)^2 is strongly convex, and (6) its only minimiser.
        """
        check_positive("rho", rho)
        if self.lam > 0 and (self.a - 1) * rho <= 1:
            raise ValueError(
                f"rho is {rho} with a = {self.a}, expected (a - 1) * rho > 1 for SmoothedSCAD. "
                f"Choose rho above {1 / (self.a - 1):g} or a larger a."
            )

    def value(self, t: ArrayLike) -> Float64Array:
        """Return (3); its value at 0 is xi lambda / 2."""
        t = np.asarray(t, dtype=np.float64)
        if self.lam == 0:
            return np.zeros_like(t)
        lam, a, xi = self.lam, self.a, self.xi
        # The quadratic piece is evaluated on t cut at a lambda, where it equals the constant piece,
        # so that a huge t cannot overflow.
        cut = np.minimum(t, a * lam)
        g = (a * lam * cut - 0.5 * (cut**2 + lam**2)) / (a - 1)
        g = np.where(t <= lam, lam * t, g)
        return np.where(t <= xi, lam / (2 * xi) * cut**2 + xi * lam / 2, g)

    def prox_scale(self, r: ArrayLike, rho: float) -> Float64Array:
        """Return the factor s of (6), in [0, 1], and exactly 1.0 where r > a lambda.

        Parameters
        ----------
        r : array_like
            ||delta|| >= 0.
        rho : float
            rho, which `check` has passed.
        """
        r = np.asarray(r, dtype=np.float64)
        if self.lam == 0:
            return np.ones_like(r)
        lam, a, xi = self.lam, self.a, self.xi
        # (6): fused, soft, bent, and 1 where the models are far apart.
        fused = xi * rho / (lam + xi * rho)
        soft = 1 - lam / (rho * np.maximum(r, xi))  # used beyond xi only, so that 0 is kept out
        scale = np.asarray(soft)
        np.putmask(scale, r <= xi + lam / rho, fused)
        beyond = r > lam + lam / rho
        if beyond.any():
            t = r[beyond]
            bent = (1 - a * lam / ((a - 1) * rho * t)) / (1 - 1 / ((a - 1) * rho))
            scale[beyond] = np.where(t > a * lam, 1.0, np.clip(bent, 0.0, 1.0))
        return scale


@dataclass(frozen=True)
class L1(Checked):
    """The group lasso lambda t of FPFC-l1, the second branch of Algorithm 2.

    Convex and biased: two models pull on each other however far apart they are, so every pair
    keeps a vector on the server.

    Parameters
    ----------
    lam : float
        lambda >= 0, the strength. With 0 there is no fusion.

    Raises
    ------
    TypeError, ValueError
        If `lam` is not a finite number >= 0.
    """

    lam: NotNegative

    def check(self, rho: float) -> None:
        """Raise unless rho > 0."""
        check_positive("rho", rho)

    def value(self, t: ArrayLike) -> Float64Array:
        """Return lambda t."""
        return self.lam * np.asarray(t, dtype=np.float64)

    def prox_scale(self, r: ArrayLike, rho: float) -> Float64Array:
        """Return max(0, 1 - lambda/(rho r)); at r = 0 the limit."""
        r = np.asarray(r, dtype=np.float64)
        if self.lam == 0:
            return np.ones_like(r)
        return _soft_scale(r, self.lam / rho)


@dataclass(frozen=True)
class MCP(Checked):
    """The minimax concave penalty lambda t - t^2/(2 gamma), constant from t = gamma lambda on.

    For comparison; it is not in the FPFC paper. Like SCAD it lets distant models alone. It is not
    smoothed at 0, so fused models become equal (theta = 0).

    Parameters
    ----------
    lam : float
        lambda >= 0, the strength. With 0 there is no fusion.
    gamma : float (default: 3.0)
        gamma > 0, the shape.

    Raises
    ------
    TypeError, ValueError
        If a parameter is not a finite number in its range.
    """

    lam: NotNegative
    gamma: Positive = 3.0

    @property
    def flat_from(self) -> float:
        """The distance gamma lambda, from which on models do not pull on each other."""
        return self.gamma * self.lam

    def check(self, rho: float) -> None:
        """Raise unless rho > 0 and gamma rho > 1, or lambda = 0; see `SmoothedSCAD.check`."""
        check_positive("rho", rho)
        if self.lam > 0 and self.gamma * rho <= 1:
            raise ValueError(
                f"rho is {rho} with gamma = {self.gamma}, expected gamma * rho > 1 for MCP. "
                f"Choose rho above {1 / self.gamma:g} or a larger gamma."
            )

    def value(self, t: ArrayLike) -> Float64Array:
        """Return g(t)."""
        cut = np.minimum(np.asarray(t, dtype=np.float64), self.gamma * self.lam)
        return self.lam * cut - cut**2 / (2 * self.gamma)

    def prox_scale(self, r: ArrayLike, rho: float) -> Float64Array:
        """Return max(0, 1 - lambda/(rho r)) / (1 - 1/(gamma rho)); 1.0 where r > gamma lambda."""
        r = np.asarray(r, dtype=np.float64)
        if self.lam == 0:
            return np.ones_like(r)
        firm = _soft_scale(r, self.lam / rho) / (1 - 1 / (self.gamma * rho))
        return np.where(r > self.gamma * self.lam, 1.0, np.minimum(firm, 1.0))


@dataclass(frozen=True)
class Rescaled:
    """The penalty g(t/unit): `penalty`, of distances in another unit.

    Attributes
    ----------
    penalty : Penalty
        g.
    unit : float
        So much of a distance is 1.
    """

    penalty: Penalty
    unit: float

    @property
    def lam(self) -> float:
        """The slope at 0."""
        return self.penalty.lam / self.unit

    @property
    def flat_from(self) -> Any:
        """The distance from which on g does not pull; only where g has one."""
        return self.unit * self.penalty.flat_from  # type: ignore[attr-defined]

    def check(self, rho: float) -> None:
        """Raise as g does for rho in its unit."""
        self.penalty.check(rho * self.unit**2)

    def value(self, t: ArrayLike) -> Float64Array:
        """Return g(t/unit)."""
        return self.penalty.value(np.asarray(t) / self.unit)

    def prox_scale(self, r: ArrayLike, rho: float) -> Float64Array:
        """Return s: with theta = unit x the minimum is that of g(x) and rho unit^2."""
        return self.penalty.prox_scale(np.asarray(r) / self.unit, rho * self.unit**2)


def _soft_scale(r: Float64Array, threshold: float) -> Float64Array:
    """Return max(0, 1 - threshold/r), written so that r = 0 divides nothing."""
    scale: Float64Array = 1 - threshold / np.maximum(r, threshold)
    return scale
