"""Tuning by Optuna: the same number of trials for every method, none of them on test data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .comparison import Space

_AT_ONCE = 5
"""Trials that are drawn together; constant, so that the number of workers changes no choice."""


class Study:
    """Draws settings by Optuna's TPE sampler from a seed.

    Parameters
    ----------
    spaces : mapping of str to Space
    budget : int
        Trials in all.
    seed : int

    Raises
    ------
    RuntimeError
        If Optuna is not installed.
    """

    def __init__(self, spaces: Mapping[str, Space], budget: int, seed: int) -> None:
        try:
            import optuna
        except ImportError:
            raise RuntimeError(
                "tune needs Optuna, which is not installed: pip install "
                "'fl-admm-strategies[compare]'."
            ) from None
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._spaces, self._left = spaces, budget
        self._failed = optuna.trial.TrialState.FAIL
        self._study = optuna.create_study(
            direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed)
        )
        self._asked: list[Any] = []

    def ask(self) -> list[dict[str, float | int]]:
        """Return the settings of the next trials; none when the budget is spent."""
        count = min(_AT_ONCE, self._left)
        self._left -= count
        self._asked = [self._study.ask() for _ in range(count)]
        return [
            {key: _drawn(trial, key, space) for key, space in self._spaces.items()}
            for trial in self._asked
        ]

    def tell(self, values: Sequence[float | None]) -> None:
        """Say what the trials came to, larger is better; None where one failed."""
        for trial, value in zip(self._asked, values, strict=True):
            if value is None:
                self._study.tell(trial, state=self._failed)
            else:
                self._study.tell(trial, value)

    def best(self) -> dict[str, float | int]:
        """Return the settings of the best trial.

        Raises
        ------
        RuntimeError
            If all failed.
        """
        try:
            return dict(self._study.best_params)
        except ValueError:
            raise RuntimeError("every trial of the tuning failed") from None


def _drawn(trial: Any, key: str, space: Space) -> float | int:
    if space.kind == "int":
        return int(trial.suggest_int(key, int(space.low), int(space.high)))
    return float(trial.suggest_float(key, space.low, space.high, log=space.kind == "log"))
