"""Flower's mods around one client.

They see the message of a training or an evaluation as it travels: FedAvg's layout where a method
sends one group of arrays. Flower's own mods refuse others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from flwr.app import Context, Message
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.clientapp.typing import Mod

from fl_admm_strategies.runtime.messages import records as wire
from fl_admm_strategies.runtime.messages.records import ALTERED, ARRAYS, METRICS, ClientInstruction
from fl_admm_strategies.runtime.trust.layout import NAMES

Answer = Callable[[Message, Context], Message]

CLIPPING_NORM = "clipping_norm"
"""The setting by which Flower's client-side wrappers ask clients to clip."""


def mods_for(instruction: ClientInstruction, trains: bool, mods: Sequence[Mod]) -> Sequence[Mod]:
    """Return the mods that a message passes.

    Handshakes, requests for a personal model and instructions to upload nothing pass no mods, nor
    do evaluations pass Flower's mods for uploads.

    Raises
    ------
    ValueError
        If the server asks for clipping and there is no mod, or for arrays that no mod clips.
    """
    config, names = instruction.config, instruction.upload_names()
    if config.get("handshake") or config.get(wire.COLLECT):
        if names and NAMES not in config and any(map(_is_for_uploads, mods)):
            raise ValueError(
                f"Before round 1 the method asks for {', '.join(names)}, which is made of the "
                "client's data, and no mod clips it or adds noise. Take a method that asks for no "
                "arrays, or leave the mod out (docs/composition.md)."
            )
        return []
    if not trains:
        return [mod for mod in mods if not _is_for_uploads(mod)]
    if not mods and CLIPPING_NORM in config:
        raise ValueError(
            f"The server asks for uploads clipped to {config[CLIPPING_NORM]!r}, and this "
            "client has no mod that does it. Give client_app, or answer, "
            "mods=[fixedclipping_mod], or mods=[adaptiveclipping_mod] where the strategy is "
            "wrapped for that."
        )
    return mods if names else []


def through(mods: Sequence[Mod], message: Message, context: Context, answer: Answer) -> Message:
    """Have a message answered through mods, of which the first is the outermost.

    Raises
    ------
    ValueError
        If a mod refuses the message or the reply.
    """
    uploaded: dict[str, bytes] = {}

    def innermost(asked: Message, of: Context) -> Message:
        reply = answer(asked, of)
        uploaded.update(_bytes_of(reply))
        return reply

    call: Answer = innermost
    for mod in reversed(mods):
        call = partial(_call, mod, call)
    reply = call(message, context)
    if reply.has_error():
        raise ValueError(
            f"A mod refused the message: {reply.error.reason} Flower's mods take messages with one "
            "group of arrays. docs/composition.md says which methods go with which mods."
        )
    if _bytes_of(reply) != uploaded:
        reply.content.metric_records[METRICS][ALTERED] = 1
    return reply


def _call(mod: Mod, call_next: Answer, message: Message, context: Context) -> Message:
    return mod(message, context, call_next)


def _bytes_of(reply: Message) -> dict[str, bytes]:
    records = {} if reply.has_error() else reply.content.array_records
    return {name: array.data for name, array in records.get(ARRAYS, {}).items()}


def _is_for_uploads(mod: Mod) -> bool:
    """Return whether a mod is one of Flower's that need an upload."""
    return isinstance(mod, LocalDpMod) or mod in (fixedclipping_mod, adaptiveclipping_mod)
