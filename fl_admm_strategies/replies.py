"""Replies as they arrive, checked: nothing that comes from a client is believed before."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from .blocks import Spec
from .checks import listing
from .wire import ClientReply, RawReply, Reply, brief

_MOST_EXAMPLES = 2**53  # beyond it a float does not tell two counts apart


def sort_out(
    replies: Iterable[ClientReply],
    asked: Collection[int],
    spec: Spec | None,
    *,
    weighted_by_key: str,
) -> tuple[dict[int, Reply], dict[int, str], list[tuple[str, str]]]:
    """Check the replies of a phase.

    Two replies of one client are both refused: which came first is chance, and the result of a
    round must not depend on chance.

    Parameters
    ----------
    replies : iterable of ClientReply
        In any order.
    asked : collection of int
        The clients that should reply.
    spec : Spec or None
        The arrays that every reply must hold; None: those of an evaluation hold none.
    weighted_by_key : str
        The metric that is the number of examples.

    Returns
    -------
    accepted : dict of int to Reply
        The usable replies by client, in the order of the ids.
    refused : dict of int to str
        Why each of the others has none, in the order of the ids.
    strangers : list of (str, str)
        Who else replied, and why that is not used.
    """
    accepted: dict[int, Reply] = {}
    refused: dict[int, str] = {}
    strangers: list[tuple[str, str]] = []
    answered: set[int] = set()
    for client, raw in replies:
        if client is None or client not in asked:
            who = "somebody who is no client" if client is None else f"client {client}"
            strangers.append((who, raw.error or "it was not asked in this round"))
        elif client in answered:
            accepted.pop(client, None)
            refused[client] = "it replied more than once"
        else:
            answered.add(client)
            try:
                accepted[client] = check_reply(raw, spec, weighted_by_key)
            except ValueError as error:
                refused[client] = str(error)
    refused |= {c: "no reply within the timeout" for c in asked if c not in answered}
    return dict(sorted(accepted.items())), dict(sorted(refused.items())), strangers


def check_reply(raw: RawReply, spec: Spec | None, weighted_by_key: str) -> Reply:
    """Return one client's reply, checked.

    Raises
    ------
    ValueError
        If it cannot be used; the message says why, for a line in the log.
    """
    if raw.error is not None:
        raise ValueError(f"it failed: {raw.error}")
    metrics: dict[str, float] = {
        key: value
        for key, value in raw.metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    for key, value in metrics.items():  # 64 bits is what Flower's own messages hold
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"the metric {brief(repr(key))} has more than 64 bits")
    num_examples = metrics.get(weighted_by_key)
    if num_examples is None:
        raise ValueError(f"its metrics lack the number '{weighted_by_key}'")
    if spec is None and num_examples == 0:
        return Reply({}, 0.0, {})
    if not 0 < num_examples <= _MOST_EXAMPLES:
        raise ValueError(
            f"'{weighted_by_key}' is {num_examples}, expected more than 0 and at most 2^53"
        )
    if spec is None:
        return Reply({}, float(num_examples), metrics)
    arrays = raw.arrays or {}
    if arrays.keys() != spec.keys():
        missing = [name for name in spec if name not in arrays]
        strange = [name for name in arrays if name not in spec]
        faults = [f"lack {listing(missing)}"] * bool(missing)
        faults += [f"have {listing(strange)}, which was not asked for"] * bool(strange)
        raise ValueError(f"its arrays {' and '.join(faults)}")
    for name, (shape, dtype) in spec.items():
        array = arrays[name]
        if array.shape != shape:
            raise ValueError(f"'{name}' has shape {array.shape}, expected {shape}")
        if array.dtype != dtype:
            raise ValueError(f"'{name}' has dtype {array.dtype}, expected {dtype}")
        if not np.isfinite(array).all():
            raise ValueError(f"'{name}' holds NaN or infinity")
    return Reply({name: arrays[name] for name in spec}, float(num_examples), metrics)


def weighted_means(replies: Mapping[int, Reply]) -> dict[str, float]:
    """Return the example-weighted mean of every metric that all replies have.

    Beside an infinite metric (a client that diverged) it is NaN or infinite too.
    """
    common = set.intersection(*(set(reply.metrics) for reply in replies.values()))
    weights = [reply.num_examples for reply in replies.values()]
    names = [name for name in next(iter(replies.values())).metrics if name in common]
    return {
        name: _sum(
            weight * reply.metrics[name]
            for weight, reply in zip(weights, replies.values(), strict=True)
        )
        / math.fsum(weights)
        for name in names
    }


def _sum(terms: Iterable[float]) -> float:
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):  # too large, or infinity minus infinity
        return math.nan
