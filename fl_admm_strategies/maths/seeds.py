"""Seeds that follow from the run's."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np


def short(seed: int) -> int:
    """Return a seed of 63 bits, which a message and a saved state can hold.

    Itself, or the digest of a longer one, which does not tell that: it may have to stay secret.
    """
    if seed < 2**63:
        return seed
    return int.from_bytes(blake2b(str(seed).encode(), digest_size=8).digest()) >> 1


def seed_of(*words: int) -> int:
    """Return the seed that follows from these numbers: 63 bits, as a message's int is signed."""
    entropy = np.array(words, np.uint32) if max(words) < 2**32 else words  # the same, in less time
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 1
