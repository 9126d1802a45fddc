"""Fairness and clusters, against numbers derived by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from simulations.methods.measures import clustering


def of_clusters(labels: Any, malicious: set[int], truth: Any) -> Any:
    problem = SimpleNamespace(
        malicious=malicious, data=SimpleNamespace(true_clusters=None if truth is None else truth)
    )
    # Client 3 never took part: the strategy has no cluster for it.
    return problem, SimpleNamespace(client_ids=[0, 1, 2, 4], clusters=lambda: np.array(labels))


def test_clusters_are_counted_over_the_honest_clients() -> None:
    truth = np.array([0, 0, 1, 1, 1])
    assert clustering(*of_clusters([0, 0, 1, 2], set(), truth))["num"] == 3
    assert clustering(*of_clusters([0, 0, 1, 2], {4}, truth)) == {"num": 2, "ari": 1}
    assert clustering(*of_clusters([0, 0, 1, 2], {4}, None)) == {"num": 2}
    problem, _ = of_clusters([0], set(), None)
    assert clustering(problem, SimpleNamespace()) == {}
    assert clustering(problem, SimpleNamespace(clusters=lambda: None)) == {}
