"""The checksum by which the server sees that an upload was changed on its way."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from fl_admm_strategies.runtime.messages.seal import _WIDTH, seal

NUMBERS = _WIDTH // 4  # of float32 in a part


def test_of_short_arrays_it_is_their_crc() -> None:
    one, other = np.arange(5.0), np.float32(3.0)
    assert seal([one, np.asarray(other)]) == zlib.crc32(one.tobytes() + other.tobytes())


@pytest.mark.parametrize("size", [1, 3, NUMBERS, NUMBERS + 1, 2 * NUMBERS, 5 * NUMBERS + 3])
def test_any_number_that_changes_changes_it(size: int) -> None:
    array = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    whole = seal([array])
    for place in {0, size // 2, size - 1, min(size - 1, NUMBERS)}:
        changed = array.copy()
        changed[place] = np.nextafter(array[place], np.float32(9))
        assert seal([changed]) != whole
    assert seal([array.copy()]) == whole
    assert seal([np.repeat(array, 2)[::2]]) == whole  # of the numbers, wherever they are


def test_parts_that_change_places_within_themselves_change_it() -> None:
    array = np.arange(4 * NUMBERS, dtype=np.float32)
    assert seal([array]) != seal([array[::-1]])
    assert seal([array, array + 1]) != seal([array + 1, array])
