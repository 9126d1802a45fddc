"""What a federated data set is, and the random numbers and splits its loaders share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Samples: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class ClientData:
    """The samples of one client, as (inputs, labels) pairs.

    Attributes
    ----------
    train, test : tuple of Tensor
        Inputs, float32, shape (n, *input_shape); labels, shape (n,), int64 class indices for
        classification and float32 for regression.
    validation : tuple of Tensor or None
        Samples held out of the training part, where the loader was asked for them.
    """

    train: Samples
    validation: Samples | None
    test: Samples


@dataclass(frozen=True, eq=False)
class FederatedData:
    """A data set dealt to clients. Do not write into its tensors: a process shares one copy.

    Attributes
    ----------
    name : str
        Registry name, and in parentheses what the samples stand in for, if anything.
    clients : list of ClientData
        One entry per client; the position is the partition id.
    true_clusters : ndarray of int64, shape (m,), or None
        The cluster each client was generated in, where the data set has such a thing.
    task : {'classification', 'regression'}
        What the labels are.
    input_shape : tuple of int
        Shape of one input, without the sample axis.
    num_classes : int or None
        Number of classes; None for regression.
    """

    name: str
    clients: list[ClientData]
    true_clusters: npt.NDArray[np.int64] | None
    task: Literal["classification", "regression"]
    input_shape: tuple[int, ...]
    num_classes: int | None


def check(name: str, data: object) -> None:
    """Refuse what a function of the user's own returned, unless it is a `FederatedData` throughout.

    Raises
    ------
    ValueError
        The message names the client, and what was expected.
    """
    if not isinstance(data, FederatedData):
        raise ValueError(
            f"{name} returned a {type(data).__name__}, expected a simulations.data.FederatedData."
        )
    if not data.clients:
        raise ValueError(f"{name} returned no clients, expected one entry or more.")
    if (data.task == "classification") != (data.num_classes is not None):
        raise ValueError(f"{name}: give num_classes for a classification, and for that alone.")
    kind, shape = torch.int64 if data.num_classes else torch.float32, tuple(data.input_shape)
    for client, parts in enumerate(data.clients):
        for part in ("train", "validation", "test"):
            if (samples := getattr(parts, part)) is None and part == "validation":
                continue
            where = f"{name}: the {part} part of client {client}"
            if not (isinstance(samples, tuple) and all(isinstance(t, Tensor) for t in samples)):
                raise ValueError(f"{where} is no pair of tensors (inputs, labels).")
            x, y = samples
            found = (x.dtype, tuple(x.shape), y.dtype, tuple(y.shape))
            wanted = (torch.float32, (len(y), *shape), kind, (len(y),))
            if found != wanted or not len(y):
                raise ValueError(f"{where} has inputs and labels of {found}, expected {wanted}.")
            classes = range(data.num_classes or 0)
            if data.num_classes and not {int(y.min()), int(y.max())} <= {*classes}:
                raise ValueError(
                    f"{where} has labels from {int(y.min())} to {int(y.max())}, expected {classes}."
                )


def with_validation(data: FederatedData, seed: int) -> FederatedData:
    """Hold a fifth of each client's training samples out for validation, where none are.

    Raises
    ------
    ValueError
        If a client has but one sample to train on.
    """
    clients = []
    for number, client in enumerate(data.clients):
        if client.validation is None:
            x, y = client.train
            kept, _ = holdout(len(y), validation=True)
            order = torch.from_numpy(generator(seed, "validation", number).permutation(len(y)))
            train, held = order[:kept], order[kept:]
            client = ClientData((x[train], y[train]), (x[held], y[held]), client.test)
        clients.append(client)
    return replace(data, clients=clients)


def without_clients(
    data: FederatedData, share: float, seed: int
) -> tuple[FederatedData, FederatedData]:
    """Hold clients out: return the data of those that stay, and of the others.

    Parameters
    ----------
    share : float
        Of the clients of every true cluster, rounded; of all, where clusters are not known.
    seed : int

    Raises
    ------
    ValueError
        If one of the two would have no clients.
    """
    m = len(data.clients)
    kinds = np.zeros(m, np.int64) if data.true_clusters is None else data.true_clusters
    rng, chosen = generator(seed, "newcomers"), np.zeros(m, dtype=np.bool_)
    for kind in np.unique(kinds):
        members = rng.permutation(np.flatnonzero(kinds == kind))
        chosen[members[: round(share * len(members))]] = True
    if not 0 < chosen.sum() < m:
        raise ValueError(
            f"newcomers.share is {share:g}, which of the {m} clients of {data.name!r} is "
            f"{chosen.sum()}, expected some but not all. Take another share or more clients."
        )
    parts = []
    for which in (~chosen, chosen):
        clients = [data.clients[int(client)] for client in np.flatnonzero(which)]
        true = None if data.true_clusters is None else kinds[which]
        parts.append(replace(data, clients=clients, true_clusters=true))
    return parts[0], parts[1]


def generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """Return the random stream of one purpose, independent of the streams of all others.

    Parameters
    ----------
    seed : int
        The run's seed, not negative.
    *purpose : str or int
        What the numbers are for, e.g. ``"synthetic", "client", 3``.
    """
    words = [int.from_bytes(p.encode(), "little") if isinstance(p, str) else p for p in purpose]
    return np.random.default_rng(np.random.SeedSequence([seed, *words]))


class Sizes(NamedTuple):
    """Number of samples in each part of a client's data."""

    train: int
    validation: int
    test: int


def _fifth(n: int) -> int:
    return max(1, round(n / 5))


def holdout(n: int, validation: bool) -> tuple[int, int]:
    """Split `n` training samples 80/20 into (train, validation), or (n, 0) if not asked to."""
    held = _fifth(n) if validation else 0
    if n - held < 1:
        raise ValueError(
            f"A client has {n} training sample(s), too few to hold out a validation part. Use "
            "fewer clients, more samples or validation=false."
        )
    return n - held, held


def split_sizes(n: int, validation: bool) -> Sizes:
    """Sizes of an 80/20 train/test split of `n` samples.

    Parameters
    ----------
    n : int
        Number of samples of one client.
    validation : bool
        Split the training part once more, 80/20 into train and validation (FPFC, section 6.1).

    Raises
    ------
    ValueError
        If `n` leaves a part empty.
    """
    if n < 2:
        raise ValueError(
            f"A client has {n} sample(s), expected 2 for a train/test split. Use fewer clients."
        )
    test = _fifth(n)
    return Sizes(*holdout(n - test, validation), test)


def client_data(x: npt.NDArray[Any], y: npt.NDArray[Any], sizes: Sequence[int]) -> ClientData:
    """Cut (already shuffled) samples into train, validation and test, in this order.

    Parameters
    ----------
    x : ndarray, shape (n, *input_shape)
        Inputs; become float32.
    y : ndarray, shape (n,)
        Labels: integers become int64, floats float32.
    sizes : sequence of 3 int
        Sizes of the train, validation and test parts; they sum to n.
    """
    cuts = np.cumsum(sizes)[:-1]
    kind = np.int64 if np.issubdtype(y.dtype, np.integer) else np.float32
    train, validation, test = (
        (torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(labels.astype(kind)))
        for inputs, labels in zip(np.split(x, cuts), np.split(y, cuts), strict=True)
    )
    return ClientData(train, validation if sizes[1] else None, test)
