"""What the methods with one model on the server share, and those with models on the clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from ...maths.blocks import Arrays
from ...runtime.algorithm import OnClient
from ...runtime.messages.records import Reply
from ...runtime.messages.schema import Instruction
from ...runtime.strategy import StatefulStrategy
from .base import participants_mean


class OneMessageStrategy(StatefulStrategy):
    """Base of the methods with one kind of message for all clients.

    Parameters
    ----------
    **base
        The parameters of `StatefulStrategy`.
    """

    message_type: ClassVar[type[Instruction]]
    """The message: settings of the method, the fields shared by all clients, and those of one."""

    def shared_fields(self, server_round: int) -> dict[str, Any]:
        """Return the fields of the message that all clients share, and no settings."""
        return {}

    def client_fields(self, client_id: int) -> dict[str, Any]:
        """Return the fields that differ by client; by default there are none."""
        return {}

    def train_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> Mapping[int, Instruction]:
        """Send every client its message."""
        message = partial(
            self.message_type.of, self, server_round, **self.shared_fields(server_round)
        )
        if type(self).client_fields is OneMessageStrategy.client_fields:  # one message for all
            return dict.fromkeys(client_ids, message())
        return {client: message(**self.client_fields(client)) for client in client_ids}


@dataclass
class ModelState:
    """w, the global model."""

    model: Arrays


class OneModelStrategy(OneMessageStrategy):
    """Base of the methods with w, the global model, for a state; personal ones are the clients'.

    Parameters
    ----------
    **base
        The parameters of `StatefulStrategy`.
    """

    mean_weights: ClassVar[str] = "size"
    """Whether w is the mean weighted by examples, or, with "uniform", the plain one; a method with
    the setting `weights` has that."""

    def init_state(self, arrays: Arrays) -> ModelState:
        """Start with w^0, the initial model."""
        return ModelState(arrays)

    def shared_fields(self, server_round: int) -> dict[str, Any]:
        """Return w."""
        return {"model": self.state.model}

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Set w to the mean of the participants' uploads."""
        weights = self.settings().get("weights", self.mean_weights)
        self.state.model = participants_mean(self.state.model, replies, weights)

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return w; a personal model stays with its client."""
        if kind == "personal":
            return on_client(self)
        return {name: array.copy() for name, array in self.state.model.items()}


def on_client(strategy: StatefulStrategy, more: str = "") -> OnClient:
    """Return how personal models are got from the clients that keep them; `more` ends it."""
    return OnClient(f"Read {strategy.method}Client(...).personal_arrays() there{more}.")


@dataclass
class OwnModelState(ModelState):
    """w, the global model, and w^0, which the clients' own models start from."""

    initial: Arrays


@dataclass(frozen=True)
class OwnModelEvaluation(Instruction):
    """Evaluate the client's own model, and the global one where the method has one.

    `personal` is empty but for a client that has no model of its own yet.
    """

    personal: Arrays
    global_: Arrays | None


class OwnModelsStrategy(OneMessageStrategy):
    """Base of the methods with models on the clients, which begin at the state's `initial`.

    Parameters
    ----------
    **base
        The parameters of `StatefulStrategy`.
    """

    def evaluate_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, OwnModelEvaluation]:
        """Ask for the models that the clients have; send the global one, if there is one."""
        initial, model = self.state.initial, self.global_model() or None
        is_new = self.membership.is_new
        return {
            client: OwnModelEvaluation(initial if is_new(client) else {}, model)
            for client in client_ids
        }

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Personal models stay with their clients."""
        return on_client(self)
