"""Ratings dealt to clients: MovieLens, and a synthetic matrix of low rank."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from clients.toolkit.data.ratings import Ratings
from fl_admm_strategies.maths.checks import Count, Fraction, NotNegative

from .federated import generator
from .files import reading

SCALE = (1.0, 5.0)  # stars

Table: TypeAlias = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]
"""User ids, item ids and stars, each of shape (k,): one entry per rating."""


class MovieLens(NamedTuple):
    """How one of the MovieLens sets is published."""

    file: str
    separator: str
    ratings: int
    halves: bool = False


MOVIELENS = {
    "ml-100k": MovieLens("ml-100k/u.data", "\t", 100_000),
    "ml-1m": MovieLens("ml-1m/ratings.dat", "::", 1_000_209),
    "ml-10m": MovieLens("ml-10M100K/ratings.dat", "::", 10_000_054, halves=True),
}


@dataclass(frozen=True, eq=False)
class ClientRatings:
    """The users of one client and their ratings.

    Attributes
    ----------
    train, test : Ratings
        Ratings of the m_i users (rows 0 to m_i - 1) of the n items, transformed as the data set
        says.
    user_ids : ndarray of int64, shape (m_i,)
        The file's id of each row.
    """

    train: Ratings
    test: Ratings
    user_ids: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RatingsData:
    """A matrix of ratings dealt to clients by users. A process shares one copy: do not write to it.

    Attributes
    ----------
    name : str
        Registry name.
    clients : list of ClientRatings
        One entry per client; the position is the partition id.
    num_items : int
        Items, n, the same for all clients.
    item_ids : ndarray of int64, shape (n,)
        The file's id of each column.
    mean, std : float
        Stars are ``std * value + mean``, and an RMSE in stars is ``std`` times that of the values;
        0 and 1 for ratings as they are.
    """

    name: str
    clients: list[ClientRatings]
    num_items: int
    item_ids: npt.NDArray[np.int64]
    mean: float
    std: float


def deal(
    name: str,
    seed: int,
    table: Table,
    clients: int,
    test_fraction: float,
    rating_transform: Literal["none", "zscore"],
) -> RatingsData:
    """Deal ratings to clients, each user with all of their ratings to one of them.

    Users are dealt at random and evenly (m_i differ by one at most), users and items are numbered
    anew and none is left out, and each client splits its own ratings
    (docs/methods/fedmc-admm-notes.md, P8).

    Parameters
    ----------
    name : str
        Registry name.
    seed : int
        Decides who gets which users, and the splits.
    table : tuple of ndarray
        User ids, item ids and stars.
    clients : int
        Number of clients p.
    test_fraction : float
        Share of each client's ratings in its test part.
    rating_transform : {'none', 'zscore'}
        ``"zscore"`` subtracts the mean of the training ratings of all clients and divides by their
        standard deviation; clients could find both by adding up three numbers each.

    Raises
    ------
    ValueError
        If there are more clients than users, or ratings cannot be split or standardised.
    """
    user_ids, users = np.unique(table[0], return_inverse=True)
    item_ids, items = np.unique(table[1], return_inverse=True)
    if not 1 <= clients <= len(user_ids):
        raise ValueError(
            f"clients is {clients}, expected 1 to {len(user_ids)}, the number of users of {name}."
        )
    groups = np.array_split(generator(seed, "ratings", "users").permutation(len(user_ids)), clients)
    owner, row = np.empty((2, len(user_ids)), dtype=np.int32)
    for i, group in enumerate(groups):
        owner[group], row[group] = i, np.arange(len(group))
    by_client = np.argsort(owner[users], kind="stable")
    cuts = np.cumsum(np.bincount(owner[users], minlength=clients))[:-1]

    parts = []
    for i, (group, k) in enumerate(zip(groups, np.split(by_client, cuts), strict=True)):
        try:
            rated = Ratings(row[users[k]], items[k], table[2][k], len(group), len(item_ids))
            parts.append(rated.split(test_fraction, generator(seed, "ratings", "split", i)))
        except ValueError as error:
            raise ValueError(f"{name}, client {i} of {clients}: {error}") from None

    mean, std = 0.0, 1.0
    if rating_transform == "zscore":
        training = np.concatenate([train.values for train, _ in parts])
        mean = float(training.mean())
        std = float(training.std())
        if std == 0:
            raise ValueError(
                f"All training ratings of {name} are {mean}, which cannot be standardised. Use "
                "rating_transform='none'."
            )
        for i, both in enumerate(parts):
            train, test = (replace(part, values=(part.values - mean) / std) for part in both)
            parts[i] = train, test
    return RatingsData(
        name,
        [ClientRatings(*part, user_ids[group]) for part, group in zip(parts, groups, strict=True)],
        len(item_ids),
        item_ids,
        mean,
        std,
    )


def read_movielens(path: Path, kind: MovieLens, source: str) -> Table:
    """Read a file of lines ``user, item, rating, timestamp``; the timestamp is not kept.

    Parameters
    ----------
    path : Path
        The file.
    kind : MovieLens
        What stands between the four numbers, how many lines it must have, and whether there are
        half stars.
    source : str
        Where a person gets it, for the error.

    Returns
    -------
    tuple of ndarray
        The ids of the file, and 1 to 5 stars, or 0.5 to 5.

    Raises
    ------
    FileNotFoundError
        If the file is missing.
    ValueError
        If a line is damaged, or some are missing.
    """
    import pandas as pd  # here: takes time

    steps = np.arange(1, 11) / 2 if kind.halves else np.arange(1, 6)
    with reading(path, source):
        # pandas' fast parser takes separators of one character.
        text = io.BytesIO(path.read_bytes().replace(kind.separator.encode(), b"\t"))
        table = pd.read_csv(text, sep="\t", header=None, dtype=np.float64).to_numpy()
        if table.shape[1] != 4:
            raise ValueError(f"{table.shape[1]} columns, expected user, item, rating, timestamp")
        good = (table[:, :2] % 1 == 0).all(axis=1) & np.isin(table[:, 2], steps)
        if not good.all():
            wrong = int(good.argmin())
            raise ValueError(
                f"line {wrong + 1}: {table[wrong]}, expected user, item, a rating from {steps[0]} "
                f"to {steps[-1]}, timestamp"
            )
        if len(table) != kind.ratings:
            raise ValueError(f"expected {kind.ratings} ratings, found {len(table)}")
    return table[:, 0].astype(np.int64), table[:, 1].astype(np.int64), table[:, 2]


def movielens(
    name: str,
    seed: int,
    root: Path,
    *,
    clients: int = 100,
    test_fraction: float = 0.2,
    rating_transform: Literal["none", "zscore"] = "none",
) -> RatingsData:
    """Deal MovieLens 100K, 1M or 10M to clients.

    None of them may be passed on, so nothing is downloaded: fetch the archive and unpack it in the
    data root. 10M has half stars. Of 1M every rating is kept: the table of FedMC-ADMM's paper has
    fewer (999,714 of 3,449 items), by a filter that it does not name
    (docs/methods/fedmc-admm-notes.md, P8).

    Parameters
    ----------
    name : {'ml-100k', 'ml-1m', 'ml-10m'}
        Registry name. The files are in the folder that the archive has, ``ml-10M100K`` for 10M.
    seed : int
        Decides who gets which users, and the splits.
    root : Path
        Data root.
    clients : int
        Number of clients p.
    test_fraction : float
        Share of each client's ratings in its test part.
    rating_transform : {'none', 'zscore'}
        "zscore" standardises the ratings; see `deal`.

    Raises
    ------
    FileNotFoundError, ValueError
        If a file is missing or damaged, or an option does not fit the data.
    """
    kind, source = MOVIELENS[name], f"{name}.zip: https://grouplens.org/datasets/movielens/"
    table = read_movielens(root / kind.file, kind, source)
    return deal(name, seed, table, clients, test_fraction, rating_transform)


def synthetic_ratings(
    seed: int,
    root: Path,
    *,
    clients: int = 20,
    users: Count = 400,
    items: Count = 200,
    rank: Count = 5,
    density: Fraction = 0.25,
    noise: NotNegative = 0.1,
    test_fraction: float = 0.2,
    rating_transform: Literal["none", "zscore"] = "none",
) -> RatingsData:
    """Draw a matrix of rank `rank` and observe some of it, with noise.

    Each item has a rating from each of `rank` kinds of people, uniform in [1, 5], and each user is
    a mixture of the kinds, uniform in the simplex: M = UV is between 1 and 5 by itself and nothing
    is cut off it. Each entry is observed with probability `density`, plus N(0, noise^2), and what
    leaves 1 to 5 by the noise is set to the end of the scale. Not rounded to stars.

    Parameters
    ----------
    seed : int
        Decides everything drawn.
    root : Path
        Not used: nothing is read.
    clients : int
        Number of clients p.
    test_fraction : float
        Share of each client's ratings in its test part.
    rating_transform : {'none', 'zscore'}
        "zscore" standardises the ratings; see `deal`.
    users, items : int
        Size of the matrix, m and n; an unlucky one without any rating is left out.
    rank : int
        r.
    density : float
        Probability that an entry is observed, in (0, 1].
    noise : float
        Standard deviation of the noise, in stars.

    Raises
    ------
    ValueError
        If an option is out of range or does not fit the others.
    """
    draw = generator(seed, "synthetic-ratings")
    mixture = draw.dirichlet(np.ones(rank), size=users)
    kinds = draw.uniform(*SCALE, size=(rank, items))
    # User by user, so that nothing has a number for every user and item.
    counts = draw.binomial(items, density, size=users)
    user = np.repeat(np.arange(users), counts)
    item = np.concatenate([draw.choice(items, size=count, replace=False) for count in counts])
    values = np.einsum("kr,rk->k", mixture[user], kinds[:, item])
    values += noise * draw.standard_normal(len(user))
    table = user, item, np.clip(values, *SCALE)
    return deal("synthetic-ratings", seed, table, clients, test_fraction, rating_transform)
