"""A model's arrays: by name, and the part that an algorithm optimises as one flat vector."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Annotated, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
"""Named arrays of one model, in the order of the model's ``state_dict``."""

PIECE = 2**14
"""Numbers of a vector that are worked on at a time."""

_AS_SAVED = (
    "Continue with the algorithm, model, clients and settings (such as `duals`) that it was saved "
    "with, and the same version of fl-admm-strategies."
)

Spec = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""Shape and dtype of named arrays, in the order of the model."""


def spec_of(arrays: Mapping[str, NDArray[Any]]) -> Spec:
    """Return the shapes and dtypes of named arrays."""
    return {name: (array.shape, array.dtype) for name, array in arrays.items()}


def as_dtype(array: NDArray[Any], dtype: np.dtype[Any], *, copy: bool = True) -> NDArray[Any]:
    """Return numbers in a dtype, rounded to the nearest where it has whole ones only."""
    rounded = array if dtype.kind == "f" else np.asarray(np.rint(array))
    return rounded.astype(dtype, copy=copy)


class Block:
    """The arrays of a model that an algorithm treats as one vector in R^d.

    Parameters
    ----------
    spec : Spec
        Shape and dtype of every array of the block.
    order : sequence of str, optional
        The names of the whole model's arrays, for `model`.

    Attributes
    ----------
    names : list of str
    size : int
        d.
    dtype : dtype
        Of the vector: that of the arrays, float32 at least.
    """

    def __init__(self, spec: Spec, order: list[str] | None = None) -> None:
        self.spec = spec
        self.order = list(spec) if order is None else order
        self.names = list(spec)
        sizes = [math.prod(shape) for shape, _ in spec.values()]
        self.size = sum(sizes)
        self.dtype = np.result_type(np.float32, *(dtype for _, dtype in spec.values()))
        stops = accumulate(sizes)
        self._places = [slice(end - size, end) for size, end in zip(sizes, stops, strict=True)]

    @classmethod
    def optimised(
        cls, arrays: Arrays, trained: Collection[str], apart: re.Pattern[str] | None = None
    ) -> Self:
        """Return the block of a model's trained arrays, but for names that match a pattern.

        Raises
        ------
        ValueError
            If there are none.
        """
        return cls(spec_of(optimised(arrays, trained, apart)), list(arrays))

    @classmethod
    def named(
        cls,
        setting: str,
        pattern: re.Pattern[str] | None,
        arrays: Arrays,
        trained: Collection[str],
    ) -> Self:
        """Return the block of the trained arrays with a pattern in their names; without one, all.

        Raises
        ------
        ValueError
            If it is found in none of them, or in all; `setting` is the parameter it was given for.
        """
        if pattern is None:
            return cls.optimised(arrays, trained)
        names = matching(setting, pattern, trained)
        return cls(spec_of({name: arrays[name] for name in names}), list(arrays))

    def rest(self, arrays: Arrays) -> Arrays:
        """Return a model's arrays that are not in the block."""
        return {name: array for name, array in arrays.items() if name not in self.spec}

    def vector(self, arrays: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        """Return the block's arrays, out of a model or alone, as a new vector of shape (d,)."""
        return np.concatenate([arrays[name].ravel() for name in self.spec], dtype=self.dtype)

    def joined(self, arrays: Mapping[str, NDArray[Any]]) -> Vector:
        """Return what `vector` does, to be read a part at a time."""
        return _Joined((arrays[name] for name in self.spec), self.dtype)

    def arrays(self, vector: NDArray[Any], *, copy: bool = True) -> Arrays:
        """Cut a vector of shape (d,) into the block's arrays, with their own dtypes.

        Integers are rounded. Without `copy` those of the vector's dtype are views of it.
        """
        arrays: Arrays = {}
        for (name, (shape, dtype)), place in zip(self.spec.items(), self._places, strict=True):
            part = vector[place].reshape(shape)
            arrays[name] = as_dtype(part, dtype, copy=copy)
        return arrays

    def model(self, vector: NDArray[Any], rest: Arrays, *, copy: bool = True) -> Arrays:
        """Return a whole model: the block from a vector, the `rest` as it is."""
        arrays = rest | self.arrays(vector, copy=copy)
        return {name: arrays[name] for name in self.order}


class Vector(Protocol):
    """A vector of which a part can be read."""

    def __getitem__(self, part: slice, /) -> NDArray[Any]:
        """Return a part, to be left as it is."""


class _Joined:
    """Arrays one after another, read as one vector without making it."""

    def __init__(self, arrays: Iterable[NDArray[Any]], dtype: np.dtype[Any]) -> None:
        self._flat = [array.ravel() for array in arrays]
        self._stops = list(accumulate(array.size for array in self._flat))
        self._dtype = dtype

    def __getitem__(self, part: slice) -> NDArray[Any]:
        start, stop, _ = part.indices(self._stops[-1])
        found, place = [], bisect_right(self._stops, start)
        while start < stop:
            array, end = self._flat[place], self._stops[place]
            first = end - array.size
            found.append(array[start - first : stop - first])
            start, place = end, place + 1
        if len(found) == 1:
            return found[0].astype(self._dtype, copy=False)
        return np.concatenate(found, dtype=self._dtype)


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
            f"{setting} is {pattern!r}, expected a regular expression, e.g. 'head' ({error})."
        ) from error


