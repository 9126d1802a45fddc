"""Chance on the server: which clients take part, all from the user's one seed."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...maths.seeds import seed_of


@dataclass(kw_only=True)
class Sampling:
    """Draws the clients of a phase uniformly without replacement.

    Parameters
    ----------
    fraction_train, fraction_evaluate : float
        Shares of the clients.
    min_train, min_evaluate : int
        Draw at least so many.
    seed : int
        The run's.
    """

    fraction_train: float
    fraction_evaluate: float
    min_train: int
    min_evaluate: int
    seed: int

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start from the seed."""
        self._train, self._evaluate = np.random.default_rng(self.seed).spawn(2)

    def for_training(self, clients: Sequence[int], busy: Collection[int] = ()) -> list[int]:
        """Draw who trains out of these sorted ids, beside those busy with it; sorted."""
        size = num_sampled(len(clients), self.fraction_train, self.min_train) - len(busy)
        return _sample(self._train, [c for c in clients if c not in busy], size)

    def for_evaluation(self, clients: Sequence[int]) -> list[int]:
        """Draw who evaluates."""
        if self.fraction_evaluate == 0:
            return []
        size = num_sampled(len(clients), self.fraction_evaluate, self.min_evaluate)
        return _sample(self._evaluate, clients, size)

    def client_seeds(self, clients: Iterable[int], server_round: int) -> dict[int, int]:
        """Return clients' seeds for a round."""
        return {client: seed_of(self.seed, client, server_round) for client in clients}

    def state_arrays(self) -> dict[str, NDArray[np.uint8]]:
        """Return the states of the generators."""
        return {
            "train_rng": _generator_to_array(self._train),
            "evaluate_rng": _generator_to_array(self._evaluate),
        }

    def load_state_arrays(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned; raise anything if it is something else."""
        self._train = _generator_from_array(arrays["train_rng"])
        self._evaluate = _generator_from_array(arrays["evaluate_rng"])


def _sample(rng: np.random.Generator, clients: Sequence[int], size: int) -> list[int]:
    if size <= 0:
        return []
    chosen = rng.choice(len(clients), size=size, replace=False)
    return [clients[index] for index in sorted(chosen)]


def num_sampled(num_clients: int, fraction: float, least: int = 1) -> int:
    """Return how many of some clients a fraction of them is, at least one."""
    # The small term undoes roundings such as 0.29 * 100 = 28.999999999999996.
    return min(num_clients, max(int(fraction * num_clients + 1e-9), least, 1))


def _generator_to_array(generator: np.random.Generator) -> NDArray[np.uint8]:
    """Return the state of a generator as text, for a checkpoint."""
    return np.frombuffer(json.dumps(generator.bit_generator.state).encode(), np.uint8)


def _generator_from_array(array: NDArray[Any]) -> np.random.Generator:
    """Return a generator in the state that `_generator_to_array` returned."""
    bits = np.random.PCG64()
    bits.state = json.loads(array.tobytes())
    return np.random.Generator(bits)
