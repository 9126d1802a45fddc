"""FLAME's image data sets under its six partitions (docs/methods/flame.md, P12 and P13)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from . import partitions
from .federated import ClientData, FederatedData, generator, split_sizes
from .sources import Pool

Scheme = Literal[
    "label-count", "dirichlet-label", "writer", "noise", "dirichlet-quantity", "hybrid"
]


def partitioned(
    source: Callable[[int, Path], Pool],
    name: str,
    seed: int,
    root: Path,
    *,
    clients: int = 10,
    partition: Scheme = "label-count",
    labels_per_client: int = 2,
    beta: float = 0.5,
    sigma: float = 0.1,
    samples: int | None = None,
    validation: bool = False,
) -> FederatedData:
    """Deal all samples of a source by one of the six schemes, then split each client's 80/20.

    The noise of quality skew is drawn once and is in the client's training, validation and test
    inputs. `FederatedData.name` says so where the samples stand in for others.

    All of CIFAR-10 takes 0.74 GB in every process that loads it, MNIST 0.22 GB.

    Parameters
    ----------
    source : callable
        One of `sources`, called with (seed, root).
    name : str
        Registry name.
    seed : int
        Decides the partition, the splits, the noise and the subset.
    root : Path
        Data root.
    clients : int
        Number of clients, m.
    partition : str
        'label-count' (#label=k shards), 'dirichlet-label' (Dir(beta) label shares), 'writer' (where
        the data have writers), 'noise' (Gaussian, variance sigma i / m), 'dirichlet-quantity'
        (Dir(beta) sizes) or 'hybrid' (half #label=k, half Dir(beta) sizes); see `partitions`.
    labels_per_client : int
        k of 'label-count' and 'hybrid'.
    beta : float
        beta of 'dirichlet-label', 'dirichlet-quantity' and 'hybrid'.
    sigma : float
        sigma of 'noise', 0 or more.
    samples : int or None
        Use a random subset of at most this many samples, each class in its share, for a quick run;
        None for all.
    validation : bool
        Hold 20 % of each client's training part out for validation.

    Raises
    ------
    FileNotFoundError, ImportError, ValueError
        If a file is missing or damaged (see the source), or the options leave a client too little.
    """
    if clients < 1:
        raise ValueError(f"clients is {clients}, expected an integer >= 1.")
    if not 0 <= sigma < math.inf:
        raise ValueError(f"sigma is {sigma}, expected a finite variance >= 0.")
    if samples is not None and samples < clients:
        raise ValueError(f"samples is {samples}, expected at least {clients}, one for each client.")
    pool = source(seed, root)
    n = len(pool.labels)
    chosen = np.arange(n)
    if samples is not None and samples < n:
        chosen = partitions.stratified(pool.labels, samples, generator(seed, name, "subset"))
    labels = pool.labels[chosen]

    rng = generator(seed, name, "partition", partition)
    match partition:
        case "label-count":
            dealt = partitions.label_count(labels, clients, labels_per_client, rng)
        case "dirichlet-label":
            dealt = partitions.dirichlet_label(labels, clients, beta, rng)
        case "writer":
            if pool.writers is None:
                raise ValueError(
                    f"Data set {name} does not know who wrote its samples. Use partition 'writer' "
                    "with 'mnist-writers', or another partition."
                )
            dealt = partitions.by_writer(pool.writers[chosen], clients)
        case "noise":
            dealt = partitions.evenly(len(labels), clients, rng)
        case "dirichlet-quantity":
            dealt = partitions.dirichlet_quantity(len(labels), clients, beta, rng)
        case "hybrid":
            dealt = partitions.hybrid(labels, clients, labels_per_client, beta, rng)

    parts = []
    for i, own in enumerate(dealt):
        sizes = split_sizes(len(own), validation)
        index = chosen[generator(seed, name, "split", i).permutation(own)]
        x, y = pool.read(index), torch.from_numpy(pool.labels[index])
        if partition == "noise":
            normal = generator(seed, name, "noise", i).standard_normal(x.shape, np.float32)
            x = x + torch.from_numpy(normal).mul_(partitions.noise_std(sigma, i, clients))
        train, held_out, test = zip(
            torch.split(x, list(sizes)), torch.split(y, list(sizes)), strict=True
        )
        parts.append(ClientData(train, held_out if validation else None, test))
    full_name = f"{name} ({pool.stand_in})" if pool.stand_in else name
    return FederatedData(
        full_name, parts, None, "classification", tuple(x.shape[1:]), pool.num_classes
    )
