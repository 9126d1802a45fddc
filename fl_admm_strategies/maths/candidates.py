"""Clients that speak for all others where groupings of many clients are compared.

Not in FPFC's paper: docs/methods/fpfc.md, "Without a lambda".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


def voters(labels: Mapping[int, NDArray[np.int64]], clients: Sequence[int], most: int) -> list[int]:
    """Return some of these clients, which speak for all: in turn one of every group.

    So a group that is one client of a thousand is heard. Groups are those of the finest grouping
    that has no more than the clients that are wanted.

    Parameters
    ----------
    labels : mapping of int to ndarray of shape (K,)
        The group of every client in every grouping, the coarsest first.
    clients : sequence of int
        In the order in which those of a group come in turn.
    most : int
    """
    groups = np.stack([labels[client] for client in clients])
    finest = [k for k, column in enumerate(groups.T) if len(np.unique(column)) <= most][-1]
    taken: Counter[int] = Counter()
    turns = {}
    for client, label in zip(clients, groups[:, finest].tolist(), strict=True):
        turns[client] = taken[label]
        taken[label] += 1
    return sorted(clients, key=turns.__getitem__)[:most]
