"""Ratings: dealt by users, split by client, standardised by training statistics, files checked."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulations.data import RatingsData, load
from simulations.data import ratings as module
from simulations.data.ratings import MOVIELENS, deal
from simulations.data.registry import _load
from tests.support.refusals import refused

ROOT = Path(os.environ.get("FL_ADMM_DATA", ""))

Rating = tuple[int, int, float]


def made_up(users: int = 23, items: int = 17, k: int = 200) -> list[Rating]:
    """Ratings with ids that leave gaps, in no order."""
    rng = np.random.default_rng(0)
    cells = rng.choice(users * items, k, replace=False)
    stars = rng.integers(1, 6, size=k)
    pairs = zip(cells.tolist(), stars.tolist(), strict=True)
    return [(7 * (c // items) + 3, 100 - c % items, float(s)) for c, s in pairs]


def table_of(ratings: list[Rating]) -> module.Table:
    users, items, stars = (np.array(column) for column in zip(*ratings, strict=True))
    return users, items, stars


def users_of(data: RatingsData) -> int:
    return sum(len(client.user_ids) for client in data.clients)


def dealt(data: RatingsData, part: str) -> list[Rating]:
    """Ratings of all clients, as the file has them."""
    found = []
    for client in data.clients:
        ratings = getattr(client, part)
        stars = data.std * ratings.values + data.mean
        found += zip(
            client.user_ids[ratings.users].tolist(),
            data.item_ids[ratings.items].tolist(),
            stars.round(12).tolist(),
            strict=True,
        )
    return found


@pytest.mark.parametrize("transform", ["none", "zscore"])
def test_every_rating_is_with_one_client_once_and_in_its_place(transform: str) -> None:
    ratings = made_up()
    data = deal("made-up", 1, table_of(ratings), 5, 0.2, transform)
    assert sorted(dealt(data, "train") + dealt(data, "test")) == sorted(ratings)
    assert (users_of(data), data.num_items) == (23, 17)
    assert data.item_ids.tolist() == list(range(84, 101))


@pytest.mark.parametrize(
    ("table", "clients", "test_fraction", "named"),
    [
        (None, 24, 0.2, ["clients", 24, 23]),
        ([(1, 1, 3.0), (2, 1, 3.0), (2, 2, 3.0)], 2, 0.5, ["made-up", "client"]),
        ([(1, 1, 3.0), (1, 2, 3.0), (2, 2, 3.0)], 1, 0.5, ["rating_transform"]),
    ],
)
def test_what_cannot_be_dealt_is_refused(
    table: Any, clients: int, test_fraction: float, named: list[Any]
) -> None:
    with refused(ValueError, *named):
        deal("made-up", 0, table_of(table or made_up()), clients, test_fraction, "zscore")


@pytest.fixture(params=["ml-100k", "ml-1m"])
def movielens(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Path, list[str]]:
    """Name, file and lines of a made-up set of 200 ratings in the published form."""
    name = request.param
    kind = MOVIELENS[name]
    monkeypatch.setitem(MOVIELENS, name, kind._replace(ratings=200))
    lines = [kind.separator.join(map(str, (u, i, int(s), 9))) for u, i, s in made_up()]
    path = tmp_path / kind.file
    path.parent.mkdir()
    path.write_text("\n".join(lines) + "\n")
    return name, path, lines


def loaded(name: str, path: Path) -> RatingsData:
    _load.cache_clear()
    data = load(name, 0, path.parents[1], clients=5)
    assert isinstance(data, RatingsData)
    return data


def test_a_movielens_file_is_read(movielens: tuple[str, Path, list[str]]) -> None:
    name, path, lines = movielens
    for text in ("\n".join(lines) + "\n", "\n".join(lines), "\r\n".join(lines) + "\r\n"):
        path.write_bytes(text.encode())
        data = loaded(name, path)
        assert data.name == name
        assert sorted(dealt(data, "train") + dealt(data, "test")) == sorted(made_up())


# What makes lines of a damaged file, and what is named.
DAMAGES: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "too few numbers": (lambda lines: [*lines[:76], "1|2", *lines[77:]], "line 77"),
    "out of range": (lambda lines: [*lines[:199], "1|2|6|4"], "line 200"),
    "cut short": (lambda lines: lines[:199], "199"),
}


@pytest.mark.parametrize(("damage", "place"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_named(
    movielens: tuple[str, Path, list[str]], damage: Callable[[list[str]], list[str]], place: str
) -> None:
    name, path, lines = movielens
    text = "\n".join(damage(lines)).replace("|", MOVIELENS[name].separator)
    path.write_text(text, encoding="utf-8")
    with refused(ValueError, path, place, "grouplens"):
        loaded(name, path)


def test_synthetic_ratings_are_of_low_rank_and_in_the_scale() -> None:
    data = load("synthetic-ratings", 0, users=40, items=30, rank=3, density=1, noise=0, clients=4)
    assert isinstance(data, RatingsData)
    matrix = np.zeros((40, 30))
    for row, c in zip(np.split(np.arange(40), 4), data.clients, strict=True):
        for part in (c.train, c.test):
            matrix[row[part.users], part.items] = part.values
    assert np.linalg.matrix_rank(matrix, tol=1e-9) == 3
    assert 1 <= matrix.min() < matrix.max() <= 5
