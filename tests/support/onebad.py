"""A node that says what it likes, or nothing, at a stage of a run; the others are honest."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MessageType, MetricRecord, RecordDict

from fl_admm_strategies.runtime.messages.packing import pack_replies, unpack_replies
from fl_admm_strategies.runtime.models import COLLECT
from fl_admm_strategies.runtime.trust.layout import NAMES
from tests.support.federation import Online, RestlessGrid

SILENT, LATE, LIES, REPEATS, CLAIMS, HUGE = BEHAVIOURS = (
    *("silent", "late", "lies", "repeats", "claims ids", "huge numbers"),
)


class OneBad(RestlessGrid):
    """One client on each node, of which one is bad at some stages.

    Parameters
    ----------
    app : ClientApp
    clients : iterable of int
        Who there is.
    bad : int
        The bad client.
    stages : collection of str
        Of "layout", "handshake", "train", "collect" and "evaluate".
    behaviour : str
        One of `BEHAVIOURS`.
    online : Online, optional
        As of `RestlessGrid`; by default all are there.
    """

    def __init__(
        self,
        app: Any,
        clients: Iterable[int],
        bad: int,
        stages: Collection[str],
        behaviour: str,
        online: Online | None = None,
    ) -> None:
        clients = list(clients)
        nodes = {client: 2 + place for place, client in enumerate(clients)}
        super().__init__(app, clients, online or {0: list(nodes.values())})
        self.bad, self.node = bad, nodes.get(bad)
        self.others = [client for client in clients if client != bad]
        self.stages, self.behaviour = stages, behaviour
        self._stage_of: dict[str, str] = {}
        self._held: list[Message] = []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        ids = super().push_messages(messages)
        for message_id, message in zip(ids, messages, strict=True):
            if message.metadata.dst_node_id == self.node:
                self._stage_of[message_id] = stage_of(message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return self._answered(super().pull_messages(message_ids))

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        return self._answered(super().send_and_receive(messages, timeout=timeout))

    def _answered(self, replies: list[Message]) -> list[Message]:
        found, self._held = self._held, []
        for reply in replies:
            stage = self._stage_of.get(reply.metadata.reply_to_message_id)
            found += [reply] if stage not in self.stages else self._said(reply)
        return found

    def _said(self, reply: Message) -> list[Message]:
        if self.behaviour == LATE:
            self._held.append(reply)
        if self.behaviour in (SILENT, LATE):
            return []
        if self.behaviour == REPEATS:
            return [reply, copy.copy(reply)]
        if self.behaviour == CLAIMS and not reply.has_error():
            ((_, raw),) = unpack_replies(reply.content)
            reply.content = pack_replies(dict.fromkeys([self.bad, *self.others], raw))
        elif not reply.has_error():
            reply.content = false(reply.content, self.behaviour)
        return [reply]


def stage_of(message: Message) -> str:
    """Return the stage of a run that a message to a client belongs to."""
    if message.metadata.message_type != MessageType.TRAIN:
        return message.metadata.message_type
    config = message.content.config_records.get("config", {})
    named = {NAMES: "layout", COLLECT: "collect", "handshake": "handshake"}
    return next((stage for name, stage in named.items() if config.get(name)), "train")


def false(content: RecordDict, behaviour: str) -> RecordDict:
    """Return a reply of which every number is another: the opposite, or huge."""
    arrays, metrics = {}, {}
    for name, array in next(iter(content.array_records.values()), {}).items():
        honest = array.numpy()
        with np.errstate(over="ignore"):
            if behaviour == LIES:
                made = -3 * honest if honest.dtype.kind == "f" else honest + 1
            else:
                made = np.full_like(honest, 1e30 if honest.dtype.kind == "f" else 100)
        arrays[name] = Array(made)
    for name, value in next(iter(content.metric_records.values()), {}).items():
        lie: Any = value
        if name == "num-examples":
            lie = value if behaviour == LIES else 2**53
        elif isinstance(value, float):
            lie = (0.0 if name.endswith("-0") else 10.0) if behaviour == LIES else 1e300
        metrics[name] = lie
    made_of: dict[str, Any] = dict(content.config_records)
    if content.array_records:
        made_of |= {next(iter(content.array_records)): ArrayRecord(arrays)}
    if content.metric_records:
        made_of |= {next(iter(content.metric_records)): MetricRecord(metrics)}
    return RecordDict(made_of)
