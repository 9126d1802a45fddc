"""Fusion penalties on the distance of two models, and their proximal operators.

A penalty g acts on the Euclidean norm of a whole vector (a group penalty), so its proximal operator
only shortens the vector: ``argmin_theta g(||theta||) + rho/2 ||delta - theta||^2 = s * delta`` with
``s`` in [0, 1] a function of ``||delta||`` alone (`prox_scale`).

`SmoothedSCAD` is Eq. (3) with the operator of Eq. (6), `L1` the second branch of Algorithm 2 of
"Clustered Federated Learning based on Nonconvex Pairwise Fusion" (Yu, Liu, Wang, Sun;
arXiv:2211.04218v3). `MCP` is not in that paper.
"""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64Array = NDArray[np.float64]


class Penalty(Protocol):
    """What FPFC asks of a penalty; see `SmoothedSCAD` for each method."""

    @property
    def lam(self) -> float:
        """Strength λ."""

    def value(self, t: ArrayLike) -> Float64Array:
        """Return g(t) for t >= 0."""

    def derivative(self, t: ArrayLike) -> Float64Array:
        """Return g'(t) for t >= 0."""

    def prox_scale(self, r: ArrayLike, rho: float) -> Float64Array:
        """Return s with ``prox(delta) = s * delta`` for ``||delta|| = r``."""

    def check(self, rho: float) -> None:
        """Raise ValueError if the proximal operator is not well defined for `rho`."""


class _GroupProx:
    """The vector form of the proximal operator, the same for every penalty on a norm."""

    def prox_scale(self, r: ArrayLike, rho: float) -> Float64Array:
        raise NotImplementedError

    def prox(self, delta: NDArray[np.floating], rho: float) -> NDArray[np.floating]:
        """Return ``argmin_theta g(||theta||) + rho/2 ||delta - theta||^2``.

        Parameters
        ----------
        delta : ndarray, shape (..., d)
            One vector, or several along the leading axes; the norm is taken over the last axis.
        rho : float
            ADMM penalty parameter ρ.

        Returns
        -------
        ndarray, shape (..., d)
            The minimisers, in the dtype of `delta`.
        """
        norms = np.linalg.norm(np.asarray(delta, dtype=np.float64), axis=-1)
        scaled: NDArray[np.floating] = self.prox_scale(norms, rho)[..., None] * delta
        return scaled.astype(delta.dtype, copy=False)


