"""Num, ARI, cost and the conditions on λ against hand-derived figures, and what the tables show."""

import math

import numpy as np
import pytest

from simulations.reports.clusters import (
    ClusteringRow,
    cluster_conditions,
    clustering_at,
    communication_cost,
    diagnostics_table,
)
from tests.simulations.screen import row, shown
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


# --- diagnostics ----------------------------------------------------------------------------------


def test_cluster_conditions_by_hand():
    # m=6, λ=0.75: a cluster of 3 holds 0.75*2/6 = 0.25, one of 2 holds 0.125, one alone nothing.
    checks = cluster_conditions([0, 1, 1, 1, 2, 2], [0.3, 0.1, 0.25, 0.15, 0.05, 0.13], 0.75)
    three, two, one = checks
    assert (three.size, three.largest_gradient, three.verdict) == (3, 0.25, "holds")
    assert three.allowed == pytest.approx(0.25)
    assert (two.size, two.largest_gradient, two.verdict) == (2, 0.13, "too small")
    assert two.allowed == pytest.approx(0.125)
    # λ(2-1)/6 = 0.13 at λ = 0.78.
    assert two.lam_needed == pytest.approx(0.78)
    assert (one.size, one.allowed, one.verdict) == (1, 0.0, "holds")
    assert math.isnan(one.lam_needed)


def test_what_the_state_of_the_run_explains_is_open():
    # The cluster of 2 is 0.005 above what it holds, 0.125: less than a slack of 0.006 is off.
    gradients = [0.1, 0.25, 0.15, 0.05, 0.13]
    for slack, verdict in ((0.006, "open"), (0.004, "too small")):
        two = cluster_conditions([0, 0, 0, 1, 1], gradients, 0.625, slack=slack)[1]
        assert two.allowed == pytest.approx(0.125)
        assert two.verdict == verdict


def diagnose(
    labels, gradients, *, clustering, lam=0.6, stationarity=3.2e-4, apart=True, width=80
) -> str:
    return shown(
        diagnostics_table(
            labels,
            gradients,
            lam=lam,
            stationarity=stationarity,
            consensus=1.5e-5,
            apart=apart,
            clustering=clustering,
        ),
        width,
    )


def test_diagnostics_say_which_cluster_fails_and_what_it_takes():
    text = diagnose(
        [0, 1, 1, 1, 2, 2],
        [0.3, 0.1, 0.25, 0.15, 0.05, 0.13],
        lam=0.75,
        clustering=[ClusteringRow(0.01, 3, None), ClusteringRow(4.40615, 3, None)],
    )
    assert row(text, "1") == ["3", "0.25", "0.25", "0.75", "holds"]
    assert " ".join(row(text, "2")) == "2 0.13 0.125 0.78 λ too small"
    assert row(text, "alone") == ["1", "nothing", "to", "hold"]
    assert names(text, "ν=0.01", "ν=4.41", "0.00032", "1.5e-05")
    for how in ({"stationarity": 0.08}, {"apart": False}):  # before one can know
        text = diagnose([0, 0, 1, 1], [0.1, 0.155, 0.1, 0.1], clustering=[], **how)
        assert row(text, "1")[-3:] == ["0.15", "0.62", "open"]  # λ(|G|-1)/m = 0.6/4
        assert names(text, "Open:")
        assert "too small" not in text


def test_diagnostics_say_that_all_is_well_or_that_nothing_fused():
    rows = [ClusteringRow(0.01, 3, None), ClusteringRow(0.5, 1, None)]
    well = diagnose([0, 0, 0], [0.1, 0.1, 0.1], clustering=rows, lam=2.38172)
    assert row(well, "1")[-1] == "holds"
    assert names(well, "3 at ν=0.01, 1 at ν=0.5")
    alone = diagnose([0, 1, 2], [0.1, 0.1, 0.1], clustering=[])
    assert names(alone, "λ=0.6")
    assert "threshold" not in alone


def test_diagnostics_of_many_clusters_stay_short():
    labels = np.concatenate([np.repeat(np.arange(20), 2), np.arange(20, 120)])
    text = diagnose(labels, np.full(140, 0.5), clustering=[])
    # Twelve of the twenty pairs are listed, then 8 more of 2 clients each, then the 100 alone.
    assert row(text, "12")[0] == "2"
    assert " ".join(row(text, "8 more")) == "16 λ too small for 8 of them"
    assert row(text, "alone")[0] == "100"
    assert len(text.splitlines()) < 50
