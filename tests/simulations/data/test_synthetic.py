"""Synthetic S1-S5: scenario table, size law and label rule (docs/methods/fpfc-notes.md, P9)."""

import pytest
import torch

from simulations.data import load
from simulations.data.synthetic import SCENARIOS, cluster_sizes
from tests.support.counts import class_counts
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


@pytest.mark.parametrize(
    ("features", "mean", "variance"), [("uniform", 0.5, 1 / 12), ("normal", 0.0, 1.0)]
)
def test_features(features: str, mean: float, variance: float) -> None:
    data = load("synthetic-s1", 1, clients=20, features=features)
    x = torch.cat([c.train[0] for c in data.clients])
    # At least 20 * 200 * 60 = 240,000 numbers: 0.01 is more than 4 s.d. of either estimate.
    assert x.mean().item() == pytest.approx(mean, abs=0.01)
    assert x.var().item() == pytest.approx(variance, abs=0.015)
    firsts = torch.stack([c.train[0][0] for c in data.clients])
    assert len(firsts.unique(dim=0)) == 20  # devices do not repeat each other's samples
    if features == "uniform":
        assert x.min() >= 0
        assert x.max() < 1


def score_of_device(fitted_on: int, scored_on: int, **options: object) -> float:
    """Accuracy on one device of a softmax regression fitted on another by 500 GD steps."""
    clients = load("synthetic-s1", 2, clients=8, features="normal", **options).clients
    x, y = clients[fitted_on].train
    linear = torch.zeros(61, 10)
    x = torch.cat([x, torch.ones(len(x), 1)], dim=1)
    target = torch.nn.functional.one_hot(y, 10).float()
    for _ in range(500):
        linear -= 0.5 / len(x) * x.T @ (torch.softmax(x @ linear, dim=1) - target)
    xt, yt = (
        torch.cat(t) for t in zip(*(clients[scored_on].train, clients[scored_on].test), strict=True)
    )
    logits = xt @ linear[:-1] + linear[-1]
    return float((logits.argmax(dim=1) == yt).float().mean())


@pytest.mark.slow
def test_devices_of_a_cluster_share_their_labels_rule_and_others_do_not() -> None:
    # The largest device of each of the first two clusters (devices 0, 1 and 2, 3).
    clients = load("synthetic-s1", 2, clients=8, features="normal").clients
    n = [len(c.train[1]) for c in clients]
    first = 0 if n[0] > n[1] else 1
    assert score_of_device(first, 1 - first) > 0.6
    assert score_of_device(first, 2) < 0.3


def test_noise_changes_labels_only_and_more_noise_changes_more() -> None:
    noisy = load("synthetic-s4", 1, clients=1, noise=5.0).clients[0]
    clean = load("synthetic-s4", 1, clients=1, noise=0).clients[0]
    assert torch.equal(noisy.train[0], clean.train[0])
    slightly = load("synthetic-s4", 1, clients=1, noise=0.5).clients[0]
    changed = [
        (part.train[1] != clean.train[1]).float().mean().item() for part in (slightly, noisy)
    ]
    assert 0 < changed[0] < changed[1]
    # Noise that drowns the rule leaves ten equally likely labels.
    (drowned,) = class_counts(load("synthetic-s4", 1, clients=1, noise=1e6))
    assert drowned.max() / drowned.sum() < 0.16
