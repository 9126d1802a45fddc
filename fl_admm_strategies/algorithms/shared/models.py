"""What the methods share whose server keeps one model, or whose clients keep their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from ...maths.blocks import Arrays
from ...runtime.algorithm import OnClient
from ...runtime.messages.schema import Instruction
from ...runtime.sampled import SampledStrategy


class ToldStrategy(SampledStrategy):
    """Base of the methods whose clients all get the same kind of message.

    Parameters
    ----------
    **base
        The parameters of `SampledStrategy`.
    """

    told: ClassVar[type[Instruction]]
    """What they are sent: settings of the method, what is `given` to all, and `given_to` one."""

    def given(self, server_round: int) -> dict[str, Any]:
        """Return the fields of `told` that are the same for all clients, and no settings."""
        return {}

    def given_to(self, client_id: int) -> dict[str, Any]:
        """Return the fields that differ by client; by default there are none."""
        return {}

    def train_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> Mapping[int, Instruction]:
        """Send every client what it is told."""
        told = partial(self.told.of, self, server_round, **self.given(server_round))
        if type(self).given_to is ToldStrategy.given_to:  # one message for all
            return dict.fromkeys(client_ids, told())
        return {client: told(**self.given_to(client)) for client in client_ids}


@dataclass
class ModelState:
    """w, the global model."""

    model: Arrays


class OneModelStrategy(ToldStrategy):
    """Base of the methods whose state is w, the global model; personal ones stay with the clients.

    Parameters
    ----------
    **base
        The parameters of `SampledStrategy`.
    """

    def init_state(self, arrays: Arrays) -> ModelState:
        """Start with w^0, the initial model."""
        return ModelState(arrays)

    def given(self, server_round: int) -> dict[str, Any]:
        """Return w."""
        return {"model": self.state.model}

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return w; a personal model stays with its client."""
        if kind == "personal":
            return on_client(self)
        return {name: array.copy() for name, array in self.state.model.items()}


def on_client(strategy: SampledStrategy, more: str = "") -> OnClient:
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


class OwnModelsStrategy(ToldStrategy):
    """Base of the methods whose clients keep models of their own, begun from the state's `initial`.

    Parameters
    ----------
    **base
        The parameters of `SampledStrategy`.
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
