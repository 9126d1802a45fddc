"""Means of what clients report, in which one client's word counts for no more than its share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from statistics import median_low

from ..messages.records import NUM_EXAMPLES, Metrics, Reply

MOST = 10.0
"""Times the median number of examples: so many a client has in a mean of metrics, at most."""

FAR = 100.0
"""Times the median: a client is refused that reports more of what everybody's step goes by."""

REPORTED = "-clients"
"""After a metric's name: how many clients reported it, where not all did."""


def most_examples(known: Collection[float]) -> float:
    """Return how many examples a client counts for where models are weighted by them, at most.

    `MOST` times the median of what clients report. Of two nobody can tell which is the liar.
    """
    return MOST * median_low(known) if len(known) > 2 else math.inf


def largest_reported(known: Iterable[float]) -> float:
    """Return the largest number that a client may report of what everybody's step goes by.

    `FAR` times the median of what clients report that is above 0; of an even number the
    smaller of both medians.
    """
    usable = [value for value in known if 0 < value < math.inf]
    return FAR * median_low(usable) if usable else math.inf


def too_large(what: str, value: float) -> str:
    """Return why a client is refused whose number is above `largest_reported`."""
    return (
        f"it reported the {what} {value:.3g}, more than {FAR:g} times the median of all, "
        "and everybody's step goes by it"
    )


def those_too_large(what: str, said: Mapping[int, float]) -> dict[int, str]:
    """Return which clients report a number above `largest_reported`, and why they are refused."""
    most = largest_reported(said.values())
    return {client: too_large(what, value) for client, value in said.items() if value > most}


def weighted_means(replies: Mapping[int, Reply]) -> Metrics:
    """Return the mean of every metric over the clients that report it as a finite number.

    It is weighted by examples, of which nobody has more than `MOST` times the median. A metric that
    not all report has beside it how many do, ``NAME-clients``. One that nobody reports as a finite
    number is NaN. What a single client of several, or less than a tenth, has ever heard of is its
    own and no mean, and the numbers of examples have none.
    """
    most = MOST * median_low([reply.num_examples for reply in replies.values()])
    weights = {client: min(reply.num_examples, most) for client, reply in replies.items()}
    means: Metrics = {}
    known = Counter(name for reply in replies.values() for name in reply.metrics)
    del known[NUM_EXAMPLES]
    for name, count in known.items():
        if count < min(len(replies), max(2, len(replies) / 10)):
            continue
        found = {
            c: v for c, r in replies.items() if math.isfinite(v := r.metrics.get(name, math.nan))
        }
        means[name] = _mean([(weights[client], value) for client, value in found.items()])
        if len(found) < len(replies):
            means[f"{name}{REPORTED}"] = len(found)
    return means


def _mean(pairs: list[tuple[float, float]]) -> float:
    total = math.fsum(weight for weight, _ in pairs)
    if not total:
        return math.nan
    mean = _sum(weight * value for weight, value in pairs) / total
    # Numbers near the largest there is; as shares of the mean they can be summed up.
    return mean if math.isfinite(mean) else _sum(weight / total * value for weight, value in pairs)


def _sum(terms: Iterable[float]) -> float:
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):  # too large, or infinity minus infinity
        return math.nan


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
