"""A federation for tests of FPFC and AsyncFPFC that costs nothing: omega_i is one number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from clients import client_app
from clients.toolkit.round.memory import Memory
from fl_admm_strategies import InProcessGrid, made_by
from fl_admm_strategies.algorithms.fpfc.messages import FPFCInstruction, FPFCRule

TARGETS = (0.0, 0.2, 5.0, 5.3, 0.1)

Spoil = Callable[[int, int], float | None]
"""``spoil(client, server_round)``: what the client uploads in place of its model; None: that."""


class PointClient(NumPyClient):
    """Device i has f_i(omega) = (omega - c_i)^2 / 2."""

    def __init__(self, context: Context, spoil: Spoil) -> None:
        self.client, self.spoil = int(context.node_config["partition-id"]), spoil
        self.target, self.memory = TARGETS[self.client], Memory(context, None)

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        message = FPFCInstruction.decode(parameters, config)
        zeta, rho = message.model["omega"], FPFCRule.read(message.rule).rho
        start = self.memory.require(config) if message.start is None else message.start
        omega = start.get("omega", zeta)
        for _ in range(message.local_epochs):
            omega = omega - message.lr * (omega - self.target + rho * (omega - zeta))
        self.memory.keep(config, {"omega": omega})
        wrong = self.spoil(self.client, int(config["server-round"]))
        upload = omega if wrong is None else np.full_like(omega, wrong)
        return [upload], 10 + self.client, {"loss": float(omega[0]), **made_by("FPFC")}

    def evaluate(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        return float(parameters[0][0] - self.target), 10, made_by("FPFC")


def faultless(client: int, server_round: int) -> None:
    """Let every client upload its model."""


def failing(clients: Sequence[int], rounds: Sequence[int], value: float | None = None) -> Spoil:
    """Let clients fail, or upload a value, when an instruction of one of the rounds asks them."""

    def spoil(client: int, server_round: int) -> float | None:
        if client not in clients or server_round not in rounds:
            return None
        if value is None:
            raise OSError(f"the disk of {client} is full")
        return value

    return spoil


def point_app(spoil: Spoil = faultless, num_clients: int | None = None) -> ClientApp:
    def client_fn(context: Context) -> Any:
        return PointClient(context, spoil).to_client()

    return client_app(client_fn, num_clients=num_clients)


def first() -> ArrayRecord:
    """Return omega^0 = 1."""
    return ArrayRecord({"omega": Array(np.ones(1))})


class ScriptedGrid(InProcessGrid):
    """A grid on which the replies to training messages come one at a time, in a given order.

    Parameters
    ----------
    app : ClientApp
    num_nodes : int
    order : iterable of int
        Whose reply comes next, each client's node being its id and 2; then no reply comes.
    """

    def __init__(self, app: ClientApp, num_nodes: int, order: Iterable[int]) -> None:
        super().__init__(app, num_nodes)
        self.order = list(order)
        self.node_of: dict[str, int] = {}

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        ids = super().push_messages(messages)
        for message, own in zip(messages, ids, strict=True):
            if message.metadata.message_type == "train":
                self.node_of[own] = message.metadata.dst_node_id
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        ids = list(message_ids)
        if not ids or ids[0] not in self.node_of:
            return super().pull_messages(ids)
        if not self.order:
            return []
        due = [own for own in ids if self.node_of[own] == self.order[0] + 2]
        if due:
            self.order.pop(0)
        return super().pull_messages(due)
