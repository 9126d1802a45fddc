"""Ratings dealt to clients: MovieLens, Netflix, and a synthetic matrix of low rank."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from clients.toolkit.data.ratings import Ratings
from fl_admm_strategies.maths.checks import Count, Fraction, NotNegative

from .federated import generator
from .files import missing_file, reading

SCALE = (1.0, 5.0)  # stars

# User ids, item ids and stars, each of shape (k,): one entry per rating. Files come in several, of
# int32 and float32 (stars and their halves are exact in it): Netflix takes 1.2 GB so.
Block: TypeAlias = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]

TEXT_BLOCK = 2**24  # bytes of a file that are read at once


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

NETFLIX_RATINGS = 100_480_507
NETFLIX_SOURCE = (
    "combined_data_1.txt to combined_data_4.txt of "
    "https://www.kaggle.com/datasets/netflix-inc/netflix-prize-data, or the folder training_set "
    "of the original archive"
)


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
    num_items : int
        Items, n, the same for all clients.
    item_ids : ndarray of int64, shape (n,)
        The file's id of each column.
    mean, std : float
        Stars are ``std * value + mean``, and an RMSE in stars is ``std`` times that of the values;
        0 and 1 for ratings as they are.
    """

    name: str
    clients: list[RatingsClient]
    num_items: int
    item_ids: npt.NDArray[np.int64]
    mean: float
    std: float


def deal(
    name: str,
    seed: int,
    blocks: Iterable[Block],
    clients: int,
    test_fraction: float,
    rating_transform: Literal["none", "zscore"],
) -> RatingsData:
    """Deal ratings to clients, each user with all of their ratings to one of them.

    Users are dealt at random and evenly (m_i differ by one at most), users and items are numbered
    anew and none is left out, and each client splits its own ratings
    (docs/methods/fedmc-admm-notes.md, P8). What is not dealt yet and what is take the memory of the
    ratings once, not twice.

    Parameters
    ----------
    name : str
        Registry name.
    seed : int
        Decides who gets which users, and the splits.
    blocks : iterable of tuple of ndarray
        User ids, item ids and stars, in any number of blocks.
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
    waiting = list(blocks)
    user_ids, item_ids = (_distinct([block[column] for block in waiting]) for column in (0, 1))
    if not 1 <= clients <= len(user_ids):
        raise ValueError(
            f"clients is {clients}, expected 1 to {len(user_ids)}, the number of users of {name}."
        )
    groups = np.array_split(generator(seed, "ratings", "users").permutation(len(user_ids)), clients)
    owner, row = np.empty((2, len(user_ids)), dtype=np.int32)
    for i, group in enumerate(groups):
        owner[group], row[group] = i, np.arange(len(group))
    counts = np.zeros(clients, np.int64)
    for users, _, _ in waiting:
        counts += np.bincount(owner[np.searchsorted(user_ids, users)], minlength=clients)
    dtype = np.result_type(*(stars for _, _, stars in waiting))
    dealt: list[Block] = [
        (_mapped(k, np.int32), _mapped(k, np.int32), _mapped(k, dtype)) for k in counts.tolist()
    ]
    filled = np.zeros(clients, np.int64)
    waiting.reverse()
    while waiting:  # a block goes when it is dealt
        users, items, stars = waiting.pop()
        users, items = np.searchsorted(user_ids, users), np.searchsorted(item_ids, items)
        by_client = np.argsort(owner[users], kind="stable")
        cuts = np.cumsum(np.bincount(owner[users], minlength=clients))[:-1]
        for i, k in enumerate(np.split(by_client, cuts)):
            place = slice(filled[i], filled[i] + len(k))
            for column, entries in zip(dealt[i], (row[users[k]], items[k], stars[k]), strict=True):
                column[place] = entries
            filled[i] += len(k)

    parts = []
    dealt.reverse()
    for i, group in enumerate(groups):
        try:
            rated = Ratings(*dealt.pop(), len(group), len(item_ids))
            parts.append(rated.split(test_fraction, generator(seed, "ratings", "split", i)))
        except ValueError as error:
            raise ValueError(f"{name}, client {i} of {clients}: {error}") from None

    mean, std = 0.0, 1.0
    if rating_transform == "zscore":
        training = np.concatenate([train.values for train, _ in parts])
        mean = float(training.mean())
        training -= mean  # as numpy.std, to the same bits, in place
        std = float(np.sqrt(np.multiply(training, training, out=training).mean()))
        del training
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
        [RatingsClient(*part, user_ids[group]) for part, group in zip(parts, groups, strict=True)],
        len(item_ids),
        item_ids,
        mean,
        std,
    )


def _distinct(columns: list[npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
    """Return the ids in the columns of all blocks, sorted."""
    each = [np.unique(column).astype(np.int64) for column in columns]
    return np.unique(np.concatenate([np.zeros(0, np.int64), *each]))


def _checked_text(path: Path, pattern: str, expected: str) -> Iterator[bytes]:
    """Yield whole lines of a file, a part at a time; raise ValueError for one that is no match."""
    # Possessive (*+): what was matched is never tried anew, so that a million lines take 0.1 s.
    lines, before = re.compile(rf"(?:{pattern}\r?(?:\n|\Z))*+".encode()), 1
    with path.open("rb") as file:
        while text := file.read(TEXT_BLOCK):
            text += file.readline()
            good = lines.match(text)
            assert good is not None  # it matches nothing at all, too
            if good.end() < len(text):
                number = before + text.count(b"\n", 0, good.end())
                found = text[good.end() :].split(b"\n", 1)[0].decode("ascii", "replace")[:80]
                raise ValueError(f"line {number}: expected {expected}, found {found!r}")
            before += text.count(b"\n")
            yield text


def _numbers(block: bytes, separators: str, columns: int) -> npt.NDArray[Any]:
    """Return the numbers of checked lines, shape (k, columns)."""
    table = bytes.maketrans(separators.encode(), b" " * len(separators))
    dtype = np.float64 if b"." in block else np.int64
    return np.fromstring(block.translate(table), dtype, sep=" ").reshape(-1, columns)


def _block(users: Any, items: Any, stars: Any) -> Block:
    block = tuple(_mapped(len(users), dtype) for dtype in (np.int32, np.int32, np.float32))
    for column, entries in zip(block, (users, items, stars), strict=True):
        column[:] = entries
    return cast(Block, block)


def _mapped(count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an array whose memory goes back to the system with it; that of a heap may not."""
    size = max(1, count * np.dtype(dtype).itemsize)
    return np.frombuffer(mmap.mmap(-1, size), dtype, count)


