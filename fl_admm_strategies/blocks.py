"""A block of a model's arrays, as named arrays and as one flat vector."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .wire import Arrays, Reply

Spec = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""Shape and dtype of named arrays, in the order of the model."""


def spec_of(arrays: Arrays) -> Spec:
    """Return the shapes and dtypes of named arrays."""
    return {name: (array.shape, array.dtype) for name, array in arrays.items()}


class Block:
    """The arrays that an algorithm treats as one vector in R^d.

    Parameters
    ----------
    spec : Spec
        Shape and dtype of every array of the block.

    Attributes
    ----------
    size : int
        d.
    dtype : dtype
        Of the vector: that of the arrays, float32 at least.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.size = sum(int(np.prod(shape)) for shape, _ in spec.values())
        self.dtype = np.result_type(np.float32, *(dtype for _, dtype in spec.values()))

    @property
    def names(self) -> list[str]:
        """The arrays' names."""
        return list(self.spec)

    def vector(self, arrays: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        """Return the block's arrays, out of a model or alone, as a new vector of shape (d,)."""
        return np.concatenate([arrays[name].ravel() for name in self.spec], dtype=self.dtype)

    def arrays(self, vector: NDArray[Any], *, copy: bool = True) -> Arrays:
        """Cut a vector of shape (d,) into the block's arrays, with their own dtypes.

        Without `copy` those of the vector's dtype are views of it.
        """
        arrays: Arrays = {}
        start = 0
        for name, (shape, dtype) in self.spec.items():
            stop = start + int(np.prod(shape))
            arrays[name] = vector[start:stop].reshape(shape).astype(dtype, copy=copy)
            start = stop
        return arrays


def compile_pattern(setting: str, pattern: str | None) -> re.Pattern[str] | None:
    """Compile a user's regular expression; `setting` is the parameter it was given for.

    Raises
    ------
    ValueError
        If it is none.
    """
    if pattern is None:
        return None
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"{setting}={pattern!r} is not a regular expression ({error}). Expected e.g. 'head'."
        ) from error


BATCH_NORM = r"(running_mean|running_var|num_batches_tracked)$"
"""The buffers of PyTorch's batch norm, which have no gradient and so no dual variable."""


def optimised(arrays: Arrays, apart: re.Pattern[str] | None) -> Arrays:
    """Return the floating point arrays, without those in whose names a pattern is found.

    Raises
    ------
    ValueError
        If there are none.
    """
    found = {
        name: array
        for name, array in arrays.items()
        if array.dtype.kind == "f" and not (apart and apart.search(name))
    }
    if not found:
        raise ValueError("The model has no array of floating point numbers to optimise.")
    return found


def matching(setting: str, pattern: re.Pattern[str], arrays: Arrays) -> list[str]:
    """Return the names of the floating point arrays in which a pattern is found.

    Raises
    ------
    ValueError
        If it is found in none of them, or in all: then it separates nothing.
    """
    floating = [name for name, array in arrays.items() if array.dtype.kind == "f"]
    found = [name for name in floating if pattern.search(name)]
    if found and len(found) < len(floating):
        return found
    how_many = "all" if found else "none"
    raise ValueError(
        f"{setting}={pattern.pattern!r} matches {how_many} of the model's arrays: "
        f"{', '.join(arrays)}. Give a pattern that names a part of them, e.g. 'head' or '^fc2[.]'"
        + (f", or leave `{setting}` out." if found else ".")
    )


def prefixed(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays with a prefix before their names."""
    return {prefix + name: array for name, array in arrays.items()}


def under(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return those of the arrays that have a prefix before their names, without it."""
    return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}


def weighted_average(arrays: Arrays, replies: Mapping[int, Reply]) -> Arrays:
    """Return the means of the replies' arrays of these names, weighted by their examples.

    For arrays that take no part in the optimisation. Integers are rounded.
    """
    weights = np.array([reply.num_examples for reply in replies.values()])
    weights /= weights.sum()
    averages: Arrays = {}
    for name, before in arrays.items():
        mean = sum(
            weight * reply.arrays[name].astype(np.float64)
            for weight, reply in zip(weights, replies.values(), strict=True)
        )
        rounded = np.asarray(mean if before.dtype.kind == "f" else np.rint(mean))
        averages[name] = rounded.astype(before.dtype)
    return averages
