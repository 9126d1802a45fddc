"""Which method made a message: the stamp that instructions and replies carry.

It is a number among the settings or metrics, ``{"made-by.FPFC": 1}``. Numbers travel under both of
Flower's APIs and in every kind of client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .records import ARRAYS, brief, parse_groups

_PREFIX = "made-by."


def made_by(method: str) -> dict[str, int]:
    """Return the stamp of a method, which a client of one's own puts among its metrics.

    A strategy refuses every reply, of training and of evaluation, that does not have it.

    Parameters
    ----------
    method : str
        The strategy's `method`, e.g. ``FPFC.method``, which is "FPFC".

    Examples
    --------
    >>> metrics = {"loss": 0.3, **made_by("FPFC")}
    """
    return {f"{_PREFIX}{method}": 1}


def is_stamp(name: str) -> bool:
    """Return whether a setting or metric says who made the message."""
    return name.startswith(_PREFIX)


def makers_of(record: Mapping[str, Any]) -> list[str]:
    """Return the methods that a message's settings or metrics name."""
    return sorted(name.removeprefix(_PREFIX) for name in record if is_stamp(name))


def declared_method(strategy: type) -> str | None:
    """Return the `method` of a strategy's class; raise TypeError if it does not say one."""
    try:
        method: str | None = strategy.method  # type: ignore[attr-defined]
    except AttributeError:
        name = strategy.__name__
        raise TypeError(
            f"{name} does not say which clients it is for. Give the class method = {name!r} and "
            f"let its clients stamp their replies with made_by({name!r}), or method = None, if any "
            "client that was written for FedAvg will do."
        ) from None
    return method


def client_of(method: str) -> str:
    """Return the name of a method's client class."""
    return f"{method}Client"


def check_reply_maker(metrics: Mapping[str, Any], method: str | None) -> None:
    """Check that a reply is one that a strategy can use.

    Parameters
    ----------
    metrics : mapping
        The reply's.
    method : str or None
        The strategy's; None: any client's reply will do.

    Raises
    ------
    ValueError
        If it is not; the message says which client is expected, and what to change.
    """
    found = makers_of(metrics)
    if method is None or method in found:
        return
    if found:
        others = brief(" and ".join(found))
        raise ValueError(
            f"its reply was made by a client of {others}, expected {client_of(method)}: use "
            f"{client_of(method)} for the clients, or the strategy {others}."
        )
    raise ValueError(
        "its reply does not say which method made it, like those of a plain client of FedAvg, "
        f"which ignores what {method} asks for; expected {client_of(method)}. Use that for the "
        f"clients; a client of your own for {method} adds made_by({method!r}) to the metrics "
        "of every reply."
    )


def check_instruction_maker(config: Mapping[str, Any], client: str, strategy: Any) -> None:
    """Check that an instruction is one that a client can follow.

    Parameters
    ----------
    config : mapping
        The settings that came with it.
    client : str
        The client's class.
    strategy : type
        The class of its strategy.

    Raises
    ------
    ValueError
        If it is not; the message says which strategy the client belongs to.
    """
    method, name = getattr(strategy, "method", None), strategy.__name__
    found = makers_of(config)
    if method in found:
        return
    if found:
        raise ValueError(
            f"{client} is the client of the strategy {name}, but the message is from "
            f"{' and '.join(found)}: use {' or '.join(map(client_of, found))} for the clients, or "
            f"{name} for the strategy."
        )
    if method is not None and ARRAYS in (parse_groups(config) or [ARRAYS]):  # as FedAvg has it
        raise ValueError(
            f"{client} is the client of the strategy {name}, but the message is from another, "
            f"such as Flower's FedAvg: use {name} for the strategy, or SGDClient (or a client of "
            "your own) for the clients of FedAvg."
        )
