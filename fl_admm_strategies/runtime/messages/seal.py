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
_WIDTH = 2**15
ALTERED = -1
"""In place of a checksum: the client's own mods have changed the upload, with noise perhaps."""


def seal(arrays: Iterable[NDArray[Any]]) -> int:
    """Return a checksum of arrays, one after another: a CRC-32.

    Of an array that is longer than `_WIDTH` bytes it is that of the sum of its parts of so many,
    as integers of 64 bits, and of the rest: a fifth of the time.
    """
    value = 0
    for array in arrays:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        rest = data.size % _WIDTH
        if data.size > _WIDTH:
            parts = data[: data.size - rest].view(np.uint64).reshape(-1, _WIDTH // 8)
            value = zlib.crc32(np.add.reduce(parts, axis=0).data, value)
            data = data[data.size - rest :]
        value = zlib.crc32(data.data, value)
    return value
