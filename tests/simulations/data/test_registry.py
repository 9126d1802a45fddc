"""`load`: names, options, seeds, determinism and the data root, over all data sets."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from simulations.data import FederatedData, RatingsData, load
from simulations.data.files import data_root
from simulations.data.registry import _load
from tests.support.counts import class_counts
from tests.support.refusals import refused

FREE = [("digits-swap", {}), ("synthetic-s1", {"clients": 4}), ("synthetic-s5", {"clients": 3})]
SAMPLES = [
    *FREE,
    *(("digits", {"partition": scheme}) for scheme in ("label-count", "noise", "label-group")),
]
OTHERS = [("synthetic-ratings", {"users": 30, "items": 20, "clients": 3}), ("synthetic-v1", {})]


def numbers(data: Any) -> np.ndarray:
    """Return all that a data set has drawn, in one line."""
    if isinstance(data, FederatedData):
        parts = [p for c in data.clients for p in (c.train, c.validation, c.test) if p is not None]
        return np.concatenate([t.numpy().ravel() for part in parts for t in part])
    if isinstance(data, RatingsData):
        ratings = [part for client in data.clients for part in (client.train, client.test)]
        return np.concatenate([np.concatenate([r.users, r.items, r.values]) for r in ratings])
    return np.concatenate([array.ravel() for client in data.clients for array in client])


@pytest.mark.parametrize(("name", "options"), SAMPLES + OTHERS)
def test_the_seed_decides_everything(name: str, options: dict) -> None:
    first = load(name, 3, **options)
    _load.cache_clear()  # stands for another worker process
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002  global numbers must not matter
    again, other = (load(name, seed, **options) for seed in (3, 4))
    assert first is not again
    assert np.array_equal(numbers(first), numbers(again))
    assert not np.array_equal(numbers(first)[:500], numbers(other)[:500])


@pytest.mark.parametrize(("name", "options"), FREE)
def test_what_a_federated_data_set_promises(name: str, options: dict) -> None:
    data = load(name, 0, **options)
    assert data.name == name
    assert data.true_clusters.shape == (len(data.clients),)
    for client in data.clients:
        assert client.validation is None
        for x, y in (client.train, client.test):
            assert x.dtype == torch.float32
            assert y.dtype == torch.int64
            assert x.shape == (len(y), *data.input_shape)
            assert 0 <= int(y.min()) <= int(y.max()) < 10 == data.num_classes
    assert class_counts(data).sum() == sum(len(c.train[1]) for c in data.clients)


@pytest.mark.parametrize(("name", "options"), SAMPLES)
def test_validation_is_a_fifth_of_the_training_part_and_leaves_the_test_part(
    name: str, options: dict
) -> None:
    without, with_ = load(name, 0, **options), load(name, 0, validation=True, **options)
    for a, b in zip(without.clients, with_.clients, strict=True):
        n = len(a.train[1])
        assert len(b.validation[1]) == round(n / 5)
        assert torch.equal(torch.cat([b.train[0], b.validation[0]]), a.train[0])
        assert torch.equal(a.test[0], b.test[0])


def test_a_process_loads_once() -> None:
    assert load("digits-swap", 0) is load("digits-swap", 0, clients=12)


def test_data_root_is_the_argument_else_the_variable_else_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FL_ADMM_DATA", str(tmp_path / "variable"))
    assert data_root(tmp_path / "argument") == tmp_path / "argument"
    assert data_root(None) == tmp_path / "variable"
    monkeypatch.delenv("FL_ADMM_DATA")
    assert data_root(None) == Path.home() / ".cache" / "fl-admm-strategies"


@pytest.mark.parametrize(
    ("name", "seed", "options", "named"),
    [
        ("minst-swap", 0, {}, ["minst-swap", "mnist-swap"]),
        ("digits-swap", 0, {"client": 12}, ["client", "clients", "validation"]),
        ("synthetic-s1", 0, {"scenario": "s2"}, ["scenario"]),  # of the loader, but no option
        ("digits-swap", 0, {"clients": "12"}, ["clients", "'12'", "int"]),
        ("digits-swap", 0, {"clients": True}, ["clients", "True", "int"]),
        ("digits-swap", 0, {"validation": 1}, ["validation", 1, "bool"]),
        ("synthetic-s1", 0, {"features": "gauss"}, ["features", "gauss", "uniform", "normal"]),
        ("synthetic-s1", 0, {"clients": 4.0}, ["clients", "4.0", "int | None"]),
        ("synthetic-s1", 0, {"noise": -1}, ["noise", -1]),
        ("digits-swap", -1, {}, ["seed", -1]),
    ],
)
def test_wrong_arguments_are_named(
    name: str, seed: int, options: dict, named: list[object]
) -> None:
    with refused(ValueError, *named):
        load(name, seed, **options)