def read_movielens(path: Path, kind: MovieLens, source: str) -> list[Block]:
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
    list of tuple of ndarray
        The ids of the file, and 1 to 5 stars, or 0.5 to 5.

    Raises
    ------
    FileNotFoundError
        If the file is missing.
    ValueError
        If a line is damaged, or some are missing.
    """
    stars = r"(?:[1-5](?:\.0)?|[0-4]\.5)" if kind.halves else "[1-5]"
    line = kind.separator.join([r"\d{1,9}", r"\d{1,9}", stars, r"\d{1,18}"])
    words = kind.separator.join(["user", "item", "rating", "timestamp"])
    expected = f"'{words}' with a rating from {'0.5' if kind.halves else '1'} to 5"
    with reading(path, source):
        blocks = [
            _block(*_numbers(text, kind.separator[0], 4)[:, :3].T)
            for text in _checked_text(path, line, expected)
        ]
        if (found := sum(len(stars) for _, _, stars in blocks)) != kind.ratings:
            raise ValueError(f"expected {kind.ratings} ratings, found {found}")
    return blocks


def read_netflix(folder: Path) -> Iterator[Block]:
    """Yield the ratings of the Netflix prize's training set.

    They are in the four files of Kaggle, or in the original ones, one for each movie. Both have a
    line ``movie:`` and then one ``user,rating,date`` for each of its ratings; the date is not kept,
    and neither the probe nor the qualifying set is read.

    Parameters
    ----------
    folder : Path
        Where ``combined_data_1.txt`` to ``combined_data_4.txt`` are, or ``training_set`` with
        ``mv_0000001.txt`` and so on.

    Yields
    ------
    tuple of ndarray
        The ids of the files, and 1 to 5 stars, of some lines.

    Raises
    ------
    FileNotFoundError
        If there are neither.
    ValueError
        If a line is damaged, or some are missing or too many.
    """
    paths = sorted(folder.glob("combined_data_*.txt"))
    paths = paths or sorted((folder / "training_set").glob("mv_*.txt"))
    if not paths:
        raise missing_file(folder / "combined_data_1.txt", NETFLIX_SOURCE)
    line, expected = r"(?:\d{1,7}:|\d{1,9},[1-5],\d{4}-\d\d-\d\d)", "'movie:' or 'user,rating,date'"
    count = 0
    for path in paths:
        with reading(path, NETFLIX_SOURCE):
            movie = None
            for text in _checked_text(path, line, expected):
                # A movie is a line of five numbers as well, with 0 stars.
                rows = _numbers(re.sub(rb"(?m)^(\d+):", rb"\1,0,0-0-0", text), ",-", 5)
                is_movie = rows[:, 1] == 0
                if movie is None and not is_movie[0]:
                    raise ValueError("line 1: expected 'movie:' before the first rating")
                last = np.maximum.accumulate(np.where(is_movie, np.arange(len(rows)), -1))
                movies = np.where(last < 0, movie or 0, rows[last, 0])
                movie = int(movies[-1])
                yield _block(rows[~is_movie, 0], movies[~is_movie], rows[~is_movie, 1])
                count += int((~is_movie).sum())
    with reading(folder, NETFLIX_SOURCE):
        if count != NETFLIX_RATINGS:
            raise ValueError(
                f"expected {NETFLIX_RATINGS} ratings in {len(paths)} files, found {count}"
            )


def published_ratings(
    name: str,
    seed: int,
    root: Path,
    *,
    clients: int = 100,
    test_fraction: float = 0.2,
    rating_transform: Literal["none", "zscore"] = "none",
) -> RatingsData:
    """Deal MovieLens 100K, 1M or 10M, or the Netflix prize's training set, to clients.

    None of them may be passed on, so nothing is downloaded: fetch the archive and unpack it in the
    data root. 10M has half stars. Of 1M every rating is kept: the table of FedMC-ADMM's paper has
    fewer (999,714 of 3,449 items), by a filter that it does not name
    (docs/methods/fedmc-admm-notes.md, P8). Netflix has 480,189 users and 17,770 movies; its
    100,480,507 ratings take 1.6 GB when they are dealt, and reading and dealing them takes no more
    than that and some blocks.

    Parameters
    ----------
    name : {'ml-100k', 'ml-1m', 'ml-10m', 'netflix'}
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
    blocks: Iterable[Block]
    if name == "netflix":
        blocks = read_netflix(root / "netflix")
    else:
        kind, source = MOVIELENS[name], f"{name}.zip: https://grouplens.org/datasets/movielens/"
        blocks = read_movielens(root / kind.file, kind, source)
    return deal(name, seed, blocks, clients, test_fraction, rating_transform)


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
    return deal("synthetic-ratings", seed, [table], clients, test_fraction, rating_transform)
