"""What FedGiA and FedMGS share: each client reports a curvature, and the steps of all go by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median_low

from ...runtime.messages.records import Reply
from ...runtime.trust.validation import LARGEST

FAR = 100.0
"""Times the median: a client is refused that reports more, since the steps of all go by it."""


def check_curvature(
    name: str, client_id: int, reply: Reply, known: Iterable[float], least: float = 0.0
) -> float:
    """Return the curvature in a reply's metric `name`.

    Raises
    ------
    ValueError
        If it is not from `least` to `LARGEST`, or far above the known ones.
    """
    curvature = reply.metrics.get(name, math.nan)
    if not least <= curvature <= LARGEST:
        raise ValueError(
            f"The {name} of client {client_id} is {curvature}, expected {least:g} to {LARGEST:g}. "
            "Do its data fit in size?"
        )
    if curvature > _largest_allowed(known):
        raise ValueError(_too_large(name, curvature))
    return curvature


def too_large_curvatures(name: str, replies: Mapping[int, Reply]) -> dict[int, str]:
    """Return the clients with a curvature that would stop all the others, and why."""
    reported = {c: reply.metrics.get(name, math.nan) for c, reply in replies.items()}
    most = _largest_allowed(reported.values())
    return {client: _too_large(name, value) for client, value in reported.items() if value > most}


def _largest_allowed(known: Iterable[float]) -> float:
    """Return `FAR` times the median of what is above 0; of an even number the smaller of both."""
    usable = [value for value in known if 0 < value < math.inf]
    return FAR * median_low(usable) if usable else math.inf


def _too_large(name: str, value: float) -> str:
    return (
        f"it reported the {name} {value:.3g}, more than {FAR:g} times the median of all, "
        "and everybody's step goes by it"
    )
