"""The two convex problems of FedGiA (arXiv:2205.01438): Examples V.1 and V.2, as local losses."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fl_admm_strategies.maths.checks import NotNegative

from .federated import generator
from .files import reading

V1_FEATURES, V1_DISTRIBUTIONS = 100, 3
QSAR_SHAPE = (8992, 1024)
QSAR_SOURCE = (
    "QSAR oral toxicity: X, 8992 x 1024, 0 or 1, as toxicity.mat and y, 8992 x 1, -1 or 1, as "
    "toxicityclass.mat; scipy.io.savemat makes them of the table at https://archive.ics.uci.edu/dataset/508/qsar+oral+toxicity"
)

Array = npt.NDArray[np.float64]
RegScaling = Literal["per_sample", "full"]


@dataclass(frozen=True, eq=False)
class TabularData:
    """Local losses f_i over a table, dealt to clients. A process shares one copy: do not write.

    All samples are for training: the experiments of the paper measure f and its gradient.

    Attributes
    ----------
    name : str
        Registry name.
    clients : list of (ndarray, ndarray)
        (A_i, b_i) of each client, float64, shapes (d_i, n) and (d_i,); the position is the
        partition id.
    loss : {'least-squares', 'logistic'}
        Which f_i they are meant for: Example II.1, or II.2, with b in {0, 1}.
    num_features : int
        n.
    mu : float
        Of logistic regression, the weight of its regulariser.
    reg_scaling : {'per_sample', 'full'}
        Likewise: mu/(2 d_i) ||x||^2, or mu/2 ||x||^2.
    """

    name: str
    clients: list[tuple[Array, Array]]
    loss: Literal["least-squares", "logistic"]
    num_features: int
    mu: float = 0.0
    reg_scaling: RegScaling = "per_sample"


def _deal(a: Array, b: Array, sizes: npt.NDArray[np.int64]) -> list[tuple[Array, Array]]:
    """Cut (already shuffled) samples into parts of these sizes."""
    cuts = np.cumsum(sizes)[:-1]
    return list(zip(np.split(a, cuts), np.split(b, cuts), strict=True))


def synthetic_v1(seed: int, root: Path, *, clients: int = 64) -> TabularData:
    """Draw Example V.1: least squares on pure noise of three distributions.

    d_i is an integer, uniform in [50, 150], and n = 100. Entries of the A_i and the b_i of the
    first third of the clients are N(0, 1), of the second Student's t with 5 degrees of freedom, of
    the last uniform in [-5, 5]; then the samples of all clients are shuffled. The paper does not
    say how many samples each distribution has; a third of the clients is our reading
    (docs/methods/fedgia-notes.md, P11).

    Parameters
    ----------
    seed : int
        Decides everything drawn.
    root : Path
        Not used: nothing is read.
    clients : int
        Number of clients m, at least 3.

    Raises
    ------
    ValueError
        If there are fewer clients than distributions.
    """
    if clients < V1_DISTRIBUTIONS:
        raise ValueError(
            f"clients is {clients}, expected {V1_DISTRIBUTIONS} or more: one for each "
            "distribution of synthetic-v1."
        )
    draw = generator(seed, "synthetic-v1")
    sizes = draw.integers(50, 150, size=clients, endpoint=True)
    normal, student, uniform = (
        (int(part.sum()), V1_FEATURES + 1) for part in np.array_split(sizes, V1_DISTRIBUTIONS)
    )
    samples = np.concatenate(
        [draw.normal(size=normal), draw.standard_t(5, size=student), draw.uniform(-5, 5, uniform)]
    )
    draw.shuffle(samples)
    a, b = np.ascontiguousarray(samples[:, :-1]), samples[:, -1].copy()
    return TabularData("synthetic-v1", _deal(a, b, sizes), "least-squares", V1_FEATURES)


def random_sizes(d: int, clients: int, draw: np.random.Generator) -> npt.NDArray[np.int64]:
    """Cut `d` samples at m - 1 random points into parts of more than 0.025 d/m samples.

    The released code draws the points anew until no part is too small, which takes a multiple of
    (1 - 0.025)^-m draws. Their result, uniform over all ways to cut that do, is drawn here at once:
    s - 1 samples are set aside for each part, s being the smallest size, and what is left is cut
    into parts of one or more.

    Parameters
    ----------
    d : int
        Number of samples.
    clients : int
        Number of parts m.
    draw : numpy.random.Generator
        Draws the points.

    Returns
    -------
    ndarray of int64, shape (m,)
        Sizes; they sum to d.

    Raises
    ------
    ValueError
        If there are not so many samples.
    """
    if not 1 <= clients <= d:
        raise ValueError(f"clients is {clients}, expected 1 to {d}, the number of samples.")
    aside = d // (40 * clients)  # 1/40 = 0.025
    left = d - clients * aside
    points = 1 + np.sort(draw.choice(left - 1, clients - 1, replace=False))
    return aside + np.diff(points, prepend=0, append=left)


def _read_mat(
    path: Path, variable: str, shape: tuple[int, int], allowed: tuple[int, int]
) -> npt.NDArray[Any]:
    """Read one matrix of a MATLAB file, dense or sparse, whose entries are of two values."""
    from scipy.io import loadmat
    from scipy.sparse import csr_matrix

    with reading(path, QSAR_SOURCE):
        # No warning of the kind of sparse matrix: we take all.
        with warnings.catch_warnings(action="ignore"), path.open("rb") as file:
            matrix: npt.NDArray[Any] = csr_matrix(
                loadmat(file, variable_names=[variable])[variable]
            ).toarray()
        if matrix.shape != shape:
            raise ValueError(f"{variable} has shape {matrix.shape}, expected {shape}")
        if len(wrong := np.argwhere(~np.isin(matrix, allowed))):
            row, column = wrong[0]
            found = f"{variable}({row + 1}, {column + 1}) is {matrix[row, column]}"
            raise ValueError(f"{found}, expected one of {allowed}; {len(wrong)} entries are wrong")
    return matrix


def qsar(
    seed: int,
    root: Path,
    *,
    clients: int = 64,
    mu: NotNegative = 0.001,
    reg_scaling: RegScaling = "per_sample",
) -> TabularData:
    """Deal QSAR oral toxicity ('qot' in Example V.2) to clients, for logistic regression.

    8,992 molecules with 1,024 bits of a fingerprint each, 741 of them toxic (b = 1). Each column of
    all samples is divided by its norm, which the paper does not mention but its numbers need
    (docs/methods/fedgia-notes.md, P9); a column of zeros would stay one. Samples are shuffled and
    cut at random points into parts of more than 0.025 d/m.

    Parameters
    ----------
    seed : int
        Decides who gets which samples.
    root : Path
        Data root; the files lie in its folder ``qsar-oral-toxicity``.
    clients : int
        Number of clients m.
    mu : float
        Weight of the regulariser, 0 or more.
    reg_scaling : {'per_sample', 'full'}
        "per_sample": mu/(2 d_i) ||x||^2, with which the paper's numbers were made. "full":
        mu/2 ||x||^2, as (3) is printed (docs/methods/fedgia-notes.md, P8).

    Raises
    ------
    FileNotFoundError, ValueError
        If a file is missing or damaged, `mu` is out of range, or there are more clients than
        samples.
    """
    folder = root / "qsar-oral-toxicity"
    x = _read_mat(folder / "toxicity.mat", "X", QSAR_SHAPE, (0, 1))
    y = _read_mat(folder / "toxicityclass.mat", "y", (QSAR_SHAPE[0], 1), (-1, 1))

    draw = generator(seed, "qsar")
    sizes = random_sizes(len(x), clients, draw)
    order = draw.permutation(len(x))
    norms = np.linalg.norm(x, axis=0)
    a = x / np.where(norms > 0, norms, 1)
    b = (y[:, 0] > 0).astype(np.float64)
    dealt = _deal(a[order], b[order], sizes)
    return TabularData("qsar", dealt, "logistic", a.shape[1], mu, reg_scaling)
