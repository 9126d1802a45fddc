"""Losses with a known curvature; that of all others is estimated.

FedGiA needs of a client's loss f_i, beside value and gradient, an upper bound H_i of its Hessian
(Zhou, Li, arXiv:2205.01438, (21) and Table II) and r_i, the Lipschitz constant of its gradient. For
least squares and logistic regression both are the data matrix's; for any other loss r_i is
estimated with products of its Hessian, in `clients.toolkit.solving.hessian`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_admm_strategies.maths.checks import check_choice, check_not_negative

Vector = NDArray[np.float64]


class DataLoss(ABC):
    """A loss f(x) = (1/d) sum_j l(<a_j, x>; b_j) + (reg/2) ||x||^2 over the rows of a matrix.

    Keep the object (``functools.lru_cache`` around what makes it): it holds a copy of the data,
    which nothing can change, and with it the factorisation of A, which ``hessian="gram"`` needs in
    every round. It is not kept in ``context.state``, which travels with every message.

    Parameters
    ----------
    matrix : array_like of shape (d, n)
        A, one row a sample. Columns that are all zero or constant are allowed: a feature that no
        sample of this client has is usual in federated data and the intercept is constant, and
        H_i/m + sigma I is invertible whatever A is.
    targets : array_like of shape (d,)
        b.

    Attributes
    ----------
    matrix, targets : ndarray
        Read-only copies, float64.

    Raises
    ------
    ValueError
        If the shapes do not fit, an entry is NaN or infinite, or there is no sample or feature.
    """

    bend: float
    """l'' <= bend, so that the Hessian is at most (bend/d) A'A + reg I."""
    reg: float = 0.0

    def __init__(self, matrix: ArrayLike, targets: ArrayLike) -> None:
        self.matrix = _frozen("matrix", matrix, ndim=2)
        self.targets = _frozen("targets", targets, ndim=1)
        rows, columns = self.matrix.shape
        if rows == 0 or columns == 0:
            raise ValueError(
                f"The data matrix has shape {self.matrix.shape}, expected at least one sample and "
                "one feature."
            )
        if self.targets.shape != (rows,):
            raise ValueError(
                f"There are {len(self.targets)} targets for a data matrix of shape "
                f"{self.matrix.shape}, expected one for each of its {rows} rows."
            )

    @property
    def num_examples(self) -> int:
        """d, the number of samples."""
        return len(self.targets)

    @property
    def size(self) -> int:
        """n, the number of features."""
        return int(self.matrix.shape[1])

    @abstractmethod
    def value(self, products: Vector, targets: Vector) -> float:
        """Return the mean loss, without reg, of some samples, by their products and targets."""

    @abstractmethod
    def slopes(self, products: Vector, targets: Vector) -> Vector:
        """Return l'(<a_j, x>; b_j) of some samples, by their products and targets."""

    @abstractmethod
    def metrics(self, x: Vector) -> dict[str, float]:
        """Return what else an evaluation reports."""

    def value_and_gradient(
        self, x: Vector, rows: NDArray[np.int64] | slice = slice(None)
    ) -> tuple[float, Vector]:
        """Return f(x) and grad f(x), shape (n,); with `rows` of these samples alone."""
        matrix, targets = self.matrix[rows], self.targets[rows]
        products = matrix @ x
        gradient = self.slopes(products, targets) @ matrix / len(targets) + self.reg * x
        return self.value(products, targets) + 0.5 * self.reg * float(x @ x), gradient

    def largest_curvature(self) -> float:
        """Return r = (bend/d) ||A'A|| + reg, the Lipschitz constant of the gradient."""
        return self._scale * float(np.linalg.norm(self.matrix, 2)) ** 2 + self.reg

    @property
    def _scale(self) -> float:
        return self.bend / self.num_examples

    @cached_property
    def gram(self) -> tuple[Vector, Vector]:
        """Table II's Gram matrix (bend/d) A'A + reg I: k eigenvalues, eigenvectors of shape (k, n).

        All vectors orthogonal to these have the eigenvalue reg.
        """
        _, singular, vectors = np.linalg.svd(self.matrix, full_matrices=False)
        return self._scale * singular**2 + self.reg, vectors


