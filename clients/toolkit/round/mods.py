"""Flower's mods around one client: each sees a message of FedAvg's layout, for that client alone.

A method may send several groups of arrays, and a node gets one message for all that it hosts;
Flower's own mods understand neither. So a mod is shown the floating point arrays of the first
group, which is what an upload is compared with, under the names of the upload. The rest goes past.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.clientapp.typing import Mod

from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.runtime.messages import records as wire
from fl_admm_strategies.runtime.messages.packing import (
    pack_instructions,
    pack_replies,
    unpack_instructions,
    unpack_replies,
)
from fl_admm_strategies.runtime.messages.records import (
    ALTERED,
    ClientInstruction,
    RawReply,
    groups_setting,
)
from fl_admm_strategies.runtime.trust.layout import NAMES

Run = Callable[[ClientInstruction], RawReply]

CLIPPING_NORM = "clipping_norm"
"""The setting by which Flower's client-side wrappers ask clients to clip."""


class ModRefusedError(ValueError):
    """A mod refused a message, or a message asks for a mod that is not there."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason} [{wire.MOD_REFUSED}]")


def mods_for(instruction: ClientInstruction, trains: bool, mods: Sequence[Mod]) -> Sequence[Mod]:
    """Return the mods that a message passes.

    Handshakes, requests for a personal model and instructions to upload nothing pass no mods, nor
    do evaluations pass Flower's mods for uploads.

    Raises
    ------
    ModRefusedError
        If the server asks for clipping and there is no mod, or for arrays that no mod clips.
    """
    config, names = instruction.config, instruction.upload_names()
    if config.get("handshake") or config.get(wire.COLLECT):
        if names and NAMES not in config and any(map(_is_for_uploads, mods)):
            raise ModRefusedError(
                f"Before round 1 the method asks for {', '.join(names)}, which is made of the "
                "client's data, and no mod clips it or adds noise. Take a method that asks for no "
                "arrays, or leave the mod out (docs/composition.md)."
            )
        return []
    if not trains:
        return [mod for mod in mods if not _is_for_uploads(mod)]
    if not mods and CLIPPING_NORM in config:
        raise ModRefusedError(
            f"The server asks for uploads clipped to {config[CLIPPING_NORM]!r}, and this "
            "client has no mod that does it. Give client_app, or answer, "
            "mods=[fixedclipping_mod], or mods=[adaptiveclipping_mod] where the strategy is "
            "wrapped for that."
        )
    return mods if names else []


def through(
    mods: Sequence[Mod],
    message: Message,
    context: Context,
    instruction: ClientInstruction,
    run: Run,
) -> RawReply:
    """Have a client do what it is asked, through mods, of which the first is the outermost.

    Parameters
    ----------
    mods : sequence of callable
        ``mod(message, context, call_next)``, as Flower's.
    message : Message
        The node's.
    context : Context
        The client's.
    instruction : ClientInstruction
        What this client is asked.
    run : callable
        Has the client do it.

    Raises
    ------
    ModRefusedError
        If a mod refuses the message or the reply.
    """
    config, groups = instruction.config, instruction.groups
    first, received = next(iter(groups.items()))
    names = instruction.upload_names()
    if len(names) != len(received):
        names = list(received)
    shown = _floating(dict(zip(names, received.values(), strict=True)))
    uploaded: Arrays = {}  # before the mods

    def innermost(asked: Message, _: Context) -> Message:
        (seen,) = dict(unpack_instructions(asked.content)).values()
        found = next(iter(seen.groups.values()))
        arrays = [found.get(n, a) for n, a in zip(names, received.values(), strict=True)]
        whole = {**groups, first: dict(zip(received, arrays, strict=True))}
        reply = run(ClientInstruction(whole, {**seen.config, wire.GROUPS: groups_setting(groups)}))
        uploaded.update(reply.arrays or {})
        to_show = None if reply.arrays is None else _floating(reply.arrays)
        return Message(pack_replies({None: RawReply(to_show, reply.metrics)}), reply_to=asked)

    call = innermost
    for mod in reversed(mods):
        call = partial(_call, mod, call)
    seen = ClientInstruction(
        {first: shown}, {**config, wire.GROUPS: groups_setting({first: shown})}
    )
    outermost = copy(message)
    outermost.content = pack_instructions({0: seen}, hosted=False)
    answer = call(outermost, context)
    if answer.has_error():
        raise ModRefusedError(
            f"A mod refused the message: {answer.error.reason} Of what was received a mod sees "
            f"{', '.join(shown)}. docs/composition.md says which methods go with which mods."
        )
    (replied,) = dict(unpack_replies(answer.content)).values()
    if replied.error is not None:
        raise ModRefusedError(f"A mod has made something else of the reply: {replied.error}.")
    if replied.arrays is None:
        return replied
    arrays = uploaded | replied.arrays
    if any(not np.array_equal(arrays[name], array) for name, array in uploaded.items()):
        replied.metrics[ALTERED] = 1
    return RawReply(arrays, replied.metrics)


def _call(mod: Mod, call_next: Callable[[Message, Context], Message], *given: object) -> Message:
    message, context = given
    return mod(message, context, call_next)  # type: ignore[arg-type]


def _floating(arrays: Arrays) -> Arrays:
    return {name: array for name, array in arrays.items() if array.dtype.kind == "f"}


def _is_for_uploads(mod: Mod) -> bool:
    """Return whether a mod is one of Flower's that need an upload."""
    return isinstance(mod, LocalDpMod) or mod in (fixedclipping_mod, adaptiveclipping_mod)
