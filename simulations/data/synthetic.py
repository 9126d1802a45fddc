"""Synthetic scenarios S1 to S5 of FPFC (arXiv:2211.04218, section 6.1 and appendix E.1)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from fl_admm_strategies.maths.checks import NotNegative

from .federated import FederatedData, client_data, generator, split_sizes

NUM_FEATURES, NUM_CLASSES = 60, 10

# Devices per cluster, in order: L is the length, m the sum.
SCENARIOS: dict[str, tuple[int, ...]] = {
    "s1": (25, 25, 25, 25),
    "s2": (10, 40, 10, 40),
    "s3": (50, 50),
    "s4": (50,),
    "s5": (1,) * 50,
}


def cluster_sizes(scenario: str, clients: int | None) -> tuple[int, ...]:
    """Return devices per cluster of a scenario, scaled to `clients` devices.

    The proportions stay those of the paper; S5 (every device its own cluster) changes L instead.

    Raises
    ------
    ValueError
        If `clients` cannot be divided in the scenario's proportions.
    """
    sizes = SCENARIOS[scenario]
    if clients is None:
        return sizes
    own_cluster_each = scenario == "s5"
    unit = 1 if own_cluster_each else sum(sizes) // int(np.gcd.reduce(sizes))
    if clients < 1 or clients % unit:
        raise ValueError(
            f"clients is {clients}, expected a positive multiple of {unit} for "
            f"synthetic-{scenario}: clusters keep the paper's proportions."
        )
    if own_cluster_each:
        return (1,) * clients
    return tuple(s * clients // sum(sizes) for s in sizes)


def synthetic(
    scenario: str,
    seed: int,
    root: Path,
    *,
    clients: int | None = None,
    features: Literal["uniform", "normal"] = "uniform",
    noise: NotNegative = 0.5,
    validation: bool = False,
) -> FederatedData:
    """Generate one scenario: ``y = argmax(softmax(W_l x + b_l + tau))`` for devices of cluster l.

    Per cluster mu_l ~ N(0, 1); entries of W_l (10x60) and b_l (10) ~ N(mu_l, 1); tau ~ N(0,
    noise^2) per sample and class. Device i has ``n_i = 5 (floor(LogNormal(4, 2)) + 50)`` samples,
    without a cap.

    Parameters
    ----------
    scenario : {'s1', 's2', 's3', 's4', 's5'}
        Number and sizes of the clusters.
    seed : int
        Decides everything drawn.
    root : Path
        Not used: nothing is read.
    clients : int or None
        Number of devices m, in the paper's cluster proportions; None for the paper's m.
    features : {'uniform', 'normal'}
        x ~ U[0, 1)^60 or N(0, I). The paper prints the second, its tables were made with the
        first (docs/methods/fpfc-notes.md, P9), hence the default.
    noise : float
        Standard deviation of tau.
    validation : bool
        Hold 20 % of each device's training part out for validation, as the paper does to choose
        lambda. Off by default: the released code has no such split and does not refit (P10), so
        that 80/20 is what its accuracies were measured with.

    Raises
    ------
    ValueError
        If `clients` does not fit the scenario or `noise` is negative.
    """
    devices = cluster_sizes(scenario, clients)
    cluster = np.repeat(np.arange(len(devices)), devices)

    draw = generator(seed, "synthetic", "clusters")
    # mu_l adds the same constant to all logits and changes no label; drawn because the recipe does.
    mean = draw.normal(size=(len(devices), 1))
    bias = draw.normal(mean, 1, size=(len(devices), NUM_CLASSES))
    weight = draw.normal(mean[..., None], 1, size=(len(devices), NUM_CLASSES, NUM_FEATURES))

    size = generator(seed, "synthetic", "sizes").lognormal(4, 2, size=len(cluster))
    parts = []
    for i, (c, n) in enumerate(
        zip(cluster, 5 * (np.floor(size).astype(np.int64) + 50), strict=True)
    ):
        draw = generator(seed, "synthetic", "device", i)
        shape = (int(n), NUM_FEATURES)
        x = (
            draw.random(shape, dtype=np.float32)
            if features == "uniform"
            else draw.standard_normal(shape, dtype=np.float32)
        )
        logits = x @ weight[c].T.astype(np.float32) + bias[c].astype(np.float32)
        logits += noise * draw.standard_normal(logits.shape, dtype=np.float32)
        parts.append(client_data(x, logits.argmax(axis=1), split_sizes(int(n), validation)))
    return FederatedData(
        f"synthetic-{scenario}", parts, cluster, "classification", (NUM_FEATURES,), NUM_CLASSES
    )
