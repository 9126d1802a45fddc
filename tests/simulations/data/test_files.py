"""Data files that are missing are named, with the place to get them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from simulations.data import load
from simulations.data.files import data_root
from tests.support.refusals import refused

FILES = {
    "uci-har": "uci_har_int16.npz.xz",
    "housing-bodyfat": "housing.data",
    "qsar": "toxicity.mat",
    "ml-100k": "u.data",
    "ml-1m": "ratings.dat",
    "mnist": "train-images-idx3-ubyte.gz",
    "cifar10": "data_batch_1",
}


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)  # which downloads images
    with refused(FileNotFoundError, FILES[name], "data-root", "FL_ADMM_DATA"):
        load(name, 0, tmp_path)


def test_data_root_is_the_argument_else_the_variable_else_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FL_ADMM_DATA", str(tmp_path / "variable"))
    assert data_root(tmp_path / "argument") == tmp_path / "argument"
    assert data_root(None) == tmp_path / "variable"
    monkeypatch.delenv("FL_ADMM_DATA")
    assert data_root(None) == Path.home() / ".cache" / "fl-admm-strategies"
