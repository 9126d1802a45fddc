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
    cut,
    holding_lambda,
    numbered,
    preference,
    settled,
    smallest_distance,
    tree,
    ward_tree,
    winsorised,
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


def test_misplaced_points_move_by_hartigans_rule() -> None:
    # At 4, 3/2 (4 - 2)^2 = 6 is below 2/3 (4 - 9.5)^2 = 20.2; at 7, 3/2 (7 - 3)^2 = 24 is above
    # 2/3 (7 - 9.5)^2 = 4.2.
    near, far = np.array([[0.0], [2], [4], [9], [10]]), np.array([[0.0], [2], [7], [9], [10]])
    assert settled(near, (0, 0, 0, 1, 1)) == (0, 0, 0, 1, 1)
    assert settled(far, (0, 0, 0, 1, 1)) == (0, 0, 1, 1, 1)
    # Sizes count: 5 is nearer to 5/3 than to 9.9, but 3/2 (5 - 5/3)^2 = 16.7 > 1/2 (4.9)^2 = 12.
    assert settled(np.array([[0.0], [0], [5], [9.9]]), (0, 0, 0, 1)) == (0, 0, 1, 1)
    assert settled(near, (0, 1, 2, 3, 4)) == (0, 1, 2, 3, 4)  # whoever is alone stays


def test_candidates_are_settled() -> None:
    # Many noisy directions of three kinds, of which the tree misplaces some.
    rng, truth = np.random.default_rng(0), np.repeat([0, 1, 2], 30)
    updates = rng.normal(size=(3, 20))[truth] + rng.normal(size=(90, 20))
    directions = updates / np.linalg.norm(updates, axis=1, keepdims=True)
    assert cut(ward_tree(directions)[0], 3) != tuple(truth)
    assert tuple(truth) in candidate_groups(updates, 3)


@pytest.mark.parametrize("m", [1, 2, 3])
def test_so_few_clients_are_together_or_alone(m: int) -> None:
    found = candidate_groups(np.eye(m), 3)
    assert found == sorted({(0,) * m, tuple(range(m))})


def test_clients_that_did_not_move_are_no_error() -> None:
    found = candidate_groups(np.zeros((4, 2)), 3)
    assert found[0] == (0, 0, 0, 0)
    assert found[-1] == (0, 1, 2, 3)


# --- The vote -------------------------------------------------------------------------------------

Votes = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]


def votes(sizes: list[int], loss: float = 1.0, noise: float = 0.1, seed: int = 0) -> Votes:
    """Return losses, errors and labels: one group, the true groups of these sizes, alone.

    In one group the members of all but the first true group lose `loss`, alone everybody 0.5.
    """
    rng, m = np.random.default_rng(seed), sum(sizes)
    truth = np.repeat(np.arange(len(sizes)), sizes)
    labels = np.stack([np.zeros(m, int), truth, np.arange(m)], axis=1)
    losses = np.stack([loss * (truth > 0), np.zeros(m), np.full(m, 0.5)], axis=1)
    losses += 3 * rng.random((m, 1)) + noise * rng.normal(size=losses.shape)
    return losses, np.full((m, 3, 3), noise * 2**0.5), labels


def test_a_cell_counts_in_standard_errors() -> None:
    # Six clients, one group against two cells of 4 and 2. Differences 0.3, 0.1, 0.1, 0.3 with
    # errors of 0.1 and, in the other cell, 0.4, 0.2. Less the medians, 0.2 and 0.3, all are 0.1
    # away: scatter 0.14826, and scales sqrt(0.01 + 0.02198) = 0.17884. In units of these 1.6775,
    # 0.5592, twice: the first cell 4.4734/2; the second 3.3550/sqrt(2). Over sqrt(2): 3.2591.
    differences = np.array([0.3, 0.1, 0.1, 0.3, 0.4, 0.2])
    one, two = np.zeros(6, int), np.array([0, 0, 0, 0, 1, 1])
    found = preference(differences, np.full(6, 0.1), one, two)
    assert found == pytest.approx(3.2591, rel=1e-4)
    # A cell counts 4 at most, and one of its four clients 4/2: (1.6775 + 0.5592 + 0.5592 + 2)/2.
    differences[3] = 1e6
    capped = preference(differences, np.full(6, 0.1), one, two)
    assert capped == pytest.approx(found, abs=0.5)
    assert preference(1e6 * differences, np.full(6, 0.1), one, two) <= 4 * 2**0.5
    # Groups that both have do not vote.
    fine = np.array([0, 0, 0, 0, 1, 2])
    assert preference(differences, np.full(6, 0.1), two, fine) == pytest.approx(
        preference(np.array([0.4, 0.2]), np.full(2, 0.1), np.zeros(2, int), np.array([0, 1]))
    )
    assert preference(differences, np.full(6, 0.1), two, two) == 0


