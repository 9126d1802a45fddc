"""From the pairwise distances of an FPFC run to clusters and their models.

FPFC (arXiv:2211.04218v3) clusters only at the end: clients i and j belong together if
||theta_ij|| <= nu, and a cluster's model is the mean of its members', weighted by their examples
(Remark 2). The relation need not be transitive, so the clusters are its connected components.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .checks import check_not_negative


def clusters(theta_norms: ArrayLike, nu: float) -> NDArray[np.intp]:
    """Return the connected components of ||theta_ij|| <= nu (Remark 2).

    Parameters
    ----------
    theta_norms : array_like of shape (m, m)
        ||theta_ij||, symmetric, e.g. of `PairwiseStore.theta_norms`.
    nu : float
        nu >= 0. The paper calls [xi, 0.5] satisfactory; fused pairs lie at xi or below, and
        `norm_quantiles` shows where the gap to the others is.

    Returns
    -------
    ndarray of int, shape (m,)
        The cluster of each client, numbered from 0 in the order of their first members.

    Raises
    ------
    ValueError
        If `theta_norms` is not a symmetric square matrix without NaN, or `nu` is negative or NaN.
    """
    norms = _checked_norms(theta_norms)
    if not nu >= 0:
        raise ValueError(f"nu is {nu!r}, expected a number >= 0.")
    linked = norms <= nu
    labels = np.full(len(norms), -1, dtype=np.intp)
    count = 0
    for first in range(len(norms)):
        if labels[first] >= 0:
            continue
        frontier = np.array([first])
        while frontier.size:
            labels[frontier] = count
            frontier = np.flatnonzero(linked[frontier].any(axis=0) & (labels < 0))
        count += 1
    return labels


def cluster_models(
    omega: NDArray[np.floating], weights: ArrayLike, labels: ArrayLike
) -> NDArray[np.floating]:
    """Return alpha_l = sum n_i omega_i / sum n_i over the members of each cluster (Remark 2).

    Parameters
    ----------
    omega : ndarray of shape (m, d)
        omega_i.
    weights : array_like of shape (m,)
        n_i >= 0, numbers of examples. Where all of a cluster are 0 its members count equally.
    labels : array_like of int, shape (m,)
        Clusters 0..L-1, e.g. of `clusters`.

    Returns
    -------
    ndarray of shape (L, d)
        In the dtype of `omega`; summed in float64.

    Raises
    ------
    ValueError
        If the shapes do not agree, a weight is negative or not finite, or a label is unused.
    """
    labels = _checked_labels(labels)
    weights = np.asarray(weights, dtype=np.float64)
    if omega.ndim != 2 or len(omega) != len(labels) or weights.shape != labels.shape:
        raise ValueError(
            f"omega, weights and labels are of shapes {omega.shape}, {weights.shape} and "
            f"{labels.shape}, expected (m, d), (m,) and (m,)."
        )
    if not np.all(np.isfinite(weights) & (weights >= 0)):
        raise ValueError(f"weights is {weights!r}, expected finite numbers >= 0.")
    models = np.empty((labels.max(initial=-1) + 1, omega.shape[1]), dtype=omega.dtype)
    for label, model in enumerate(models):
        members = np.flatnonzero(labels == label)
        share = weights[members] if weights[members].any() else np.ones(len(members))
        model[:] = (share / share.sum()) @ omega[members].astype(np.float64)
    return models


def fusion_bound(labels: ArrayLike, lam: float) -> NDArray[np.float64]:
    """Return the largest gradient norm at which a cluster can be exactly fused.

    Let all of a cluster G_l be at one point alpha_l, and everybody else too far to pull. Then the
    first condition of (11) is grad f_i(alpha_l) = -(1/m) sum_{j in G_l} v_ij with ||v_ij|| <=
    lambda, hence ||grad f_i(alpha_l)|| <= lambda (|G_l| - 1)/m for every member. A member above
    the bound says that lambda is too small to hold the cluster together.

    Parameters
    ----------
    labels : array_like of int, shape (m,)
        Clusters 0..L-1.
    lam : float
        lambda.

    Returns
    -------
    ndarray of shape (L,)

    Raises
    ------
    TypeError, ValueError
        If `labels` are not 0..L-1 or `lam` is not a finite number >= 0.
    """
    labels = _checked_labels(labels)
    check_not_negative("lam", lam)
    return lam * (np.bincount(labels) - 1) / len(labels)


@dataclass(frozen=True)
class NormDistribution:
    """How the ||theta_ij|| of the unordered pairs are distributed.

    Attributes
    ----------
    norms : ndarray of shape (m(m-1)/2,)
        All of them, ascending.
    probabilities : ndarray of shape (21,)
        0, 0.05, ..., 1.
    quantiles : ndarray of shape (21,)
        The quantiles at these probabilities.
    """

    norms: NDArray[np.float64]
    probabilities: NDArray[np.float64]
    quantiles: NDArray[np.float64]


def norm_quantiles(theta_norms: ArrayLike) -> NormDistribution:
    """Return the distribution of the pairs' ||theta_ij||, to choose nu by.

    A nu inside a wide empty interval of the norms gives clusters that are not sensitive to it.

    Parameters
    ----------
    theta_norms : array_like of shape (m, m)
        ||theta_ij||, symmetric.

    Raises
    ------
    ValueError
        If `theta_norms` is not a symmetric square matrix without NaN, or has fewer than two rows.
    """
    matrix = _checked_norms(theta_norms)
    if len(matrix) < 2:
        raise ValueError("theta_norms is of one client, expected two clients or more.")
    norms = np.sort(matrix[np.triu_indices(len(matrix), k=1)])
    probabilities = np.linspace(0.0, 1.0, 21)
    return NormDistribution(norms, probabilities, np.quantile(norms, probabilities))


def _checked_norms(theta_norms: ArrayLike) -> NDArray[np.float64]:
    norms = np.asarray(theta_norms, dtype=np.float64)
    if norms.ndim != 2 or norms.shape[0] != norms.shape[1] or not norms.size:
        raise ValueError(f"theta_norms is of shape {norms.shape}, expected a square matrix (m, m).")
    if np.isnan(norms).any():
        raise ValueError("theta_norms holds NaN, expected numbers. A model is not finite.")
    if not np.allclose(norms, norms.T):
        raise ValueError("theta_norms is not symmetric, expected ||theta_ij|| = ||theta_ji||.")
    return norms


def _checked_labels(labels: ArrayLike) -> NDArray[np.intp]:
    labels = np.asarray(labels)
    if labels.ndim != 1 or not labels.size or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"labels is {labels!r}, expected a non-empty vector of integers.")
    found = np.unique(labels)
    if not np.array_equal(found, np.arange(len(found))):
        raise ValueError(f"labels are of the set {found.tolist()}, expected all of 0..L-1.")
    return labels.astype(np.intp)
