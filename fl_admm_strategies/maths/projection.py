"""The random projection of Lp-Proj, which server and clients draw from one seed."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


@lru_cache(maxsize=2)
def projection(seed: int, num_rows: int, size: int, dtype: str) -> NDArray[Any]:
    """Return P: Gaussian rows of length 1, the same for the same arguments.

    The paper leaves P open; this is the choice of the authors' code (docs/methods/lp-proj-admm.md,
    P1).

    Returns
    -------
    ndarray of shape (num_rows, size)
        Read-only.
    """
    rows = np.random.default_rng([seed, *b"Lp-Proj"]).standard_normal((num_rows, size))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    matrix = rows.astype(dtype)
    matrix.flags.writeable = False
    return matrix
