"""Groups from the clients' directions: the tree, its cuts, the comparison, the two lambdas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist, squareform

from fl_admm_strategies.maths.clustering import fusion_bound
from fl_admm_strategies.maths.grouping import (
    candidate_groups,
    compare,
    corrected,
    cut,
    holding_lambda,
    numbered,
    smallest_distance,
    tree,
    ward_tree,
)


def test_four_points_on_a_line() -> None:
    # 0 and 1 merge at their distance 1, 5 and 8 at 3. The means 0.5 and 6.5 are 6 apart:
    # sqrt(2 * 2 * 2 / (2 + 2)) * 6 = 8.4853.
    merges, heights = ward_tree(np.array([[0.0], [5.0], [1.0], [8.0]]))
    assert merges.tolist() == [[0, 2], [1, 3], [4, 5]]
    assert_allclose(heights, [1.0, 3.0, 72**0.5])
    assert cut(merges, 4) == (0, 1, 2, 3)
    assert cut(merges, 3) == (0, 1, 0, 2)
    assert cut(merges, 2) == (0, 1, 0, 1)
    assert cut(merges, 1) == (0, 0, 0, 0)


@pytest.mark.parametrize("seed", range(8))
def test_the_tree_is_scipys(seed: int) -> None:
    generator = np.random.default_rng(seed)
    points = generator.normal(size=(int(generator.integers(2, 30)), 4))
    expected = linkage(points, "ward")
    merges, heights = ward_tree(points)
    assert_array_equal(merges, expected[:, :2])
    assert_allclose(heights, expected[:, 2])
    for count in range(1, len(points) + 1):
        assert cut(merges, count) == numbered(fcluster(expected, count, "maxclust"))


@pytest.mark.parametrize("method", ["single", "complete", "average", "weighted"])
@pytest.mark.parametrize("seed", range(3))
def test_the_tree_of_distances_is_scipys(seed: int, method: Any) -> None:
    generator = np.random.default_rng(seed)
    distances = pdist(generator.normal(size=(int(generator.integers(2, 20)), 3)))
    expected = linkage(distances, method)
    merges, heights = tree(squareform(distances), method)
    assert_array_equal(merges, expected[:, :2])
    assert_allclose(heights, expected[:, 2])


def test_groups_are_numbered_by_their_first_client() -> None:
    assert numbered([7, 3, 7, 0, 3]) == (0, 1, 0, 2, 1)


def test_candidates_are_cuts_at_large_jumps_and_the_two_extremes() -> None:
    # Directions at 0, 1, 90, 91, 180 and 181 degrees, of lengths that do not count. Ward's heights
    # are chords: 2 sin(0.5 deg) = 0.0175 three times, then 1.99 or more: the largest jump is
    # between them, at three groups.
    angles = np.deg2rad([0, 90, 1, 91, 180, 181])
    length = np.array([1.0, 5.0, 0.1, 3.0, 1e3, 2.0])[:, None]
    updates = length * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    three, alone, one = (0, 1, 0, 1, 2, 2), (0, 1, 2, 3, 4, 5), (0,) * 6
    assert candidate_groups(updates, 1) == [one, three, alone]
    # Cuts into more than m/2 groups are none, however large the jump.
    assert {max(labels) + 1 for labels in candidate_groups(updates, 9)} == {1, 2, 3, 6}


@pytest.mark.parametrize("m", [1, 2, 3])
def test_so_few_clients_are_together_or_alone(m: int) -> None:
    found = candidate_groups(np.eye(m), 3)
    assert found == sorted({(0,) * m, tuple(range(m))})


def test_clients_that_did_not_move_are_no_error() -> None:
    found = candidate_groups(np.zeros((4, 2)), 3)
    assert found[0] == (0, 0, 0, 0)
    assert found[-1] == (0, 1, 2, 3)


def test_fewest_groups_within_the_standard_errors_of_the_best() -> None:
    # Against the best, the last: mean differences 1 and 0.02. Their deviations over the clients:
    # 0 and sqrt((9 + 1 + 1 + 9)/3) / 100 = 0.0258, so the standard error is half of that, 0.0129,
    # and 0.02 is 1.55 of it.
    base = np.array([1.0, 5.0, 2.0, 9.0])  # clients differ more than groupings do
    losses = np.stack([base + 1, base + np.array([-1, 1, 3, 5]) / 100, base], axis=1)
    found = compare(losses, [1, 2, 4], 1.6)
    assert found.chosen == 1
    assert_allclose(found.differences, [1.0, 0.02, 0.0])
    assert_allclose(found.errors, [0.0, 0.0129099, 0.0], atol=1e-6)
    assert compare(losses, [1, 2, 4], 1.5).chosen == 2


def test_a_grouping_with_a_loss_that_is_not_finite_is_out() -> None:
    losses = np.array([[1.0, 0.5, np.nan], [1.0, 0.5, 0.1]])
    assert compare(losses, [1, 2, 3], 1.5).chosen == 1
    assert compare(losses * np.nan, [1, 2, 3], 1.5).chosen == 0
    assert compare(losses[:0], [1, 2, 3], 1.5).chosen == 0
    assert compare(losses[:1, :2], [1, 2], 1.5).chosen == 1  # one client, so no error


def test_the_smallest_distance() -> None:
    assert smallest_distance(np.array([[0.0, 0.0], [3.0, 4.0], [3.0, 0.0]], np.float32)) == 3.0
    assert np.isnan(smallest_distance(np.zeros((1, 2))))


def test_lambda_that_holds_is_the_fusion_bound_turned_round() -> None:
    # Of five clients the group of three has gradient norms of up to 0.4: 5 * 0.4 / 2 = 1; that of
    # two 0.3: 5 * 0.3 / 1 = 1.5.
    labels, norms = (0, 0, 1, 0, 1), np.array([0.1, 0.4, 0.3, np.nan, 0.2])
    lam = holding_lambda(labels, norms)
    assert_allclose(lam, 1.5)
    assert np.nanmax(norms - fusion_bound(labels, lam)[list(labels)]) == pytest.approx(0)
    assert holding_lambda((0, 1), np.array([9.0, 9.0])) == 0  # nobody to hold


# --- The correction of a training loss ------------------------------------------------------------


def left_out_less_training(rows: slice, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
    """Least squares on all: of a client's samples the mean loss when each is left out, less the
    training loss.

    With the residuals r and the leverages h that is the mean of r^2/2 (1/(1 - h)^2 - 1).
    """
    hat = x @ np.linalg.solve(x.T @ x, x.T)
    residual, leverage = y - hat @ y, np.diag(hat)
    return float(np.mean((residual**2 / 2 * (1 / (1 - leverage) ** 2 - 1))[rows]))


def test_a_group_leaves_one_of_its_clients_a_gth_of_the_optimism() -> None:
    # 5 clients of 400 samples, 10 coefficients: first order in d/n, so equal to some per cent.
    rng = np.random.default_rng(0)
    n, size, d = 400, 5, 10
    x = rng.normal(size=(n * size, d))
    y = x @ rng.normal(size=d) + rng.normal(size=n * size)
    rows = slice(0, n)
    alone = left_out_less_training(rows, x[rows], y[rows])
    together = left_out_less_training(rows, x, y)
    assert together == pytest.approx(alone / size, rel=0.1)
    assert alone == pytest.approx(d / n, rel=0.1)  # AIC's d/n: the noise has variance 1


def test_a_corrected_loss_has_schwarzs_penalty() -> None:
    # d = 10 parameters and n = 400 samples a client: o = d/n, and BIC is d log(N)/(2 N).
    sizes = np.array([1, 5, 20])
    found = corrected(np.array([1.0, 2.0, 3.0]), 10 / 400, sizes, 400)
    total = 400 * sizes
    assert_allclose(found, [1, 2, 3] + 10 * np.log(total) / (2 * total))
