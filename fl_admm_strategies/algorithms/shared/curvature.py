"""What FedGiA and FedMGS share: each client reports a curvature, and the steps of all go by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ...runtime.messages.records import Reply
from ...runtime.trust.means import largest_reported, those_too_large, too_large
from ...runtime.trust.validation import LARGEST


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
    if curvature > largest_reported(known):
        raise ValueError(too_large(name, curvature))
    return curvature


def too_large_curvatures(name: str, replies: Mapping[int, Reply]) -> dict[int, str]:
    """Return the clients with a curvature that would stop all the others, and why."""
    reported = {c: reply.metrics.get(name, math.nan) for c, reply in replies.items()}
    return those_too_large(name, reported)
