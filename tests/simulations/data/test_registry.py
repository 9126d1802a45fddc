"""`load`: names, options, seeds, determinism and the data root, over all data sets."""

from pathlib import Path

import numpy as np
import pytest
import torch

from simulations.data import DATASETS, FederatedData, class_counts, load
from simulations.data.files import data_root
from simulations.data.registry import _load

FREE = [("digits-swap", {}), ("synthetic-s1", {"clients": 4}), ("synthetic-s5", {"clients": 3})]


def tensors(data: FederatedData) -> list[torch.Tensor]:
    parts = [p for c in data.clients for p in (c.train, c.validation, c.test) if p is not None]
    return [t for part in parts for t in part]


@pytest.mark.parametrize(("name", "options"), FREE)
def test_same_arguments_give_the_same_data_in_a_fresh_process(name: str, options: dict) -> None:
    first = load(name, 3, **options)
    _load.cache_clear()  # stands for another worker process
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002  global numbers must not matter
    second = load(name, 3, **options)
    assert first is not second
    assert all(torch.equal(a, b) for a, b in zip(tensors(first), tensors(second), strict=True))


@pytest.mark.parametrize(("name", "options"), FREE)
def test_another_seed_gives_other_data(name: str, options: dict) -> None:
    one, two = load(name, 1, **options), load(name, 2, **options)
    assert not torch.equal(one.clients[0].train[0][:50], two.clients[0].train[0][:50])


@pytest.mark.parametrize(("name", "options"), FREE)
def test_what_a_federated_data_set_promises(name: str, options: dict) -> None:
    data = load(name, 0, **options)
    assert data.name == name
    assert data.true_clusters is not None
    assert data.true_clusters.shape == (len(data.clients),)
    for client in data.clients:
        assert client.validation is None
        for x, y in (client.train, client.test):
            assert x.dtype == torch.float32
            assert y.dtype == torch.int64
            assert x.shape == (len(y), *data.input_shape)
            assert 0 <= int(y.min()) <= int(y.max()) < 10 == data.num_classes
    assert class_counts(data).sum() == sum(len(c.train[1]) for c in data.clients)


@pytest.mark.parametrize(("name", "options"), FREE)
def test_validation_is_a_fifth_of_the_training_part_and_leaves_the_test_part(
    name: str, options: dict
) -> None:
    without, with_ = load(name, 0, **options), load(name, 0, validation=True, **options)
    for a, b in zip(without.clients, with_.clients, strict=True):
        assert b.validation is not None
        n = len(a.train[1])
        assert len(b.validation[1]) == round(n / 5)
        assert torch.equal(torch.cat([b.train[0], b.validation[0]]), a.train[0])
        assert torch.equal(a.test[0], b.test[0])


def test_a_process_loads_once() -> None:
    assert load("digits-swap", 0) is load("digits-swap", 0, clients=12)


def test_unknown_name_says_what_exists_and_what_was_meant() -> None:
    with pytest.raises(ValueError, match=r"'minst-swap'.*Did you mean 'mnist-swap'") as error:
        load("minst-swap", 0)
    assert all(name in str(error.value) for name in DATASETS)


def test_unknown_option_says_what_exists_and_what_was_meant() -> None:
    with pytest.raises(
        ValueError, match=r"digits-swap 'client'.*mean 'clients'.*Known: clients, validation"
    ):
        load("digits-swap", 0, client=12)
    with pytest.raises(ValueError, match="unknown option"):
        load("synthetic-s1", 0, scenario="s2")  # a parameter of the loader, but not an option


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digits-swap", {"clients": "12"}, "clients.*is '12', expected int"),
        ("digits-swap", {"clients": True}, "clients.*is True, expected int"),
        ("digits-swap", {"validation": 1}, "validation.*is 1, expected bool"),
        ("digits-swap", {"clients": [3]}, r"clients.*is \[3\], expected int"),
        ("synthetic-s1", {"features": "gauss"}, "is 'gauss', expected one of 'uniform', 'normal'"),
        ("synthetic-s1", {"clients": 4.0}, r"is 4.0, expected int \| None"),
        ("synthetic-s1", {"noise": "0.5"}, "noise.*is '0.5', expected float"),
        ("synthetic-s1", {"noise": -1}, "noise is -1, .*>= 0"),
    ],
)
def test_wrong_option_value(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(name, 0, **options)


def test_negative_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="seed is -1"):
        load("digits-swap", -1)


def test_data_root_is_the_argument_else_the_variable_else_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FL_ADMM_DATA", str(tmp_path / "variable"))
    assert data_root(tmp_path / "argument") == tmp_path / "argument"
    assert data_root(None) == tmp_path / "variable"
    monkeypatch.delenv("FL_ADMM_DATA")
    assert data_root(None) == Path.home() / ".cache" / "fl-admm-strategies"
