"""Num, ARI, cost and the conditions on λ against hand-derived figures, and what the tables show."""

import numpy as np
import pytest

from fl_admm_strategies.algorithms.fpfc.diagnostics import FPFCDiagnostics
from fl_admm_strategies.maths.clustering import fusion_bound
from simulations.reports.fpfc import (
    ClusteringRow,
    clustering_at,
    communication_cost,
    render_trust,
)
from tests.support.refusals import names

# --- clusters -------------------------------------------------------------------------------------


def norms(pairs: dict[tuple[int, int], float], m: int, far: float) -> np.ndarray:
    matrix = np.full((m, m), far)
    np.fill_diagonal(matrix, 0)
    for (i, j), value in pairs.items():
        matrix[i, j] = matrix[j, i] = value
    return matrix


def test_clustering_by_hand():
    # Four clients, truth {0,1},{2,3}. ν=0.01: all alone; ν=0.1: {0,1},{2},{3}; ν=0.5: {0,1,2},{3},
    # joined through 1-2 alone (the θ-graph need not be transitive).
    theta = norms({(0, 1): 0.05, (1, 2): 0.3}, 4, far=5.0)
    rows = [clustering_at(nu, theta, [0, 0, 1, 1]) for nu in (0.01, 0.1, 0.5)]
    assert [(r.nu, r.num) for r in rows] == [(0.01, 4), (0.1, 3), (0.5, 2)]
    # ARI = (S - E)/((A + B)/2 - E), S = pairs together in both, A and B pairs together in either,
    # E = A B/6; here A = 2 of the 6 pairs.
    # ν=0.01: S=0, B=0, E=0             -> 0
    # ν=0.1:  S=1, B=1, E=1/3           -> (2/3)/(3/2 - 1/3) = 4/7
    # ν=0.5:  S=1, B=3, E=1             -> 0
    assert [r.ari for r in rows] == pytest.approx([0, 4 / 7, 0])


def test_clustering_without_truth():
    row = clustering_at(0.1, np.zeros((3, 3)), None)
    assert row == ClusteringRow(nu=0.1, num=1, ari=None)


# --- cost -----------------------------------------------------------------------------------------


def test_cost_of_the_published_experiments():
    # FPFC table 1: S1 100*610 + 2*30*610*2000, H&BF 8*15 + 2*4*15*100.
    assert communication_cost(100, 610, [30] * 2000) == 73_261_000
    assert communication_cost(8, 15, [4] * 100) == 12_120


def test_cost_counts_each_round_and_the_shared_block():
    # 5 clients; (2 + 3) travels as one vector of 5: 5*5 + 2*(1 + 0 + 4)*5.
    assert communication_cost(5, 2 + 3, [1, 0, 4]) == 75


# --- trust ----------------------------------------------------------------------------------------


def trust(labels: list[int], gradients: list[float], lam: float, *rows: ClusteringRow) -> str:
    found = FPFCDiagnostics(
        stationarity=3.2e-4,
        primal_residual=1.5e-5,
        labels=np.array(labels),
        gradient_norms=np.array(gradients),
        fusion_bounds=fusion_bound(labels, lam),
        theta_norms=np.zeros((len(labels), len(labels))),
        lam=lam,
        nu=0.1,
    )
    return render_trust(found, rows).plain


def test_how_many_clusters_lambda_holds():
    # m=6, lambda=0.75: a cluster of 3 holds 0.75*2/6 = 0.25, one of 2 holds 0.125.
    labels, rows = [0, 1, 1, 1, 2, 2], (ClusteringRow(0.01, 3, None), ClusteringRow(4.40615, 3, 1))
    gradients = [0.3, 0.1, 0.25, np.nan, 0.05, 0.13]
    text = trust(labels, gradients, 0.75, *rows)
    assert names(text, "1 of 2", "3 at ν=0.01, 3 at ν=4.41", "0.00032", "1.5e-05")
    assert "depend" not in text
    # lambda (2 - 1)/6 = 0.13 at lambda = 0.78.
    assert "λ holds" not in trust(labels, gradients, 0.781)


def test_clusters_that_depend_on_the_threshold_and_clients_alone():
    rows = ClusteringRow(0.01, 3, None), ClusteringRow(0.5, 1, None)
    assert names(trust([0, 1, 2], [0.1] * 3, 0.6, *rows), "depend", "alone")
