"""Scikit-learn's digits dealt to three groups of clients whose labels disagree. No file needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .federated import FederatedData, client_data, generator, split_sizes

GROUPS = 3


def digits_swap(
    seed: int, root: Path, *, clients: int = 12, validation: bool = False
) -> FederatedData:
    """Deal all 1797 digits (8x8 pixels, /16) to `clients` clients in 3 equal groups.

    Group g, a block of consecutive clients, holds the labels ``(y + 3 g) mod 10``, so that one
    global model can serve one group only.

    Parameters
    ----------
    seed : int
        Decides who gets which samples.
    root : Path
        Not used: scikit-learn ships the digits.
    clients : int
        Number of clients, a multiple of 3.
    validation : bool
        Hold 20 % of each client's training part out for validation.

    Raises
    ------
    ValueError
        If `clients` is not a positive multiple of 3, or leaves a client too few samples.
    """
    if clients < GROUPS or clients % GROUPS:
        raise ValueError(f"clients is {clients}, expected a positive multiple of {GROUPS}.")
    from sklearn.datasets import load_digits  # here: takes seconds

    images, labels = load_digits(return_X_y=True)
    order = generator(seed, "digits", "deal").permutation(len(labels))
    group = np.arange(clients) * GROUPS // clients
    parts = []
    for g, index in zip(group, np.array_split(order, clients), strict=True):
        sizes = split_sizes(len(index), validation)
        parts.append(client_data(images[index] / 16, (labels[index] + 3 * g) % 10, sizes))
    return FederatedData("digits-swap", parts, group, "classification", (64,), 10)