@pytest.mark.parametrize("sizes", [[40, 1], [30, 1], [500, 2], [5, 5, 5, 5], [10, 1, 1]])
def test_a_small_group_is_heard(sizes: list[int]) -> None:
    # By the mean over 41 clients, 1 of which gains, it was 1.4 standard errors, whatever it gains.
    assert compare(*votes(sizes), 1.5).chosen == 1


@pytest.mark.parametrize("seed", range(10))
def test_what_nobody_gains_by_is_not_taken(seed: int) -> None:
    losses, errors, labels = votes([10, 10], loss=0.0, seed=seed)
    assert compare(losses, errors, labels, 1.5).chosen == (seed == 2)  # 1 of 15 by chance
    losses[:, 1] += 0.1
    assert compare(losses, errors, labels, 1.5).chosen == 0


LIES = {
    "one": [-1e6, 0, 0],
    "not the truth": [0, 1e6, 0],
    "alone": [1e6, 1e6, 0],
    "no answer to the truth": [0, np.nan, 0],
    "infinite": [0, np.inf, -np.inf],
}


def test_alone_most_gain_a_little_and_some_lose_much() -> None:
    # Nobody's loss is clear where samples are few: the vote of 60 is for "alone", the mean is not.
    rng, loses = np.random.default_rng(0), np.arange(60) % 3 == 0
    differences = np.where(loses, -0.6, 0.15) + 0.1 * rng.normal(size=60)
    errors, truth, alone = np.where(loses, 0.6, 0.05), np.arange(60) % 5, np.arange(60)
    assert differences.mean() < 0
    assert preference(differences, errors, truth, alone) == 0
    assert preference(np.maximum(differences, -0.1), errors, truth, alone) > 1.5  # they lose less


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("sizes", [[5, 5, 5, 5], [20], [10, 10]])
def test_a_liar_does_not_decide(sizes: list[int], lie: str, count: int) -> None:
    losses, errors, labels = votes(sizes)
    losses[-count:], errors[-count:] = LIES[lie], 0.0
    chosen = labels[:, compare(losses, errors, labels, 1.5).chosen]
    assert chosen.tolist() == labels[:, 1].tolist()


@pytest.mark.parametrize("is_honest", [True, False])
def test_who_loses_even_where_it_has_trained_does_not_object(is_honest: bool) -> None:
    # 17 of 21 gain a whole by three groups of their own; four lose as much, more than a tenth.
    fine, errors = np.array([0] * 6 + [1] * 6 + [2] * 5 + [3] * 4), np.full(21, 0.1)
    differences = np.where(fine == 3, -1.0, 1.0)
    training = np.where(fine == 3, 0.1 if is_honest else -0.1, 1.0)
    training[-1] = np.nan  # who does not say is believed
    # By the caps: three cells of 4 and one of -4, over sqrt(4).
    vote = preference(differences, errors, np.zeros(21, int), fine, training)
    assert vote == pytest.approx(0 if is_honest else (3 * 4 - 4) / 2)


def test_losses_that_are_not_finite() -> None:
    losses = np.array([[1.0, 0.5, np.nan], [1.0, 0.5, 0.1]])
    errors, labels = np.full((2, 3, 3), np.nan), np.array([[0, 0, 0], [0, 1, 1]])
    found = compare(losses, errors, labels, 1.5)
    assert found.chosen == 1
    assert_allclose(found.means, [1.0, 0.5, 0.1])
    assert compare(losses * np.nan, errors, labels, 1.5).chosen == 0
    assert compare(losses[:0], errors[:0], labels[:0], 1.5).chosen == 0


def test_winsorised() -> None:
    # The median is 3, the MAD 1: 5 of 1.4826 more are 10.413.
    assert_allclose(winsorised(np.array([1, 2, 3, 4, np.nan, 1e9])), [1, 2, 3, 4, np.nan, 10.413])
    assert_allclose(winsorised(np.array([np.nan])), [np.nan])


def test_the_smallest_distance() -> None:
    assert smallest_distance(np.array([[1.0, 0.0], [4.0, 4.0], [4.0, 0.0]], np.float32)) == 3.0
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
