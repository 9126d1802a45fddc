"""What a message says of noise that a client is to add to its upload itself."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ...maths.blocks import Arrays

CLIP, NOISE = "privacy-clip", "privacy-noise"
"""The settings: C, and the standard deviation of the noise. C alone: the noise is the server's."""
NOISED = "privacy-noised"
"""The metric of a reply by which its client says that it did."""

_ROUNDING = 2.0**-20  # of float32, over the norm of an array


def with_noise(upload: Arrays, sent: Arrays, clip: float, std: float) -> Arrays:
    """Return an upload that is clipped to a distance from what was sent, with noise.

    The noise is the operating system's chance. From the seed in the message the server would know
    it. An array that was not sent is measured from 0.
    """
    before, change = _change(upload, sent)
    share, chance = share_within(change, clip), np.random.default_rng()
    return {
        name: np.asarray(
            before[name] + share * change[name] + chance.normal(0.0, std, array.shape)
        ).astype(array.dtype)
        for name, array in upload.items()
    }


def clipped(upload: Arrays, sent: Arrays, clip: float) -> tuple[Arrays, float]:
    """Return an upload that is clipped to a distance from what was sent, and its share of the way.

    Measured as in `with_noise`. It stays within the distance when it is rounded to its dtypes.
    """
    before, change = _change(upload, sent)
    share = share_within(change, clip * (1 - _ROUNDING))
    if share == 1:
        return upload, share
    return {
        name: np.asarray(before[name] + share * change[name]).astype(array.dtype)
        for name, array in upload.items()
    }, share


def share_within(change: Mapping[str, NDArray[np.float64]], clip: float) -> float:
    """Return what is left of a change, 1 or less, where its norm over all arrays is clipped."""
    norm = float(np.linalg.norm([np.linalg.norm(array) for array in change.values()]))
    return min(1.0, clip / norm) if norm else 1.0


def _change(upload: Arrays, sent: Arrays) -> tuple[Arrays, Arrays]:
    """Return what an upload is measured from, and the change against it, in double precision."""
    before = {
        name: sent[name].astype(np.float64) if name in sent else np.zeros(array.shape)
        for name, array in upload.items()
    }
    return before, {name: array - before[name] for name, array in upload.items()}
