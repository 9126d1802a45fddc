"""From the pairwise distances of an FPFC run to clusters and their models.

FPFC (arXiv:2211.04218v3) clusters only at the end: clients i and j belong together if
||theta_ij|| <= nu, and a cluster's model is the mean of its members', weighted by their examples
(Remark 2). The relation need not be transitive, so the clusters are its connected components.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def clusters(theta_norms: ArrayLike, nu: float) -> NDArray[np.intp]:
    """Return the connected components of ||theta_ij|| <= nu (Remark 2).

    Parameters
    ----------
    theta_norms : array_like of shape (m, m)
        ||theta_ij||, symmetric, e.g. of `PairwiseStore.theta_norms`.
    nu : float
        nu >= 0. The paper calls [xi, 0.5] satisfactory; fused pairs lie at xi or below.

    Returns
    -------
    ndarray of int, shape (m,)
        The cluster of each client, numbered from 0 in the order of their first members.
    """
    norms = np.asarray(theta_norms)
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
    """
    labels, weights = np.asarray(labels), np.asarray(weights, dtype=np.float64)
    models = np.empty((labels.max(initial=-1) + 1, omega.shape[1]), dtype=omega.dtype)
    for label, model in enumerate(models):
        members = np.flatnonzero(labels == label)
        share = weights[members] if weights[members].any() else np.ones(len(members))
        model[:] = (share / share.sum()) @ omega[members].astype(np.float64)
    return models


def fusion_bound(labels: ArrayLike, lam: float) -> NDArray[np.float64]:
    """Return the largest gradient norm at which a cluster can be exactly fused.

    Let all of a cluster G_l be at one point alpha_l, and all others too far to pull. Then the
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
    """
    sizes = np.bincount(labels)
    bound: NDArray[np.float64] = lam * (sizes - 1) / sizes.sum()
    return bound
