"""Settings that change with the round or the client: step sizes, local work, delays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .checks import (
    Checked,
    Count,
    Fraction,
    NotNegative,
    Positive,
    WholeNumber,
    check_count,
    check_positive,
)

StepSize = Positive | Callable[[int], float]
"""A step size, or a function of the round, which counts from 1, such as `StepDecay`."""
StepSizeOrZero = NotNegative | Callable[[int], float]
EpochSchedule = Count | Callable[[int, int], int]
"""Local epochs, or a function of the round and the client's id."""


@dataclass(frozen=True)
class StepDecay(Checked):
    """A step size that is multiplied by a factor every so many rounds.

    Parameters
    ----------
    initial : float
        The step size of the first rounds.
    factor : float
        In (0, 1].
    every : int (default: 1)
        Rounds from one step to the next. Rounds count from 1.

    Examples
    --------
    >>> StepDecay(0.01, factor=0.9, every=5)(6)
    0.009000000000000001
    """

    initial: Positive
    factor: Fraction
    every: Count = 1

    def __call__(self, server_round: int) -> float:
        """Return the step size of a round."""
        return self.initial * self.factor ** ((server_round - 1) // self.every)


@dataclass(frozen=True)
class GrowingEpochs(Checked):
    """Local epochs that grow by one every so many rounds (FPFC, section 6.4.4).

    Parameters
    ----------
    every : int (default: 1)
        Rounds with the same number; the paper has ceil(k/20), which is 20, and k, which is 1.
    first : int (default: 1)
        The number of the first rounds.

    Examples
    --------
    >>> epochs = GrowingEpochs(every=2)
    >>> [epochs(server_round, 7) for server_round in (1, 2, 3, 4, 5)]
    [1, 1, 2, 2, 3]
    """

    every: Count = 1
    first: Count = 1

    def __call__(self, server_round: int, client: int) -> int:
        """Return the epochs of a round, the same for all clients."""
        return self.first + (server_round - 1) // self.every


@dataclass(frozen=True)
class RandomEpochs(Checked):
    """Local epochs of unequal clients: uniform from 1 to T, anew in every round (FPFC, E.2.5).

    Parameters
    ----------
    most : int
        T.
    by_client : bool (default: False)
        Draw one number for each client and keep it: some are always slow.
    seed : int (default: 0)
        Of the draws; each depends on this, the client and the round alone.

    Examples
    --------
    >>> epochs = RandomEpochs(most=10)
    >>> 1 <= epochs(1, 5) <= 10
    True
    """

    most: Count
    by_client: bool = False
    seed: WholeNumber = 0

    def __call__(self, server_round: int, client: int) -> int:
        """Return the epochs of a client in a round."""
        rng = _generator(self, server_round, client)
        return int(rng.integers(1, self.most, endpoint=True))


@dataclass(frozen=True)
class RandomDelay(Checked):
    """Simulated seconds from an instruction to its reply, uniform between two bounds.

    Parameters
    ----------
    high : float
        The upper bound.
    low : float (default: 0.0)
        The lower bound.
    by_client : bool (default: False)
        Draw one number for each client and keep it, in place of one for every instruction.
    seed : int (default: 0)
        Of the draws; each depends on this, the client and the round alone.

    Examples
    --------
    >>> delay = RandomDelay(high=20.0)
    >>> 0 <= delay(1, 5) <= 20
    True
    """

    high: Positive
    low: NotNegative = 0.0
    by_client: bool = False
    seed: WholeNumber = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise ValueError(f"low is {self.low}, expected at most high, {self.high}.")

    def __call__(self, server_round: int, client: int) -> float:
        """Return the delay of a client that is asked in a round."""
        return float(_generator(self, server_round, client).uniform(self.low, self.high))


def _generator(
    of: RandomEpochs | RandomDelay, server_round: int, client: int
) -> np.random.Generator:
    """Return the random numbers of a client, or of a client in a round."""
    key = [of.seed, client] if of.by_client else [of.seed, client, server_round]
    return np.random.default_rng(key)


def rate_in(server_round: int, rate: StepSize, name: str = "lr") -> float:
    """Return the step size of a round."""
    value = rate(server_round) if callable(rate) else rate
    check_positive(f"{name} in round {server_round}", value)
    return value


def epochs_in(server_round: int, client: int, epochs: EpochSchedule) -> int:
    """Return the local epochs of a client in a round."""
    found = epochs(server_round, client) if callable(epochs) else epochs
    check_count(f"local_epochs({server_round}, {client})", found, least=1)
    return found
