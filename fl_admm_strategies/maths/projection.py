"""The random projection of Lp-Proj, which server and clients draw from one seed."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .blocks import Arrays, Block


@lru_cache(maxsize=2)
def projection(seed: int, num_rows: int, size: int, dtype: str) -> NDArray[Any]:
    """Return P: Gaussian rows of length 1, the same for the same arguments.

    The paper leaves P open; this is the choice of the authors' code
    (docs/methods/lp-proj-admm-notes.md, P1).

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


def projected_block(
    arrays: Arrays, trained: Collection[str], apart: re.Pattern[str] | None, dimension: int
) -> Block:
    """Return the arrays that P acts on: the trained ones, without those that match a pattern.

    Raises
    ------
    ValueError
        If P would have more rows than columns.
    """
    block = Block.optimised(arrays, trained, apart)
    if block.size < dimension:
        raise ValueError(
            f"dimension is {dimension}, but the model has only {block.size} floating point "
            "numbers to project. Give a smaller one."
        )
    return block
