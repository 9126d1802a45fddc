"""Ratings dealt to clients: MovieLens, and a synthetic matrix of low rank."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from clients.toolkit.ratings import Ratings

from .federated import generator
from .files import missing_file

SCALE = (1.0, 5.0)  # stars

# User ids, item ids and stars, each of shape (k,): one entry per rating.
Table: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]


class MovieLens(NamedTuple):
    """How one of the MovieLens sets is published."""

    file: str
    separator: str
    ratings: int


MOVIELENS = {
    "ml-100k": MovieLens("u.data", "\t", 100_000),
    "ml-1m": MovieLens("ratings.dat", "::", 1_000_209),
}


@dataclass(frozen=True, eq=False)
class RatingsClient:
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
    clients : list of RatingsClient
        One entry per client; the position is the partition id.
    num_users : int
        Users of all clients, m.
    num_items : int
        Items, n, the same for all clients.
    item_ids : ndarray of int64, shape (n,)
        The file's id of each column.
    scale : tuple of float
        Lowest and highest rating, in stars.
    transform : {'none', 'zscore'}
        What was done to the ratings.
    mean, std : float
        Stars are ``std * value + mean``, and an RMSE in stars is ``std`` times that of the values;
        0 and 1 for ratings as they are.
    """

    name: str
    clients: list[RatingsClient]
    num_users: int
    num_items: int
    item_ids: npt.NDArray[np.int64]
    scale: tuple[float, float]
    transform: Literal["none", "zscore"]
    mean: float
    std: float


def _rescaled(ratings: Ratings, mean: float, std: float) -> Ratings:
    values = (ratings.values - mean) / std
    return Ratings(ratings.users, ratings.items, values, ratings.num_users, ratings.num_items)


def deal(
    name: str,
    seed: int,
    table: Table,
    clients: int,
    test_fraction: float,
    rating_transform: Literal["none", "zscore"],
) -> RatingsData:
    """Deal a table of ratings to clients, each user with all of their ratings to one of them.

    Users are dealt at random and evenly (m_i differ by one at most), users and items are numbered
    anew and none is left out, and each client splits its own ratings (docs/methods/fedmc-admm.md,
    P8).

    Parameters
    ----------
    name : str
        Registry name.
    seed : int
        Decides who gets which users, and the splits.
    table : tuple of ndarray, each of shape (k,)
        User ids, item ids and stars, one entry per rating.
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
    owner, row = np.empty((2, len(user_ids)), dtype=np.int64)
    for i, group in enumerate(groups):
        owner[group], row[group] = i, np.arange(len(group))
    by_client = np.argsort(owner[users], kind="stable")
    cuts = np.cumsum(np.bincount(owner[users], minlength=clients))[:-1]

    parts = []
    for i, (group, k) in enumerate(zip(groups, np.split(by_client, cuts), strict=True)):
        rated = Ratings(row[users[k]], items[k], table[2][k], len(group), len(item_ids))
        try:
            parts.append(rated.split(test_fraction, generator(seed, "ratings", "split", i)))
        except ValueError as error:
            raise ValueError(f"{name}, client {i} of {clients}: {error}") from None

    mean, std = 0.0, 1.0
    if rating_transform == "zscore":
        training = np.concatenate([train.values for train, _ in parts])
        mean, std = float(training.mean()), float(training.std())
        if std == 0:
            raise ValueError(
                f"All training ratings of {name} are {mean}, which cannot be standardised. Use "
                "rating_transform='none'."
            )
        parts = [(_rescaled(a, mean, std), _rescaled(b, mean, std)) for a, b in parts]
    return RatingsData(
        name,
        [RatingsClient(*part, user_ids[group]) for part, group in zip(parts, groups, strict=True)],
        len(user_ids),
        len(item_ids),
        item_ids,
        SCALE,
        rating_transform,
        mean,
        std,
    )


def read_movielens(path: Path, separator: str, ratings: int, source: str) -> Table:
    """Read a file of lines ``user, item, rating, timestamp``; the timestamp is not kept.

    Parameters
    ----------
    path : Path
        The file.
    separator : str
        What stands between the four numbers.
    ratings : int
        Number of lines it must have.
    source : str
        Where a person gets it, for the error.

    Returns
    -------
    users, items, stars : ndarray, each of shape (ratings,)
        The ids of the file, and 1 to 5 stars.

    Raises
    ------
    FileNotFoundError
        If the file is missing.
    ValueError
        If a line is damaged or twice there, or some are missing.
    """
    try:
        content = path.read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        raise missing_file(path, source) from None
    line = separator.join([r"\d{1,9}", r"\d{1,9}", "[1-5]", r"\d{1,18}"])
    # Possessive (*+): what was matched is never tried anew, so that a million lines take 0.1 s.
    good = re.match(rf"(?:{line}(?:\n|\Z))*+", content, re.ASCII)
    assert good is not None  # it matches nothing at all, too
    if good.end() < len(content):
        number = content.count("\n", 0, good.end())
        raise ValueError(
            f"{path}, line {number + 1}: expected 'user{separator}item{separator}rating{separator}"
            f"timestamp' with a rating from 1 to 5, found {content.split(chr(10))[number][:80]!r}; "
            f"get the file anew ({source})"
        )
    lines = content.replace(separator, "\t").splitlines()
    if len(lines) != ratings:
        raise ValueError(
            f"{path}: expected {ratings} ratings, found {len(lines)}; get the file anew ({source})"
        )
    table = np.loadtxt(lines, dtype=np.int64, delimiter="\t")
    order = np.lexsort((table[:, 1], table[:, 0]))
    same = np.flatnonzero((np.diff(table[order, :2], axis=0) == 0).all(axis=1))
    if len(same):
        first, second = order[same[0]], order[same[0] + 1]
        raise ValueError(
            f"{path}, lines {first + 1} and {second + 1}: both are ratings of item "
            f"{table[first, 1]} by user {table[first, 0]}; get the file anew ({source})"
        )
    return table[:, 0], table[:, 1], table[:, 2].astype(np.float64)


def movielens(
    name: str,
    seed: int,
    root: Path,
    *,
    clients: int = 100,
    test_fraction: float = 0.2,
    rating_transform: Literal["none", "zscore"] = "none",
) -> RatingsData:
    """Deal MovieLens 100K or 1M to clients.

    GroupLens does not allow the sets to be passed on, so nothing is downloaded: fetch the archive
    and unpack it in the data root. Every rating is kept: the table of the paper has fewer for 1M
    (999,714 of 3,449 items), by a filter that it does not name (docs/methods/fedmc-admm.md, P8).

    Parameters
    ----------
    name : {'ml-100k', 'ml-1m'}
        Registry name, and the folder of the files.
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
        If the file is missing or damaged, or an option does not fit the data.
    """
    file, separator, ratings = MOVIELENS[name]
    source = f"{name}.zip: https://grouplens.org/datasets/movielens/"
    table = read_movielens(root / name / file, separator, ratings, source)
    return deal(name, seed, table, clients, test_fraction, rating_transform)


def synthetic_ratings(
    seed: int,
    root: Path,
    *,
    clients: int = 20,
    users: int = 400,
    items: int = 200,
    rank: int = 5,
    density: float = 0.25,
    noise: float = 0.1,
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
    for option, value in (("users", users), ("items", items), ("rank", rank)):
        if value < 1:
            raise ValueError(f"{option} is {value}, expected an integer >= 1.")
    if not 0 < density <= 1:
        raise ValueError(f"density is {density}, expected a probability in (0, 1].")
    if not noise >= 0:
        raise ValueError(f"noise is {noise}, expected a standard deviation >= 0.")
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
