"""Clusters and their models, on small cases by hand."""

from __future__ import annotations

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

from fl_admm_strategies.maths.clustering import cluster_models, clusters, fusion_bound


def test_a_chain_is_one_cluster_although_its_ends_are_apart() -> None:
    # 0-2 and 2-3 are linked, 0-3 is not; 1 and 4 are linked; 5 is alone.
    norms = np.full((6, 6), 9.0)
    np.fill_diagonal(norms, 0)
    for i, j in ((0, 2), (2, 3), (1, 4)):
        norms[i, j] = norms[j, i] = 0.1
    assert_array_equal(clusters(norms, nu=0.1), [0, 1, 0, 0, 1, 2])


def test_all_alone_and_all_together() -> None:
    norms = np.abs(np.subtract.outer(np.arange(4.0), np.arange(4.0)))
    assert_array_equal(clusters(norms, nu=0.99), [0, 1, 2, 3])
    assert_array_equal(clusters(norms, nu=1.0), [0, 0, 0, 0])
    assert_array_equal(clusters([[0.0]], nu=0), [0])


def test_an_infinite_norm_is_a_far_pair() -> None:
    assert_array_equal(clusters([[0, np.inf], [np.inf, 0]], nu=0.5), [0, 1])


def test_cluster_models_are_means_by_samples() -> None:
    omega = np.array([[0.0, 1.0], [4.0, 1.0], [7.0, 7.0], [9.0, 5.0]], dtype=np.float32)
    # (1*0 + 3*4)/4 = 3; a cluster without samples is averaged plainly.
    models = cluster_models(omega, [1, 3, 0, 0], [0, 0, 1, 1])
    assert models.dtype == np.float32
    assert_allclose(models, [[3, 1], [8, 6]])


def test_fusion_bound() -> None:
    # lam (|G_l| - 1)/m with m = 4: .6*2/4 for three members, 0 for a single one.
    assert_allclose(fusion_bound([0, 1, 0, 0], lam=0.6), [0.3, 0.0])
