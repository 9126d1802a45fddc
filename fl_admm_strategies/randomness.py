"""Where chance comes from: one seed of the user's, for the server and for every client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def sample(
    rng: np.random.Generator, clients: Sequence[int], fraction: float, least: int
) -> list[int]:
    """Draw clients uniformly without replacement: a fraction of them, `least` at least, sorted."""
    # The small term undoes roundings such as 0.29 * 100 = 28.999999999999996.
    size = min(len(clients), max(int(fraction * len(clients) + 1e-9), least, 1))
    chosen = rng.choice(len(clients), size=size, replace=False)
    return [clients[index] for index in sorted(chosen)]


def client_seed(seed: int, client_id: int, server_round: int) -> int:
    """Derive a client's seed for a round: 63 bits, since a ConfigRecord's int is signed."""
    sequence = np.random.SeedSequence([seed, client_id, server_round])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def generator_to_array(generator: np.random.Generator) -> NDArray[np.uint64]:
    """Return the state of a generator as numbers, for a checkpoint."""
    state = generator.bit_generator.state
    words: list[int] = []
    for number in (state["state"]["state"], state["state"]["inc"]):
        words += [number >> 64, number & (2**64 - 1)]
    return np.array([*words, state["has_uint32"], state["uinteger"]], dtype=np.uint64)


def generator_from_array(array: NDArray[Any]) -> np.random.Generator:
    """Return a generator in the state that `generator_to_array` returned.

    Raises
    ------
    ValueError
        If it is not what `generator_to_array` returned.
    """
    words = [int(word) for word in array]
    # With an even increment PCG64 may stand still, and a draw would never end.
    if words[3] % 2 == 0 or words[4] > 1 or words[5] >= 2**32:
        raise ValueError(f"The saved state of a random generator, {words}, is none of PCG64.")
    bits = np.random.PCG64()
    bits.state = {
        "bit_generator": "PCG64",
        "state": {"state": words[0] << 64 | words[1], "inc": words[2] << 64 | words[3]},
        "has_uint32": words[4],
        "uinteger": words[5],
    }
    return np.random.Generator(bits)