class LeastSquares(DataLoss):
    """f(x) = (1/2d) ||A x - b||^2 (Zhou, Li, (2)). Parameters are those of `DataLoss`."""

    bend = 1.0

    def value(self, products: Vector, targets: Vector) -> float:
        """Return (1/2d) ||A x - b||^2."""
        residuals = products - targets
        return float(residuals @ residuals) / (2 * len(targets))

    def slopes(self, products: Vector, targets: Vector) -> Vector:
        """Return A x - b."""
        return products - targets

    def metrics(self, x: Vector) -> dict[str, float]:
        """Return the root mean squared error."""
        residuals = self.matrix @ x - self.targets
        return {"rmse": float(np.sqrt(residuals @ residuals / self.num_examples))}


class Logistic(DataLoss):
    """f(x) = (1/d) sum_j [ln(1 + e^<a_j, x>) - b_j <a_j, x>] + (reg/2) ||x||^2 (Zhou, Li, (3)).

    Parameters
    ----------
    matrix, targets
        As in `DataLoss`; every target is 0 or 1.
    mu : float (default: 0.001)
        mu, the weight of the regulariser; 0 for none.
    reg_scaling : {'per_sample', 'full'} (default: 'per_sample')
        reg = mu/d, with which the paper's Table III was made, or reg = mu, as (3) is printed
        (docs/methods/fedgia-notes.md, P8).
    """

    bend = 0.25

    def __init__(
        self,
        matrix: ArrayLike,
        targets: ArrayLike,
        *,
        mu: float = 0.001,
        reg_scaling: Literal["per_sample", "full"] = "per_sample",
    ) -> None:
        super().__init__(matrix, targets)
        strange = np.unique(self.targets[(self.targets != 0) & (self.targets != 1)])
        if len(strange):
            raise ValueError(
                f"The labels of a logistic loss hold {', '.join(f'{v:g}' for v in strange[:5])}, "
                "expected 0 and 1 only. Labels -1 and 1 become 0 and 1 by (b + 1) / 2."
            )
        check_not_negative("mu", mu)
        check_choice("reg_scaling", reg_scaling, ("per_sample", "full"))
        self.reg = float(mu) / (self.num_examples if reg_scaling == "per_sample" else 1)

    def value(self, products: Vector, targets: Vector) -> float:
        """Return the mean logistic loss."""
        return float((np.logaddexp(0.0, products) - targets * products).mean())

    def slopes(self, products: Vector, targets: Vector) -> Vector:
        """Return sigmoid(A x) - b."""
        return 0.5 * (1 + np.tanh(0.5 * products)) - targets

    def metrics(self, x: Vector) -> dict[str, float]:
        """Return the share of samples on the right side of the boundary."""
        return {"accuracy": float(np.mean((self.matrix @ x > 0) == (self.targets == 1)))}


def _frozen(name: str, values: ArrayLike, *, ndim: int) -> Vector:
    """Return a read-only float64 copy; refuse what is not an array of finite numbers."""
    array = np.asarray(values).astype(np.float64)  # a copy, always; tensors are welcome
    if array.ndim != ndim:
        raise ValueError(f"{name} has shape {array.shape}, expected {ndim} dimension(s).")
    if len(bad := np.argwhere(~np.isfinite(array))):
        first = ", ".join(str(index) for index in bad[0])
        raise ValueError(
            f"{name} holds NaN or infinity in {len(bad)} of {array.size} entries, the first at "
            f"[{first}]. Fill or drop them. (Scaling an all-zero column to unit length makes NaN.)"
        )
    array.setflags(write=False)
    return array
