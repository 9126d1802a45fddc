"""Housing and Body fat (H&BF): two regression tasks as one federation (FPFC, appendix E.1)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from .federated import FederatedData, client_data, generator, split_sizes
from .files import read_table, reading

HOUSING_SOURCE = "Boston Housing, housing.data: https://archive.ics.uci.edu/ml/machine-learning-databases/housing/"
BODYFAT_SOURCE = (
    "Body fat, 252 rows with a header row: https://lib.stat.cmu.edu/datasets/bodyfat saved as CSV"
)
NUM_FEATURES = 14
CLIENTS = (6, 2)  # of Housing, of Body fat

Table = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]


def read_housing(folder: Path) -> Table:
    """Read ``housing.data``: 13 features, shape (506, 13), and the median value, shape (506,)."""
    table = read_table(folder / "housing.data", HOUSING_SOURCE, (506, NUM_FEATURES))
    return table[:, :-1], table[:, -1]


def read_bodyfat(folder: Path) -> Table:
    """Read ``bodyfat.csv``: 14 features, shape (252, 14), and percent body fat, shape (252,)."""
    path = folder / "bodyfat.csv"
    with reading(path, BODYFAT_SOURCE), path.open(encoding="utf-8") as lines:
        header = [word.strip().lower() for word in lines.readline().split(",")]
        if "bodyfat" not in header:
            raise ValueError(f"no column 'bodyfat' in its header row, {','.join(header)!r}")
    shape = (252, NUM_FEATURES + 1)
    table = read_table(path, BODYFAT_SOURCE, shape, delimiter=",", skiprows=1)
    response = header.index("bodyfat")
    return np.delete(table, response, axis=1), table[:, response]


def housing_bodyfat(seed: int, root: Path, *, validation: bool = False) -> FederatedData:
    """Deal Housing to clients 0-5 and Body fat to clients 6-7, evenly.

    Housing has 13 features and gets a 14th, drawn from N(0, 1), to match Body fat. Features are
    standardised with the mean and standard deviation of the training parts of all clients of the
    same source: scales differ between the two sources, and a client of 68 samples can hold too few
    different values of a binary feature for statistics of its own. Responses keep their units
    (thousands of dollars; percent), as the paper's errors show (docs/methods/fpfc-notes.md, P11).

    Parameters
    ----------
    seed : int
        Decides who gets which samples, and the 14th feature.
    root : Path
        Data root; the files lie in its folder ``housing-bodyfat``.
    validation : bool
        Hold 20 % of each client's training part out for validation.

    Raises
    ------
    FileNotFoundError, ValueError
        If a file is missing or damaged.
    """
    folder = root / "housing-bodyfat"
    housing, value = read_housing(folder)
    extra = generator(seed, "housing-bodyfat", "feature").normal(size=(len(housing), 1))
    sources = [(np.hstack([housing, extra]), value), read_bodyfat(folder)]

    parts = []
    for source, ((x, y), clients) in enumerate(zip(sources, CLIENTS, strict=True)):
        order = generator(seed, "housing-bodyfat", "deal", source).permutation(len(y))
        dealt = np.array_split(order, clients)
        sizes = [split_sizes(len(index), validation) for index in dealt]
        train = np.concatenate([i[: s.train] for i, s in zip(dealt, sizes, strict=True)])
        z = (x - x[train].mean(axis=0)) / x[train].std(axis=0)
        parts += [client_data(z[i], y[i], s) for i, s in zip(dealt, sizes, strict=True)]
    clusters = np.repeat(np.arange(len(CLIENTS)), CLIENTS)
    return FederatedData("housing-bodyfat", parts, clusters, "regression", (NUM_FEATURES,), None)
