"""Step sizes that change with the round."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import check_count, check_fraction, check_positive


@dataclass(frozen=True)
class StepDecay:
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

    initial: float
    factor: float
    every: int = 1

    def __post_init__(self) -> None:
        check_positive("initial", self.initial)
        check_fraction("factor", self.factor, zero=False)
        check_count("every", self.every, least=1)

    def __call__(self, server_round: int) -> float:
        """Return the step size of a round."""
        return self.initial * self.factor ** ((server_round - 1) // self.every)
