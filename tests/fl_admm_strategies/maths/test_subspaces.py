"""Angles between clients' data, by the golden numbers of docs/methods/pacfl.md."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose
from numpy.typing import NDArray

from clients.methods.clustered import basis_of
from fl_admm_strategies.maths.grouping import cut, tree
from fl_admm_strategies.maths.subspaces import Measure, proximity

X = [
    [[3, 1, 0, 1, 0, 2], [1, 2, 0, 1, 1, 0], [2, 0, 1, 0, 0, 1]],
    [[2, 1, 0, 0, 1, 2], [1, 3, 1, 1, 0, 0], [2, 1, 0, 1, 0, 2]],
    [[0, 1, 3, 0, 2, 0], [1, 0, 2, 1, 3, 0], [0, 0, 1, 2, 1, 1]],
    [[0, 1, 2, 1, 2, 0], [1, 0, 3, 0, 2, 1], [0, 1, 1, 3, 1, 1]],
    [[1, 0, 0, 3, 0, 1], [0, 1, 0, 2, 1, 2], [1, 1, 1, 2, 0, 0]],
]
"""Samples of five clients, a row each."""
SMALLEST = [
    *(13.08052784, 60.16832669, 48.41126043, 44.19230185, 63.05776272),
    *(52.31882081, 47.2231123, 10.82431732, 26.43879072, 23.39069295),
]
SUM = [
    *(66.40655275, 159.33060734, 122.20576593, 134.35000115, 136.33658067),
    *(133.00717211, 111.0995068, 57.22419229, 145.32547488, 139.06224004),
]
SIGNED = [
    *(18.11229116, 69.63652741, 59.81693314, 48.72811748, 67.22460965),
    *(58.38903341, 47.46638793, 15.0505537, 39.86485784, 48.02186894),
]


def bases() -> list[NDArray[np.float64]]:
    """Return the clients' directions, each with its largest entry positive."""
    found = [basis_of(np.array(rows, dtype=np.float64), 2) for rows in X]
    return [basis * np.sign([v[abs(v).argmax()] for v in basis.T]) for basis in found]


def pairs(angles: NDArray[np.float64]) -> list[float]:
    """Return the angles of the pairs 12, 13, 14, 15, 23, ..., 45."""
    assert_allclose(angles, angles.T)
    assert not angles.diagonal().any()
    return list(angles[np.triu_indices(5, k=1)])


def test_the_angles() -> None:
    assert_allclose(pairs(proximity(bases(), "smallest")), SMALLEST, atol=1e-8)
    assert_allclose(pairs(proximity(bases(), "sum")), SUM, atol=1e-8)
    assert_allclose(pairs(proximity(bases(), "entrywise-signed")), SIGNED, atol=1e-8)


@pytest.mark.parametrize("measure", ["smallest", "sum", "entrywise", "entrywise-signed"])
def test_a_cosine_beyond_1_by_rounding_is_an_angle_of_0(measure: Measure) -> None:
    line = np.array([[1 + 1e-15], [0.0]])
    assert (line.T @ line > 1).all()
    assert_allclose(proximity([line, line], measure), 0, atol=1e-5)


def test_only_the_signed_measure_depends_on_the_signs_of_the_vectors() -> None:
    flipped = bases()
    flipped[1][:, 0] *= -1
    assert pairs(proximity(flipped, "entrywise-signed"))[0] == pytest.approx(48.29426159, abs=1e-8)
    for measure in ("smallest", "sum", "entrywise"):
        found, expected = (pairs(proximity(b, measure)) for b in (flipped, bases()))  # type: ignore[arg-type]
        assert_allclose(found, expected, atol=1e-12)


def test_the_smallest_angle_is_scipys_whatever_spans_the_space() -> None:
    from scipy.linalg import subspace_angles

    rng = np.random.default_rng(0)
    own, other = rng.normal(size=(8, 3)), rng.normal(size=(8, 2))
    expected = np.rad2deg(subspace_angles(own, other)[-1])
    wider = np.concatenate([own, own[:, :1] + own[:, 1:2]], axis=1)  # spans no more
    assert proximity([wider, other], "smallest")[0, 1] == pytest.approx(expected, abs=1e-9)


def test_the_tree_of_angles() -> None:
    angles = proximity(bases(), "smallest")
    merges, heights = tree(angles, "average")
    assert_allclose(heights, [10.82431732, 13.08052784, 24.91474184, 52.5619308], atol=1e-8)
    assert cut(merges, 3) == (0, 0, 1, 1, 2)
    assert cut(merges, 2) == (0, 0, 1, 1, 1)
    assert tree(angles, "weighted")[1][-1] == pytest.approx(50.84837487, abs=1e-8)
    assert tree(angles, "single")[1][-1] < 50  # one cluster below a threshold of 50


def test_a_basis_has_no_more_vectors_than_the_data_have_directions() -> None:
    rows = np.array([[1.0, -2.0, 0.0], [2.0, -4.0, 0.0]])
    basis = basis_of(rows, 3)
    expected = np.array([[-1], [2], [0]]) / 5**0.5
    assert_allclose(basis * np.sign(basis[1]), expected, atol=1e-12)


def test_the_signs_are_those_of_the_decomposition_as_in_the_authors_code() -> None:
    rng = np.random.default_rng(3)
    for samples in (4, 9, 40):
        rows = rng.random((samples, 8))
        theirs = np.linalg.svd(rows.T, full_matrices=False)[0][:, :3]
        np.testing.assert_array_equal(basis_of(rows, 3), theirs)