@dataclass(frozen=True)
class SmoothedSCAD(_GroupProx):
    """Smoothed SCAD penalty P̃_a(t, λ) of FPFC, Eqs. (2) and (3).

    A parabola up to ξ (which makes it differentiable at 0), λt up to λ, bent down between λ and
    aλ, constant beyond: two models further apart than aλ do not pull on each other.

    Parameters
    ----------
    lam : float
        Strength λ >= 0, in the unit of a model distance. With 0 there is no fusion at all.
    a : float
        Shape a > 1; the paper's experiments use 3.7.
    xi : float
        Smoothing width, 0 < ξ < λ (only ξ > 0 where λ = 0).

    Raises
    ------
    ValueError
        If a parameter is not a finite number within its range.
    """

    lam: float
    a: float = 3.7
    xi: float = 1e-4

    def __post_init__(self) -> None:
        _require_number(self, "lam", self.lam, at_least=0.0)
        _require_number(self, "a", self.a, above=1.0)
        _require_number(self, "xi", self.xi, above=0.0)
        if self.lam > 0 and self.xi >= self.lam:
            raise ValueError(
                f"SmoothedSCAD needs xi < lam, got xi={self.xi!r} and lam={self.lam!r}. "
                "Choose a smaller xi (the paper uses 1e-4) or a larger lam."
            )

    def check(self, rho: float) -> None:
        """Refuse a `rho` for which Eq. (6) is not the proximal operator.

        Parameters
        ----------
        rho : float
            ADMM penalty parameter ρ; (a - 1)ρ > 1 makes the scalar problem strongly convex. With
            λ = 0 every ρ > 0 will do.

        Raises
        ------
        ValueError
            If `rho` is not a finite number > 0 or (a - 1)ρ <= 1.
        """
        _require_number(self, "rho", rho, above=0.0)
        if self.lam > 0 and (self.a - 1) * rho <= 1:
            raise ValueError(
                f"SmoothedSCAD needs (a - 1) * rho > 1, got a={self.a!r} and rho={rho!r}, that is "
                f"{(self.a - 1) * rho:g}. Choose rho above {1 / (self.a - 1):g} or a larger a."
            )

    def value(self, t: ArrayLike) -> Float64Array:
        """Return P̃_a(t, λ), Eq. (3), elementwise for t >= 0. Its value at 0 is ξλ/2."""
        t = np.asarray(t, dtype=np.float64)
        if self.lam == 0:
            return np.zeros_like(t)
        lam, a, xi = self.lam, self.a, self.xi
        # The quadratic piece is evaluated on t cut at a*lam, where it equals the constant piece,
        # so that a huge t cannot overflow.
        cut = np.minimum(t, a * lam)
        g = (a * lam * cut - 0.5 * (cut**2 + lam**2)) / (a - 1)
        g = np.where(t <= lam, lam * t, g)
        return np.where(t <= xi, lam / (2 * xi) * cut**2 + xi * lam / 2, g)

    def derivative(self, t: ArrayLike) -> Float64Array:
        """Return the derivative of P̃_a(., λ) elementwise for t >= 0."""
        t = np.asarray(t, dtype=np.float64)
        if self.lam == 0:
            return np.zeros_like(t)
        lam, a = self.lam, self.a
        bent = np.maximum(a * lam - t, 0.0) / (a - 1)
        return np.where(t <= self.xi, lam / self.xi * t, np.where(t <= lam, lam, bent))

    def prox_scale(self, r: ArrayLike, rho: float) -> Float64Array:
        """Return the factor s of Eq. (6), elementwise.

        Parameters
        ----------
        r : array_like
            Norms ||δ|| >= 0.
        rho : float
            ADMM penalty parameter ρ, as passed by `check`.

        Returns
        -------
        ndarray, same shape, float64
            s in [0, 1]; exactly 1.0 where r > aλ. At r = 0, where s does not matter, the limit.
        """
        r = np.asarray(r, dtype=np.float64)
        if self.lam == 0:
            return np.ones_like(r)
        lam, a, xi = self.lam, self.a, self.xi
        # Below this bound r is not a divisor, so lifting it changes nothing and keeps r = 0 safe.
        divisor = np.maximum(r, xi)
        bent = (1 - a * lam / ((a - 1) * rho * divisor)) / (1 - 1 / ((a - 1) * rho))
        scale = np.where(r <= lam + lam / rho, 1 - lam / (rho * divisor), np.clip(bent, 0.0, 1.0))
        scale = np.where(r <= xi + lam / rho, xi * rho / (lam + xi * rho), scale)
        return np.where(r > a * lam, 1.0, scale)


