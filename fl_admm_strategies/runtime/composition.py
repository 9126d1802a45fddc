"""What stands around a strategy: other strategies that wrap it, and hooks of a user's subclass.

Either gets the global model of every round and may return another one, with noise added for
example. `Run.adopt` makes that the method's own. A combination that cannot mean what it says is
refused before round 1; docs/composition.md has the table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from .algorithm import Algorithm

_CLIPPING = "DifferentialPrivacy"
_ON_SERVER = ("ServerSideFixedClipping", "ServerSideAdaptiveClipping")
_ON_CLIENT = (
    "DifferentialPrivacyClientSideFixedClipping and client_app(..., mods=[fixedclipping_mod])"
)


def strategies_around(strategy: Any, kind: type) -> list[Any]:
    """Return the strategies of a kind through which a method of another one was called.

    Flower's wrappers call the strategy inside from a method of the same name, and say nothing of
    themselves: the frames of the calls are where they can be seen before they have done anything.
    """
    frame: FrameType | None = sys._getframe(1)
    found: dict[int, Any] = {}
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, kind) and caller is not strategy:
            found[id(caller)] = caller
        frame = frame.f_back
    return list(found.values())


def why_not_another_model(strategy: Algorithm) -> str:
    """Return why nothing can be put in the place of the global model; empty where it can."""
    if not strategy.upload.goes_with("another model"):
        return strategy.upload.because()
    if "global" not in strategy.kinds or not hasattr(strategy.state, "model"):
        return "it has no one model that its clients train (docs/composition.md)"
    return ""


def check_wrappers(
    strategy: Algorithm, wrappers: Sequence[Any], names: Sequence[str], *, packed: bool
) -> None:
    """Refuse wrappers that a method cannot work in, or that would compare what differs.

    Parameters
    ----------
    strategy : Algorithm
        Its run has begun.
    wrappers : sequence of Strategy
    names : sequence of str
        Of the initial arrays, as they travel where they do.
    packed : bool
        Whether a node hosts several clients.

    Raises
    ------
    ValueError
        If the method is no mean of models, a message holds several clients' uploads, or an upload
        is not the whole model.
    """
    name, spec = type(strategy).__name__, strategy.upload_spec()
    for wrapper in wrappers:
        around = type(wrapper).__name__
        if reason := why_not_another_model(strategy):
            advice = ""
            if strategy.upload.goes_with("mods"):
                advice = "; for privacy give its clients mods=[LocalDpMod(...)]"
            raise ValueError(
                f"{around} is around {name}, whose global model it could not change: {reason}. Run "
                f"{name} itself, as strategy.start(...){advice}."
            )
        if _is(wrapper, _CLIPPING) and getattr(strategy, "everyone_trains", False):
            raise ValueError(
                f"{around} is around {name}, in which all clients train and only those that are "
                "drawn upload: it takes every reply for an upload. Give "
                f"{name}(everyone_trains=False)."
            )
        on_server = _is(wrapper, *_ON_SERVER)
        if packed and _is(wrapper, _CLIPPING):
            raise ValueError(
                f"{around} takes every message for one client, and here a node sends one message "
                "for all that it hosts. Run one client on each node."
            )
        if on_server and list(spec) != list(names):
            raise ValueError(
                f"{around} compares every upload with the whole model, and {name}'s clients upload "
                f"{len(spec)} of its {len(names)} arrays. Use {_ON_CLIENT}."
            )
        counters = [key for key, (_, dtype) in spec.items() if dtype.kind != "f"]
        if on_server and counters:
            raise ValueError(
                f"{around} scales all arrays, and {counters[0]!r} holds integers. Use "
                f"{_ON_CLIENT}, or a model without it (GroupNorm in place of BatchNorm)."
            )


def _is(wrapper: Any, *parts: str) -> bool:
    """Return whether a wrapper is one of Flower's, of either API, by a part of its class's name."""
    names = [kind.__name__ for kind in type(wrapper).__mro__ if kind.__name__.startswith(_CLIPPING)]
    return any(part in name for name in names for part in parts)
