"""From the pairwise differences of a finished FPFC run to clusters and their models.

FPFC (arXiv:2211.04218v3) clusters only at the end: clients i and j belong together iff
``||theta_ij|| <= nu``, and each cluster's model is the sample-weighted mean of its members
(Remark 2). That relation need not be transitive, so clusters are its connected components (A8).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


def clusters(theta_norms: ArrayLike, nu: float) -> NDArray[np.intp]:
    """Return the connected components of ``{(i, j): ||theta_ij|| <= nu}``.

    Parameters
    ----------
    theta_norms : array_like, shape (m, m)
        Symmetric norms ||θ_ij||, as `PairwiseStore.theta_norms` gives them.
    nu : float
        Threshold ν >= 0. The paper calls [ξ, 0.5] satisfactory; fused pairs sit at or below ξ, and
        `norm_quantiles` shows where the gap to the others lies.

    Returns
    -------
    ndarray of int, shape (m,)
        Cluster of each client. Clusters are numbered from 0 in the order of their smallest member.

    Raises
    ------
    ValueError
        If `theta_norms` is not a symmetric square matrix without NaN, or `nu` is negative or NaN.
    """
    norms = _checked_norms(theta_norms)
    if not nu >= 0:
        raise ValueError(f"nu must be a number >= 0, got {nu!r}.")
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
    """Return each cluster's model, the weighted mean of its members (Remark 2).

    Parameters
    ----------
    omega : ndarray, shape (m, d)
        Client models ω_i.
    weights : array_like, shape (m,)
        Numbers of training samples n_i >= 0. A cluster whose weights are all zero is averaged with
        equal weights.
    labels : array_like of int, shape (m,)
        Clusters 0..L-1, as `clusters` gives them.

    Returns
    -------
    ndarray, shape (L, d)
        The models α̂_l, in the dtype of `omega`; summed in float64.

    Raises
    ------
    ValueError
        If shapes do not agree, a weight is negative or not finite, or a label is unused.
    """
    labels = _checked_labels(labels)
    weights = np.asarray(weights, dtype=np.float64)
    if omega.ndim != 2 or len(omega) != len(labels) or weights.shape != labels.shape:
        raise ValueError(
            "omega, weights and labels must have shapes (m, d), (m,) and (m,), got "
            f"{omega.shape}, {weights.shape} and {labels.shape}."
        )
    if not np.all(np.isfinite(weights) & (weights >= 0)):
        raise ValueError(f"weights must be finite and >= 0, got {weights!r}.")
    models = np.empty((labels.max(initial=-1) + 1, omega.shape[1]), dtype=omega.dtype)
    for label, model in enumerate(models):
        members = np.flatnonzero(labels == label)
        share = weights[members] if weights[members].any() else np.ones(len(members))
        model[:] = (share / share.sum()) @ omega[members].astype(np.float64)
    return models


def fusion_bound(labels: ArrayLike, lam: float) -> NDArray[np.float64]:
    """Return the largest gradient norm at which a cluster can be exactly fused.

    If all of G_l sits at one point α_l and every other client is in the far regime, stationarity
    reads ``grad f_i(α_l) = -(1/m) Σ_{j in G_l} v_ij`` with ``||v_ij|| <= λ``, hence
    ``||grad f_i(α_l)|| <= λ(|G_l| - 1)/m`` for every member. A member above the bound says that λ
    is too small to hold this cluster together.

    Parameters
    ----------
    labels : array_like of int, shape (m,)
        Clusters 0..L-1.
    lam : float
        Strength λ of the penalty.

    Returns
    -------
    ndarray, shape (L,)
        The bound of each cluster.

    Raises
    ------
    ValueError
        If `labels` are not 0..L-1 or `lam` is negative or NaN.
    """
    labels = _checked_labels(labels)
    if not lam >= 0:
        raise ValueError(f"lam must be a number >= 0, got {lam!r}.")
    return lam * (np.bincount(labels) - 1) / len(labels)


@dataclass(frozen=True)
class NormDistribution:
    """How the norms ||θ_ij|| of the unordered pairs are distributed.

    Attributes
    ----------
    norms : ndarray, shape (m(m-1)/2,)
        All of them, ascending: the input of a histogram.
    probabilities : ndarray, shape (21,)
        0, 0.05, ..., 1.
    quantiles : ndarray, shape (21,)
        Quantiles at those probabilities.
    """

    norms: NDArray[np.float64]
    probabilities: NDArray[np.float64]
    quantiles: NDArray[np.float64]


def norm_quantiles(theta_norms: ArrayLike) -> NormDistribution:
    """Return the distribution of the off-diagonal norms, to choose ν by.

    Parameters
    ----------
    theta_norms : array_like, shape (m, m)
        Symmetric norms ||θ_ij||.

    Returns
    -------
    NormDistribution
        A ν inside a wide empty interval of `norms` makes the clusters insensitive to it.

    Raises
    ------
    ValueError
        If `theta_norms` is not a symmetric square matrix without NaN, or has fewer than two rows.
    """
    matrix = _checked_norms(theta_norms)
    if len(matrix) < 2:
        raise ValueError("norm_quantiles needs at least two clients, got one: there is no pair.")
    norms = np.sort(matrix[np.triu_indices(len(matrix), k=1)])
    probabilities = np.linspace(0.0, 1.0, 21)
    return NormDistribution(norms, probabilities, np.quantile(norms, probabilities))


def _checked_norms(theta_norms: ArrayLike) -> NDArray[np.float64]:
    norms = np.asarray(theta_norms, dtype=np.float64)
    if norms.ndim != 2 or norms.shape[0] != norms.shape[1] or not norms.size:
        raise ValueError(f"theta_norms must be a square matrix (m, m), got shape {norms.shape}.")
    if np.isnan(norms).any():
        raise ValueError("theta_norms holds NaN: a model of this run is not finite.")
    if not np.allclose(norms, norms.T):
        raise ValueError("theta_norms must be symmetric: entry (i, j) is the norm of a pair.")
    return norms


def _checked_labels(labels: ArrayLike) -> NDArray[np.intp]:
    labels = np.asarray(labels)
    if labels.ndim != 1 or not labels.size or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"labels must be a non-empty vector of integers, got {labels!r}.")
    found = np.unique(labels)
    if not np.array_equal(found, np.arange(len(found))):
        raise ValueError(f"labels must use every number of 0..L-1, got the set {found.tolist()}.")
    return labels.astype(np.intp)
