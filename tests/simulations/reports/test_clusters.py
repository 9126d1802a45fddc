"""Num and ARI against hand-derived figures."""

import numpy as np
import pytest

from simulations.reports.fpfc import ClusteringRow, clustering_at


def test_clustering_by_hand():
    # Four clients, truth {0,1},{2,3}. ν=0.01: all alone; ν=0.1: {0,1},{2},{3}; ν=0.5: {0,1,2},{3},
    # joined through 1-2 alone (the θ-graph need not be transitive).
    theta = np.full((4, 4), 5.0)
    np.fill_diagonal(theta, 0)
    theta[0, 1] = theta[1, 0] = 0.05
    theta[1, 2] = theta[2, 1] = 0.3
    rows = [clustering_at(nu, theta, [0, 0, 1, 1]) for nu in (0.01, 0.1, 0.5)]
    assert [(r.nu, r.num) for r in rows] == [(0.01, 4), (0.1, 3), (0.5, 2)]
    # ARI = (S - E)/((A + B)/2 - E), S = pairs together in both, A and B pairs together in either,
    # E = A B/6; here A = 2 of the 6 pairs.
    # ν=0.01: S=0, B=0, E=0             -> 0
    # ν=0.1:  S=1, B=1, E=1/3           -> (2/3)/(3/2 - 1/3) = 4/7
    # ν=0.5:  S=1, B=3, E=1             -> 0
    assert [r.ari for r in rows] == pytest.approx([0, 4 / 7, 0])
    assert clustering_at(0.1, np.zeros((3, 3)), None) == ClusteringRow(nu=0.1, num=1, ari=None)