Pattern = Annotated[str, compile_pattern]


def optimised(
    arrays: Arrays, trained: Collection[str], apart: re.Pattern[str] | None = None
) -> Arrays:
    """Return the arrays that clients train, without those with a pattern in their names.

    Raises
    ------
    ValueError
        If there are none.
    """
    found = {
        name: array
        for name, array in arrays.items()
        if name in trained and not (apart and apart.search(name))
    }
    if not found:
        raise ValueError(
            "The model has no array of floating point numbers to optimise: its arrays are "
            f"{', '.join(arrays)}."
        )
    return found


def matching(setting: str, pattern: re.Pattern[str], trained: Collection[str]) -> list[str]:
    """Return the names, of the arrays that are trained, in which a pattern is found.

    Raises
    ------
    ValueError
        If it is found in none of them, or in all: then it separates nothing.
    """
    found = [name for name in trained if pattern.search(name)]
    if found and len(found) < len(trained):
        return found
    how_many = "all" if found else "none"
    raise ValueError(
        f"{setting}={pattern.pattern!r} matches {how_many} of the model's trained arrays: "
        f"{', '.join(trained)}. Give a pattern that names a part of them, e.g. 'head' or "
        "'^fc2[.]'" + (f", or leave `{setting}` out." if found else ".")
    )


def has_shape(array: NDArray[Any], shape: tuple[int, ...]) -> bool:
    """Return whether an array has a shape, in which a length of -1 may be any."""
    lengths = zip(array.shape, shape, strict=False)
    return array.ndim == len(shape) and all(wanted in (found, -1) for found, wanted in lengths)


def any_length(spec: Spec) -> Spec:
    """Return the shapes of arrays that may have any number of rows."""
    return {name: ((-1, *shape[1:]), dtype) for name, (shape, dtype) in spec.items()}


def check_saved(saved: Mapping[str, NDArray[Any]], expected: Spec) -> None:
    """Raise ValueError unless saved arrays are there, in the shapes and dtypes that a run has.

    Parameters
    ----------
    saved : mapping of str to ndarray
        These may be more than are expected.
    expected : mapping
        As `Spec`; see `has_shape`.
    """
    if missing := sorted(expected.keys() - saved.keys()):
        raise ValueError(f"The saved state lacks {missing}. {_AS_SAVED}")
    for name, (shape, dtype) in expected.items():
        found = saved[name]
        if found.dtype != dtype or not has_shape(found, shape):
            raise ValueError(
                f"The saved '{name}' is {found.dtype} of shape {found.shape}, expected {dtype} of "
                f"shape {shape}. {_AS_SAVED}"
            )


def prefixed(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
    """Return the arrays with a prefix before their names."""
    return {prefix + name: array for name, array in arrays.items()}


def under(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
    """Return those of the arrays that have a prefix before their names, without it."""
    return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}


class HasArrays(Protocol):
    """Named arrays and the number of examples behind them."""

    @property
    def arrays(self) -> Arrays:
        """The uploaded arrays."""

    @property
    def num_examples(self) -> float:
        """Their weight."""


def weighted_average(arrays: Arrays, uploads: Mapping[int, HasArrays]) -> Arrays:
    """Return the means of the uploads' arrays of these names, weighted by their examples.

    Integers are rounded.
    """
    weights = np.array([upload.num_examples for upload in uploads.values()])
    return average(arrays, uploads, weights)


def average(
    arrays: Arrays, uploads: Mapping[int, HasArrays], weights: NDArray[np.float64]
) -> Arrays:
    """Return the weighted means of the uploads' arrays of these names, as `weighted_average`."""
    shares = weights / weights.sum()
    averages: Arrays = {}
    for name, before in arrays.items():
        uploaded = [np.ravel(upload.arrays[name]) for upload in uploads.values()]
        averages[name] = mean = np.empty(before.shape, before.dtype)
        flat, size = mean.reshape(-1), min(PIECE, before.size)
        total, term = np.empty(size), np.empty(size)
        for part in pieces(before.size):
            found, weighted = total[: len(flat[part])], term[: len(flat[part])]
            found[:] = 0
            for share, array in zip(shares, uploaded, strict=True):
                weighted[:] = array[part]
                weighted *= share
                found += weighted
            flat[part] = found if before.dtype.kind == "f" else np.rint(found)
    return averages


def pieces(size: int) -> Iterator[slice]:
    """Yield a vector in pieces that stay in the processor's cache: it is read and written once."""
    return (slice(start, start + PIECE) for start in range(0, size, PIECE))
