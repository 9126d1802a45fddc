"""Means of what clients report, in which one client's word counts for no more than its share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from statistics import median_low

import numpy as np

from ..messages.records import NUM_EXAMPLES, Metrics, Reply

MOST = 10.0
"""Times the median number of examples: so many a client has in a mean of metrics, at most."""

REPORTED = "-clients"
"""After a metric's name: how many clients reported it, where not all did."""


def most_examples(known: Collection[float]) -> float:
    """Return how many examples a client counts for where models are weighted by them, at most.

    `MOST` times the median of what clients report. Of two reports none can be told to be false.
    """
    return MOST * median_low(known) if len(known) > 2 else math.inf


def weighted_means(replies: Mapping[int, Reply]) -> Metrics:
    """Return the mean of every metric over the clients that report it as a finite number.

    It is weighted by examples; a client has at most `MOST` times the median. A metric that not all
    clients report has their number beside it, ``NAME-clients``. A metric without a finite number is
    NaN. A metric of a single client of several, or of less than a tenth, has no mean, and neither
    have the numbers of examples.
    """
    most = MOST * median_low([reply.num_examples for reply in replies.values()])
    means: Metrics = {}
    known = Counter(name for reply in replies.values() for name in reply.metrics)
    del known[NUM_EXAMPLES]
    for name, count in known.items():
        if count < min(len(replies), max(2, len(replies) / 10)):
            continue
        found = [
            (value, min(reply.num_examples, most))
            for reply in replies.values()
            if math.isfinite(value := reply.metrics.get(name, math.nan))
        ]
        values, weights = np.array(found).reshape(-1, 2).T
        with np.errstate(over="ignore", invalid="ignore"):  # numbers near the largest there is
            means[name] = float(np.average(values, weights=weights)) if found else math.nan
        if len(found) < len(replies):
            means[f"{name}{REPORTED}"] = len(found)
    return means


def without_extremes(clients: Mapping[int, Metrics]) -> dict[int, Metrics]:
    """Return what clients report, held within what most of them do.

    Of each metric the largest tenth of the values, at least one, is set to the next smaller one,
    and the smallest likewise; of fewer than three nothing is. So no mean leaves the range of what
    the others report, whatever one client says, its number of examples included.
    """
    held = {client: dict(metrics) for client, metrics in clients.items()}
    for name in dict.fromkeys(name for metrics in clients.values() for name in metrics):
        found = [m[name] for m in clients.values() if math.isfinite(m.get(name, math.nan))]
        if len(found) < 3:
            continue
        found.sort()
        cut = max(1, len(found) // 10)
        low, high = found[cut], found[-1 - cut]
        for metrics in held.values():
            if math.isfinite(metrics.get(name, math.nan)):
                metrics[name] = min(max(metrics[name], low), high)
    return held