@dataclass(frozen=True)
class L1(_GroupProx):
    """Group-lasso fusion penalty λt of FPFC-ℓ1 (Algorithm 2, second branch).

    Convex and biased: however far apart two models are, they keep pulling on each other, so no
    pair ever leaves the store.

    Parameters
    ----------
    lam : float
        Strength λ >= 0. With 0 there is no fusion at all.

    Raises
    ------
    ValueError
        If `lam` is not a finite number >= 0.
    """

    lam: float

    def __post_init__(self) -> None:
        _require_number(self, "lam", self.lam, at_least=0.0)

    def check(self, rho: float) -> None:
        """Raise ValueError unless `rho` is a finite number > 0."""
        _require_number(self, "rho", rho, above=0.0)

    def value(self, t: ArrayLike) -> Float64Array:
        """Return λt elementwise for t >= 0."""
        return self.lam * np.asarray(t, dtype=np.float64)

    def derivative(self, t: ArrayLike) -> Float64Array:
        """Return λ elementwise; at t = 0 this is the derivative from the right."""
        return np.full_like(np.asarray(t, dtype=np.float64), self.lam)

    def prox_scale(self, r: ArrayLike, rho: float) -> Float64Array:
        """Return ``max(0, 1 - λ/(ρ r))`` elementwise; at r = 0 the limit."""
        r = np.asarray(r, dtype=np.float64)
        if self.lam == 0:
            return np.ones_like(r)
        threshold = self.lam / rho
        # max{0, 1 - threshold/r}, written so that r = 0 divides nothing.
        scale: Float64Array = 1 - threshold / np.maximum(r, threshold)
        return scale


@dataclass(frozen=True)
class MCP(_GroupProx):
    """Minimax concave penalty λt - t²/(2γ), constant γλ²/2 beyond γλ. Not in the FPFC paper.

    It has the same far regime as SCAD without the linear piece, and is here for comparison. It is
    not smoothed at 0: ||v|| < λ gives exactly fused pairs, θ = 0.

    Parameters
    ----------
    lam : float
        Strength λ >= 0. With 0 there is no fusion at all.
    gamma : float
        Shape γ > 0.

    Raises
    ------
    ValueError
        If a parameter is not a finite number within its range.
    """

    lam: float
    gamma: float = 3.0

    def __post_init__(self) -> None:
        _require_number(self, "lam", self.lam, at_least=0.0)
        _require_number(self, "gamma", self.gamma, above=0.0)

    def check(self, rho: float) -> None:
        """Raise ValueError unless `rho` is a finite number > 0 and γρ > 1 (or λ = 0)."""
        _require_number(self, "rho", rho, above=0.0)
        if self.lam > 0 and self.gamma * rho <= 1:
            raise ValueError(
                f"MCP needs gamma * rho > 1, got gamma={self.gamma!r} and rho={rho!r}, that is "
                f"{self.gamma * rho:g}. Choose rho above {1 / self.gamma:g} or a larger gamma."
            )

    def value(self, t: ArrayLike) -> Float64Array:
        """Return the penalty elementwise for t >= 0."""
        cut = np.minimum(np.asarray(t, dtype=np.float64), self.gamma * self.lam)
        return self.lam * cut - cut**2 / (2 * self.gamma)

    def derivative(self, t: ArrayLike) -> Float64Array:
        """Return its derivative elementwise for t >= 0; at t = 0 the one from the right."""
        return np.maximum(self.lam - np.asarray(t, dtype=np.float64) / self.gamma, 0.0)

    def prox_scale(self, r: ArrayLike, rho: float) -> Float64Array:
        """Return ``max(0, 1 - λ/(ρ r)) / (1 - 1/(γρ))``, and exactly 1.0 where r > γλ."""
        r = np.asarray(r, dtype=np.float64)
        if self.lam == 0:
            return np.ones_like(r)
        threshold = self.lam / rho
        firm = (1 - threshold / np.maximum(r, threshold)) / (1 - 1 / (self.gamma * rho))
        return np.where(r > self.gamma * self.lam, 1.0, np.minimum(firm, 1.0))


def _require_number(
    owner: object,
    name: str,
    value: object,
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
) -> None:
    """Raise ValueError unless `value` is a finite real number in range."""
    bound = f">= {at_least:g}" if at_least > -math.inf else f"> {above:g}"
    if (
        isinstance(value, bool)
        or not isinstance(value, Real)
        or not math.isfinite(value)
        or value < at_least
        or value <= above
    ):
        raise ValueError(
            f"{type(owner).__name__} needs {name} to be a finite number {bound}, got {value!r}."
        )
