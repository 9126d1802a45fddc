"""What happens to an upload before it leaves its client: changes, one after another, in a list.

A client that goes on from its upload goes on from the result, as the server does.
What clipping and rounding hold back of a sum is then in the client's next change: error feedback
(Seide et al., "1-bit stochastic gradient descent", Interspeech 2014).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...maths.blocks import Arrays
from .wire import WIRE_DTYPE, reduced

CLIP, NOISE = "privacy-clip", "privacy-noise"
"""The settings: C, and the standard deviation of the noise. C alone: the noise is the server's."""
NOISED = "privacy-noised"
"""The metric of a reply by which its client says that it did."""

_ROUNDING = 2.0**-20  # of float32, over the norm of an array

UploadChange = Callable[[Arrays, Arrays], Arrays]
"""Makes another upload of one, given what the upload is measured from."""


class ChangedUpload(dict[str, NDArray[Any]]):
    """An upload as it travels, once all its changes are made."""


@dataclass(frozen=True)
class Clipping:
    """Scales an upload back to a distance from its reference, over all arrays together.

    An array without a reference is measured from 0. After rounding to their dtypes the arrays are
    still within the distance.
    """

    distance: float

    def __call__(self, upload: Arrays, reference: Arrays) -> Arrays:
        """Return the clipped upload."""
        before = {
            name: reference[name].astype(np.float64) if name in reference else np.zeros(array.shape)
            for name, array in upload.items()
        }
        change = {name: array - before[name] for name, array in upload.items()}
        norm = float(np.linalg.norm([np.linalg.norm(array) for array in change.values()]))
        most = self.distance * (1 - _ROUNDING)
        if norm <= most:
            return upload
        return {
            name: np.asarray(before[name] + most / norm * change[name]).astype(array.dtype)
            for name, array in upload.items()
        }


@dataclass(frozen=True)
class Noise:
    """Adds Gaussian noise, drawn from the operating system: the server must not know its seed."""

    std: float

    def __call__(self, upload: Arrays, reference: Arrays) -> Arrays:
        """Return the upload with noise."""
        chance = np.random.default_rng()
        return {
            name: np.asarray(array + chance.normal(0.0, self.std, array.shape)).astype(array.dtype)
            for name, array in upload.items()
        }


@dataclass(frozen=True)
class HalfPrecision:
    """Rounds an upload to float16, but for its buffers."""

    buffers: Collection[str]

    def __call__(self, upload: Arrays, reference: Arrays) -> Arrays:
        """Return the rounded upload; raise OutOfRangeError if a number is too large."""
        return {
            name: array if name in self.buffers else reduced(name, array, "float16")
            for name, array in upload.items()
        }


def changes_of(config: Mapping[str, Any], buffers: Collection[str]) -> list[UploadChange]:
    """Return the changes that a message asks for.

    Raises
    ------
    ValueError
        If it asks for a dtype that is not known here.
    """
    changes: list[UploadChange] = []
    if CLIP in config:
        changes.append(Clipping(config[CLIP]))
    if NOISE in config:
        changes.append(Noise(config[NOISE]))
    if (dtype := config.get(WIRE_DTYPE)) is not None:
        if dtype != "float16":
            raise ValueError(
                f"The message's {WIRE_DTYPE} is {dtype!r}, expected 'float16'. Server and client "
                "must use the same version of fl-admm-strategies."
            )
        changes.append(HalfPrecision(buffers))
    return changes
