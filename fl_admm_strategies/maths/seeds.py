"""Seeds of many clients at once, bit for bit those of `numpy.random.SeedSequence`.

One `SeedSequence` costs more than all else that a server does for a client. Its algorithm, which
NumPy promises to keep, mixes 32-bit words; here each step does so for all clients. See M. E.
O'Neill, "Developing a seed_seq Alternative" (2015).
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_POOL = 4
_INIT_A, _MULT_A = 0x43B0D7E5, 0x931E8875
_INIT_B, _MULT_B = 0x8B51F9DD, 0x58F38DED
_MIX_LEFT, _MIX_RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_SHIFT = np.uint32(16)

Words = NDArray[np.uint32]


class _Hash:
    """A hash of words whose constant changes with every call."""

    def __init__(self, start: int, factor: int) -> None:
        self._constant, self._factor = start, factor

    def __call__(self, words: Words) -> Words:
        words = words ^ np.uint32(self._constant)
        self._constant = self._constant * self._factor % 2**32
        words = words * np.uint32(self._constant)
        return words ^ (words >> _SHIFT)


def short(seed: int) -> int:
    """Return a seed of 63 bits, which a message and a saved state can hold.

    Itself, or the digest of a longer one, which does not tell that: it may have to stay secret.
    """
    if seed < 2**63:
        return seed
    return int.from_bytes(blake2b(str(seed).encode(), digest_size=8).digest()) >> 1


def words_of(number: int) -> list[int]:
    """Return an integer >= 0 in words of 32 bits, the lowest first; at least one."""
    words = [number % 2**32]
    while number := number >> 32:
        words.append(number % 2**32)
    return words


def first_states(entropy: Words) -> NDArray[np.uint64]:
    """Return ``SeedSequence(row).generate_state(1, np.uint64)[0]`` for each row.

    Parameters
    ----------
    entropy : ndarray of shape (k, n)
        What `SeedSequence` is given, in words.

    Returns
    -------
    ndarray of shape (k,)
    """
    missing = max(0, _POOL - entropy.shape[1])
    columns = list(np.pad(entropy, ((0, 0), (0, missing))).T)
    hashed = _Hash(_INIT_A, _MULT_A)
    pool = [hashed(column) for column in columns[:_POOL]]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = _mixed(pool[target], hashed(pool[source]))
    for column in columns[_POOL:]:
        for target in range(_POOL):
            pool[target] = _mixed(pool[target], hashed(column))
    hashed = _Hash(_INIT_B, _MULT_B)
    low, high = (hashed(pool[place]).astype(np.uint64) for place in (0, 1))
    return low | high << np.uint64(32)


def _mixed(one: Words, other: Words) -> Words:
    result: Words = one * _MIX_LEFT - other * _MIX_RIGHT
    return result ^ (result >> _SHIFT)
