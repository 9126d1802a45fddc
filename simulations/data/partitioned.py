"""Image data sets under FLAME's partitions and those of the cluster papers; `partitions`.

FLAME's are in docs/methods/flame-notes.md, P12 and P13.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fl_admm_strategies.maths.checks import Count, NotNegative, Positive

from . import partitions
from .federated import ClientData, FederatedData, generator, split_sizes
from .images import Pool

Scheme = Literal[
    "label-count",
    "dirichlet-label",
    "noise",
    "dirichlet-quantity",
    "hybrid",
    "rotation",
    "iid",
]
QUARTERS = {1: 4, 2: 2, 4: 1}
"""Quarter turns from one group to the next, by the number of groups."""


def partitioned(
    source: Callable[[int, Path], Pool],
    name: str,
    seed: int,
    root: Path,
    *,
    clients: Count = 10,
    partition: Scheme = "label-count",
    labels_per_client: int = 2,
    beta: Positive = 0.5,
    sigma: NotNegative = 0.1,
    groups: int = 4,
    overlap: bool = False,
    samples: int | None = None,
    validation: bool = False,
) -> FederatedData:
    """Deal all samples of a source by one of the schemes, then split each client's 80/20.

    The noise of quality skew is drawn once and is in the client's training, validation and test
    inputs. `FederatedData.name` says so where the samples stand in for others.

    All of CIFAR-10 takes 0.74 GB in every process that loads it, MNIST 0.22 GB.

    Parameters
    ----------
    source : callable
        One of `images`, called with (seed, root).
    name : str
        Registry name.
    seed : int
        Decides the partition, the splits, the noise and the subset.
    root : Path
        Data root.
    clients : int
        Number of clients, m.
    partition : str
        'label-count' (#label=k shards), 'dirichlet-label' (Dir(beta) label shares), 'noise'
        (Gaussian, variance sigma i / m), 'dirichlet-quantity' (Dir(beta) sizes) or 'hybrid' (half
        #label=k, half Dir(beta) sizes), all of FLAME; IFCA's 'rotation' (groups with pictures
        turned by 90 or 180 degrees more; each deals all samples), with known true clusters; and
        'iid'. See `partitions`.
    labels_per_client : int
        k of 'label-count' and 'hybrid'.
    beta : float
        beta of 'dirichlet-label', 'dirichlet-quantity' and 'hybrid'.
    sigma : float
        sigma of 'noise', 0 or more.
    groups : int
        Number of groups of 'rotation': 1, 2 or 4.
    overlap : bool
        Of 'hybrid': both groups deal all samples, as in the authors' code, in place of a half each.
        Then a sample may be in one client's test set and in another's training set.
    samples : int or None
        Use a random subset of at most this many samples, each class in its share, for a quick run;
        None for all.
    validation : bool
        Hold 20 % of each client's training part out for validation.

    Raises
    ------
    FileNotFoundError, ValueError
        If a file is missing or damaged (see the source), or the options leave a client too little.
    """
    if overlap and partition != "hybrid":
        raise ValueError(
            f"overlap is true, but partition is {partition!r}, which deals every sample once: "
            "leave it out, or take 'hybrid'."
        )
    if samples is not None and samples < clients:
        raise ValueError(f"samples is {samples}, expected at least {clients}, one for each client.")
    pool = source(seed, root)
    chosen = np.arange(len(pool.labels))
    if samples is not None and samples < len(chosen):
        chosen = partitions.stratified(pool.labels, samples, generator(seed, name, "subset"))
    labels = pool.labels[chosen]

    n, rng = len(labels), generator(seed, name, "partition", partition)
    if partition == "rotation" and groups not in QUARTERS:
        raise ValueError(f"groups is {groups}, expected 1, 2 or 4 with 'rotation'.")
    deal: dict[str, Callable[[], list[partitions.Index]]] = {
        "label-count": lambda: partitions.label_count(labels, clients, labels_per_client, rng),
        "noise": lambda: partitions.evenly(n, clients, rng),
        "dirichlet-quantity": lambda: partitions.dirichlet_quantity(n, clients, beta, rng),
        "hybrid": lambda: partitions.hybrid(
            labels, clients, labels_per_client, beta, rng, overlap=overlap
        ),
        "rotation": lambda: partitions.in_groups(n, clients, groups, rng),
    }
    by_flower = partial(partitions.by_flower, partition, labels, clients, rng, beta=beta)
    dealt = deal.get(partition, by_flower)()
    truth = partitions.groups_of(clients, groups) if partition == "rotation" else None

    parts = []
    for i, part in enumerate(dealt):
        sizes = split_sizes(len(part), validation)
        index = chosen[generator(seed, name, "split", i).permutation(part)]
        x, y = pool.read(index), torch.from_numpy(pool.labels[index])
        if partition == "noise":
            normal = generator(seed, name, "noise", i).standard_normal(x.shape, np.float32)
            x = x + torch.from_numpy(normal).mul_(partitions.noise_std(sigma, i, clients))
        if truth is not None:
            x = _turned(x, QUARTERS[groups] * int(truth[i]))
        train, held_out, test = zip(
            torch.split(x, list(sizes)), torch.split(y, list(sizes)), strict=True
        )
        parts.append(ClientData(train, held_out if validation else None, test))
    full_name = f"{name} ({pool.stand_in})" if pool.stand_in else name
    return FederatedData(
        full_name, parts, truth, "classification", tuple(x.shape[1:]), pool.num_classes
    )


def _turned(x: torch.Tensor, quarters: int) -> torch.Tensor:
    """Return square pictures turned by quarters of a circle.

    Their shape is (n, channels, height, width), or (n, pixels), row by row.
    """
    side = math.isqrt(x.shape[1])
    pictures = x.reshape(-1, side, side) if x.ndim == 2 else x
    return torch.rot90(pictures, quarters, (-2, -1)).reshape(x.shape)
