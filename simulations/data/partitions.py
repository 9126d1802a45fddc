"""The ways in which FLAME's experiments deal samples to clients, one for clusters, Flower's.

FLAME's are in its section VI; see docs/methods/flame-notes.md, P13. `in_groups` has IFCA's groups
(arXiv:2006.04088), which see all samples, each in another way.

A scheme takes the labels of all samples and returns the sample indices of each
client, without order; disjoint but for `in_groups`. Quality skew deals `evenly` and adds noise of
`noise_std`.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int64]

# A client with less than this can neither be trained nor scored.
MIN_LABEL_SKEW = 10
# Dirichlet quantity skew gives every client at least this many where there are enough (P13).
MIN_QUANTITY_SKEW = 100


def label_count(
    labels: Index, clients: int, labels_per_client: int, rng: np.random.Generator
) -> list[Index]:
    """Label skew by number of labels, ``#label=k`` (scheme 1).

    Each of the C classes is cut into ceil(k m / C) near-equal shards, and each client draws k
    shards out of all, without replacement: it holds at most k labels (two shards may be of one).
    Shards beyond k m stay unused, so every sample is dealt where C divides k m.

    flwr-datasets' `ShardPartitioner` is not used because its shards, cut out of the samples sorted
    by label, cross from one class into the next (a client then holds up to 2k labels), and its
    `PathologicalPartitioner` because it deals labels, not shards.

    Parameters
    ----------
    labels : ndarray, shape (n,)
        Class of each sample.
    clients : int
        Number of clients, m.
    labels_per_client : int
        Shards a client draws, k.
    rng : Generator
        Decides which samples make a shard, and who gets which.

    Raises
    ------
    ValueError
        If k is not between 1 and the number of classes, or a class has fewer samples than shards.
    """
    classes, counts = np.unique(labels, return_counts=True)
    if not 1 <= labels_per_client <= len(classes):
        raise ValueError(
            f"labels_per_client is {labels_per_client}, expected 1 to {len(classes)}, the number "
            "of classes in the data."
        )
    pieces = math.ceil(labels_per_client * clients / len(classes))
    if counts.min() < pieces:
        raise ValueError(
            f"With clients={clients} and labels_per_client={labels_per_client} each class is cut "
            f"into {pieces} shards, and class {classes[counts.argmin()]} has {counts.min()} "
            "sample(s). Use fewer clients or more samples."
        )
    shards = [
        shard
        for c in classes
        for shard in np.array_split(rng.permutation(np.flatnonzero(labels == c)), pieces)
    ]
    drawn = rng.permutation(len(shards))[: labels_per_client * clients]
    return [np.concatenate([shards[s] for s in hand]) for hand in drawn.reshape(clients, -1)]


def by_flower(
    name: str, labels: Index, clients: int, rng: np.random.Generator, *, beta: float = 0.5
) -> list[Index]:
    """Deal by one of flwr-datasets' partitioners, which has its rule.

    Parameters
    ----------
    name : {"dirichlet-label", "iid"}
        Label skew by distribution, ``Dir(beta)`` (scheme 2): class c goes to the clients in the
        shares p_c ~ Dirichlet(beta, ..., beta), drawn again, up to 10 times, until every client has
        10 samples. Or IID parts.
    labels : ndarray, shape (n,)
        Class of each sample.
    clients : int
        Number of clients, m.
    rng : Generator
        Decides the shares, and which client gets which samples.
    beta : float
        Concentration beta, above 0; the smaller, the fewer labels a client has.

    Raises
    ------
    ValueError
        If a client would have no samples, or by "dirichlet-label" less than 10.
    """
    from datasets import Dataset  # here: takes seconds
    from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner

    # A partitioner cuts a class in the order in which its samples come.
    order, seed = rng.permutation(len(labels)), int(rng.integers(2**32))
    made = IidPartitioner(clients)
    if name == "dirichlet-label":
        options: dict[str, Any] = {"min_partition_size": MIN_LABEL_SKEW, "shuffle": False}
        made = DirichletPartitioner(clients, "label", beta, seed=seed, **options)
    made.dataset = Dataset.from_dict({"label": labels[order], "index": order})
    try:
        with warnings.catch_warnings(action="ignore"):  # of sizes and classes, which are refused
            return [np.asarray(made.load_partition(i)["index"]) for i in range(clients)]
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"flwr-datasets' {type(made).__name__} cannot deal {len(labels)} samples to "
            f"clients={clients} with beta={beta}: {str(error).rstrip('.')}. Use fewer clients, "
            "more samples or a larger beta."
        ) from error


def evenly(n: int, clients: int, rng: np.random.Generator) -> list[Index]:
    """Equal random parts of n samples, the split under quality skew (scheme 4)."""
    return np.array_split(rng.permutation(n), clients)


def noise_std(sigma: float, client: int, clients: int) -> float:
    """Return the standard deviation of the noise of client i: sqrt(sigma i / m) (scheme 4).

    Parameters
    ----------
    sigma : float
        Variance of the last client's noise, sigma.
    client : int
        Partition id, 0 to m - 1; the paper's i less 1.
    clients : int
        Number of clients, m.
    """
    return math.sqrt(sigma * (client + 1) / clients)


def dirichlet_quantity(n: int, clients: int, beta: float, rng: np.random.Generator) -> list[Index]:
    """Quantity skew ``Dir(beta)`` (scheme 5): client i gets a share p_i of all samples, at random.

    p ~ Dirichlet(beta, ..., beta). A client whose share is below 100 samples (below n / m where
    there are not 100 a client) gets 100, and the others share the rest in proportion to p.

    Not in flwr-datasets: `SizePartitioner` deals given sizes, which is one line here.

    Parameters
    ----------
    n : int
        Number of samples.
    clients : int
        Number of clients, m.
    beta : float
        Concentration beta, above 0; the smaller, the more unequal the sizes.
    rng : Generator
        Decides the shares, and who gets which samples.
    """
    p = rng.dirichlet(np.full(clients, beta))
    minimum = min(MIN_QUANTITY_SKEW, n // clients)
    raised = np.zeros(clients, bool)
    share = p * n
    while (share < minimum - 1e-6).any():  # raising some lowers the others: at most m times
        raised |= share < minimum - 1e-6
        rest = n - minimum * raised.sum()
        share = np.where(raised, minimum, p * (rest / p[~raised].sum()))
    # Cutting what is above the minimum to whole samples leaves the minimum whole.
    above = np.floor(np.cumsum(np.maximum(share - minimum, 0))).astype(np.int64)
    cuts = above + minimum * np.arange(1, clients + 1)
    return np.split(rng.permutation(n), cuts[:-1])


def hybrid(
    labels: Index,
    clients: int,
    labels_per_client: int,
    beta: float,
    rng: np.random.Generator,
    *,
    overlap: bool = False,
) -> list[Index]:
    """Hybrid skew (scheme 6): two random halves of the samples, dealt by schemes 1 and 5.

    The first ceil(m / 2) clients get one half by `label_count`, the others the other half by
    `dirichlet_quantity`.

    Parameters
    ----------
    labels : ndarray, shape (n,)
        Class of each sample.
    clients : int
        Number of clients, m, 2 or more.
    labels_per_client, beta, rng
        See the two schemes.
    overlap : bool
        Both groups deal all samples, as in the authors' code: every sample is dealt to a client of
        either group, and may be a test sample of one and a training sample of the other.

    Raises
    ------
    ValueError
        If there is one client only, or one of the schemes says so.
    """
    if clients < 2:
        raise ValueError(
            f"clients is {clients}, expected 2 or more: hybrid skew has two groups of clients."
        )
    halves = np.array_split(rng.permutation(len(labels)), 2)
    first, second = [np.arange(len(labels))] * 2 if overlap else halves
    few_labels = (clients + 1) // 2
    return [first[i] for i in label_count(labels[first], few_labels, labels_per_client, rng)] + [
        second[i] for i in dirichlet_quantity(len(second), clients - few_labels, beta, rng)
    ]


def groups_of(clients: int, groups: int) -> Index:
    """Return the group of every client, in blocks of consecutive clients, equal but for one client.

    Raises
    ------
    ValueError
        If there are not as many clients as groups.
    """
    if not 1 <= groups <= clients:
        raise ValueError(f"groups is {groups}, expected 1 to {clients}, the number of clients.")
    return np.arange(clients) * groups // clients


def in_groups(n: int, clients: int, groups: int, rng: np.random.Generator) -> list[Index]:
    """Every group deals all n samples evenly to its clients; see `groups_of`."""
    sizes = np.bincount(groups_of(clients, groups))
    return [part for size in sizes for part in evenly(n, int(size), rng)]


def stratified(labels: npt.NDArray[Any], samples: int, rng: np.random.Generator) -> Index:
    """Draw `samples` indices, each class in its share of the whole (off by less than one sample).

    Every n / samples-th sample of all, put in random order within their class.
    """
    order = rng.permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]
    return by_class[np.arange(samples) * len(labels) // samples]
