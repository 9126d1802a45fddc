"""Clients that keep a whole model of their own, which never travels."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from fl_admm_strategies.algorithms.shared.models import OwnModelEvaluation
from fl_admm_strategies.maths.blocks import Arrays

from ..solving.steps import Evaluation, Scalars, Steps
from .base import Asked
from .torch_client import TorchClient


class OwnModelClient(TorchClient[Asked]):
    """Base of the clients with a personal model that stays with them."""

    def load_own(self, start: Arrays | None, config: Scalars) -> None:
        """Load the client's own model, or the one to start from where the message has one."""
        self.load(start or self.own_model(self.memory.require(config)))

    def own_model(self, kept: Arrays) -> Arrays:
        """Return the own model of what the client keeps: by default it is that."""
        return kept

    def test(self, parameters: list[NDArray[Any]], config: Scalars) -> Steps[Evaluation]:
        """Evaluate the client's own model, and the global one where the method has one.

        Returns
        -------
        loss : float
            Test loss of the own model.
        num_examples : int
        metrics : dict
            ``personal-loss`` and ``personal-METRIC``; the same with ``global``.
        """
        asked = OwnModelEvaluation.decode(parameters, config)
        models = {"personal": asked.personal or self.own_model(self.memory.require(config))}
        if asked.global_ is not None:
            models["global"] = asked.global_
        return (yield from self.evaluate_models(models))

    def personal_arrays(self) -> Arrays:
        """Return the client's own model after its last training: a ``state_dict``.

        Raises
        ------
        RuntimeError
            If it has not been trained yet.
        """
        return self.model_arrays.complete(self.own_model(self.memory.latest()))
