"""Synthetic S1-S5: scenario table, size law and label rule (docs/methods/fpfc-notes.md, P9)."""

import pytest

from simulations.data import load
from simulations.data.synthetic import SCENARIOS, cluster_sizes
from tests.support.refusals import refused


@pytest.mark.parametrize(
    ("scenario", "clients", "sizes"),
    [
        ("s1", None, [25] * 4),
        ("s1", 20, [5] * 4),
        ("s2", 10, [1, 4, 1, 4]),
        ("s3", 4, [2, 2]),
        ("s4", 7, [7]),
        ("s5", 3, [1, 1, 1]),
    ],
)
def test_clusters_are_contiguous_blocks_in_the_papers_proportions(
    scenario: str, clients: int | None, sizes: list[int]
) -> None:
    data = load(f"synthetic-{scenario}", 1, clients=clients)
    assert data.true_clusters.tolist() == [c for c, n in enumerate(sizes) for _ in range(n)]


def test_the_papers_sizes() -> None:
    """The scenario table (docs/methods/fpfc-notes.md, P9)."""
    sizes = {scenario: list(cluster_sizes(scenario, None)) for scenario in SCENARIOS}
    expected = {"s1": [25] * 4, "s2": [10, 40, 10, 40], "s3": [50, 50], "s4": [50], "s5": [1] * 50}
    assert sizes == expected
    for scenario, clients, unit in (("s1", 10, 4), ("s2", 15, 10), ("s5", 0, 1)):
        with refused(ValueError, "clients", clients, unit):
            cluster_sizes(scenario, clients)
