"""Examples V.1 and V.2 of FedGiA: distributions, sizes, normalisation, files checked."""

from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat
from scipy.sparse import csc_matrix

from simulations.data import TabularData, load, tabular
from simulations.data.registry import _load
from simulations.data.tabular import random_sizes
from tests.support.refusals import refused


def loaded(name: str, seed: int, root: Path | None = None, **options: object) -> TabularData:
    _load.cache_clear()
    data = load(name, seed, root, **options)
    assert isinstance(data, TabularData)
    return data


def pooled(data: TabularData) -> tuple[np.ndarray, np.ndarray]:
    a, b = zip(*data.clients, strict=True)
    return np.concatenate(a), np.concatenate(b)


def sizes(data: TabularData) -> np.ndarray:
    for a, b in data.clients:
        assert a.shape == (len(b), data.num_features)
        assert (a.dtype, b.dtype, a.ndim, b.ndim) == (np.float64, np.float64, 2, 1)
    return np.array([len(b) for _, b in data.clients])


@pytest.mark.parametrize(
    ("d", "clients"),
    [(8992, 64), (1000, 1000), (7, 1), (400, 10), (399, 10)],
)
def test_random_sizes_are_above_the_bound_and_sum_to_d(d: int, clients: int) -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        part = random_sizes(d, clients, draw)
        assert part.shape == (clients,)
        assert part.sum() == d
        assert (40 * clients * part > d).all()  # part > 0.025 d/m, in integers


SHAPE = (60, 8)


@pytest.fixture
def toxicity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up table in the form of the files: rows differ, column 3 is empty."""
    monkeypatch.setattr(tabular, "QSAR_SHAPE", SHAPE)
    folder = tmp_path / "qsar-oral-toxicity"
    folder.mkdir()
    write(folder, **made_up())
    return tmp_path


def made_up() -> dict[str, np.ndarray]:
    bits = np.array([[(row >> j) & 1 for j in range(7)] for row in range(1, 61)], dtype=float)
    x = np.insert(bits, 3, 0, axis=1)  # rows are the numbers 1 to 60, in bits
    y = np.where(np.arange(1, 61) % 5 == 0, 1, -1)[:, None].astype(np.int16)
    return {"x": x, "y": y}


def write(folder: Path, x: np.ndarray, y: np.ndarray) -> None:
    savemat(folder / "toxicity.mat", {"X": csc_matrix(x)})
    savemat(folder / "toxicityclass.mat", {"y": y})


def test_qsar_deals_every_sample_once_with_its_label(toxicity: Path) -> None:
    data = loaded("qsar", 0, toxicity, clients=5)
    assert (data.name, data.loss, data.num_features) == ("qsar", "logistic", 8)
    assert len(sizes(data)) == 5
    a, b = pooled(data)
    numbers = (np.delete(a, 3, axis=1) > 0) @ (1 << np.arange(7))
    assert sorted(numbers) == list(range(1, 61))
    assert numbers.tolist() != sorted(numbers)
    np.testing.assert_array_equal(b, numbers % 5 == 0)


def test_a_label_that_is_none_is_refused(toxicity: Path) -> None:
    write(toxicity / "qsar-oral-toxicity", **(made_up() | {"y": np.zeros((60, 1))}))
    with refused(ValueError, "toxicityclass.mat", "y(1, 1)"):
        loaded("qsar", 0, toxicity)


def test_a_damaged_file_is_named(toxicity: Path) -> None:
    path = toxicity / "qsar-oral-toxicity" / "toxicity.mat"
    path.write_bytes(path.read_bytes()[:140])
    with refused(ValueError, path, "archive.ics.uci.edu"):
        loaded("qsar", 0, toxicity)
