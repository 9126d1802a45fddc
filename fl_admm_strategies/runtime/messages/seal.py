"""The seal of an upload: a checksum among its metrics. By it the server sees any change.

Mods on the client and wrappers around the strategy may clip an upload or add noise to it on its
way. The client then holds something else than what the server took in.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

SEAL = "upload-seal"
ALTERED = -1
"""In place of a checksum: the client's own mods have changed the upload, with noise perhaps."""


def seal(arrays: Iterable[NDArray[Any]]) -> int:
    """Return the CRC-32 of arrays, one after another."""
    value = 0
    for array in arrays:
        dense = np.ascontiguousarray(array)
        value = zlib.crc32(dense.reshape(-1).view(np.uint8).data, value)
    return value
