"""H&BF: 6 + 2 clients, standardised with training statistics, responses in their own units."""

from pathlib import Path

import numpy as np
import pytest
import torch

from simulations.data import load
from tests.support.refusals import refused

HOUSING, BODYFAT = slice(0, 6), slice(6, 8)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Made-up tables in the published formats, so that nothing real is needed.

    Columns have mean 100 j and standard deviation j + 1; the response of row i is i.
    """
    rng = np.random.default_rng(0)
    folder = tmp_path / "housing-bodyfat"
    folder.mkdir()
    x = rng.normal(size=(506, 13)) * np.arange(1, 14) + 100 * np.arange(13)
    np.savetxt(folder / "housing.data", np.column_stack([x, np.arange(506)]), fmt=" %.6f")
    x = rng.normal(size=(252, 14)) * np.arange(1, 15) + 100 * np.arange(14)
    table = np.column_stack([x[:, :1], np.arange(252), x[:, 1:]])
    header = "density,bodyfat," + ",".join(f"f{j}" for j in range(13))
    np.savetxt(folder / "bodyfat.csv", table, delimiter=",", header=header, comments="")
    return tmp_path


def rows(root: Path, clients: slice, part: str = "train", **options: object) -> torch.Tensor:
    """Row numbers (the made-up responses) of a part of some clients."""
    data = load("housing-bodyfat", 1, root, **options)
    return torch.cat([getattr(c, part)[1] for c in data.clients[clients]])


def test_every_row_is_dealt_once_and_evenly(root: Path) -> None:
    data = load("housing-bodyfat", 1, root)
    assert data.true_clusters.tolist() == [0] * 6 + [1] * 2
    assert (data.task, data.input_shape, data.num_classes) == ("regression", (14,), None)
    sizes = [len(c.train[1]) + len(c.test[1]) for c in data.clients]
    assert sorted(sizes[:6]) == [84, 84, 84, 84, 85, 85]  # 506 = 6 * 84 + 2
    assert sizes[6:] == [126, 126]
    for part, n in ((HOUSING, 506), (BODYFAT, 252)):
        both = torch.cat([rows(root, part, "train"), rows(root, part, "test")])
        assert sorted(both.tolist()) == list(range(n))  # also: responses are not scaled
        assert both.dtype == torch.float32


@pytest.mark.parametrize("validation", [False, True])
@pytest.mark.parametrize("clients", [HOUSING, BODYFAT])
def test_training_parts_of_a_source_have_mean_0_and_deviation_1(
    root: Path, clients: slice, validation: bool
) -> None:
    data = load("housing-bodyfat", 1, root, validation=validation)
    x = torch.cat([c.train[0] for c in data.clients[clients]]).double()
    assert x.mean(dim=0).abs().max() < 1e-5
    assert (x.std(dim=0, correction=0) - 1).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("name", "change"),
    [("housing.data", ("505.000000", "nan")), ("bodyfat.csv", ("bodyfat", "fat"))],
)
def test_a_damaged_file_is_named(root: Path, name: str, change: tuple[str, str]) -> None:
    path = root / "housing-bodyfat" / name
    path.write_text(path.read_text().replace(*change))
    with refused(ValueError, path):
        load("housing-bodyfat", 1, root)
