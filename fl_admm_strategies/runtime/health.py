"""Whether a run gets anywhere: rounds without a usable reply, and models that are not finite."""

from __future__ import annotations

from typing import Any

from .guard import is_finite


class Health:
    """Counts rounds, and ends a run that cannot be a success.

    Parameters
    ----------
    patience : int
        Rounds in a row without any usable reply after which a run has failed.

    Attributes
    ----------
    ever_usable : bool
        Whether any reply of the run was usable.
    empty_rounds : int
        How many of the last rounds had none.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.begin()

    def begin(self) -> None:
        """Start a run."""
        self.ever_usable = False
        self.empty_rounds = 0

    def count_usable_round(self) -> None:
        """Note that somebody could train."""
        self.ever_usable, self.empty_rounds = True, 0

    def count_empty_round(self, last_refusal: str, *, hopeless: bool = False) -> None:
        """Note that nobody could; raise RuntimeError if nobody ever could, `patience` times.

        Or at once, where it is `hopeless` to wait.
        """
        self.empty_rounds += 1
        if not self.ever_usable and (hopeless or self.empty_rounds >= self.patience):
            first = "round" if self.empty_rounds == 1 else f"{self.empty_rounds} rounds"
            raise RuntimeError(
                f"No client could train in the first {first}, so the run ends. The last refusal: "
                f"{last_refusal}"
            )

    def check_end(self, server_round: int, last_refusal: str) -> None:
        """Raise RuntimeError if a run that comes to its end has no usable result."""
        if not self.ever_usable:
            raise RuntimeError(
                "The run ended without a single usable reply, so the model is still the initial "
                f"one. The last refusal: {last_refusal}"
            )
        if self.empty_rounds >= self.patience:
            raise RuntimeError(
                f"No reply was usable in the last {self.empty_rounds} rounds, so the model is that "
                f"of round {server_round - self.empty_rounds}. The last refusal: {last_refusal}"
            )

    def check_finite(self, state: Any, server_round: int) -> None:
        """Raise RuntimeError if the state of a round is not finite."""
        if not is_finite(state, ()):
            raise RuntimeError(
                f"The model is not finite after round {server_round}: the run diverged. Try a "
                "smaller step size, or look for clients whose uploads are large. Checkpoints of "
                "earlier rounds are whole."
            )
