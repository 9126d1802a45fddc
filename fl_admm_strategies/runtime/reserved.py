"""Settings given twice: by the user for the clients, and by the strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_type_hints

from .algorithm import Algorithm
from .common.settings import parameters_of
from .messages.changes import CLIP, NOISE
from .messages.records import COLLECT, GROUPS, UPLOAD
from .messages.schema import Instruction, setting_names
from .messages.stamp import is_stamp
from .trust.layout import NAMES

OF_EVERY_MESSAGE = frozenset(
    {"server-round", "seed", "version", "run", "durable", "handshake"}
    | {CLIP, COLLECT, GROUPS, NAMES, NOISE, UPLOAD}
)
"""What the runtime tells every client, whatever the method."""


def check_user_settings(
    algorithm: Algorithm, train: Mapping[str, Any], evaluate: Mapping[str, Any]
) -> None:
    """Refuse settings for the clients that are the strategy's to give.

    Parameters
    ----------
    algorithm : Algorithm
        Its parameters, and the settings in the messages that its methods say they return.
    train, evaluate : mapping
        The user's ``train_config`` and ``evaluate_config``.

    Raises
    ------
    ValueError
        If one of them is given twice; the message says which to leave out.
    """
    name, parameters = type(algorithm).__name__, parameters_of(type(algorithm))
    for which, config, methods in (
        ("train_config", train, ("handshake", "train_instructions")),
        ("evaluate_config", evaluate, ("evaluate_instructions",)),
    ):
        sent = {key for method in methods for key in _sent_by(type(algorithm), method)}
        for key in config:
            parameter = key.replace("-", "_")
            if parameter in parameters:
                raise ValueError(
                    f"{which} has {key!r}, which is a parameter of {name}: leave it out of "
                    f"{which}, and give {name}({parameter}=...)."
                )
            if key in sent or key in OF_EVERY_MESSAGE or is_stamp(key):
                raise ValueError(
                    f"{which} has {key!r}, which {name} tells the clients itself: leave it out of "
                    f"{which}, or give it another name."
                )


def _sent_by(kind: type, method: str) -> Iterator[str]:
    """Yield the names of the settings in the messages of a method, by its annotation."""
    messages = [*_messages_in(get_type_hints(getattr(kind, method)).get("return"))]
    if method == "train_instructions":
        messages.append(getattr(kind, "message_type", Instruction))  # of a `OneMessageStrategy`
    for message in messages:
        yield from setting_names(message)


def _messages_in(annotation: Any) -> Iterator[type[Instruction]]:
    if isinstance(annotation, type) and issubclass(annotation, Instruction):
        yield annotation
    for part in get_args(annotation):
        yield from _messages_in(part)
