"""Functions of the user's that make one metric of the clients', as Flower's `FedAvg` takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, cast

from flwr.app import MetricRecord, RecordDict

from ..maths.checks import check_function
from .messages.records import ARRAYS, METRICS, NUM_EXAMPLES, Metrics, Reply, to_array_record

MetricsAggrFn = Annotated[Callable[[list[RecordDict], str], MetricRecord], check_function]
"""Gets the accepted replies' records, and the name of the number of examples in them."""


def aggregated_by(function: MetricsAggrFn, name: str, replies: Mapping[int, Reply]) -> Metrics:
    """Return what a user's function makes of the clients' metrics.

    Parameters
    ----------
    function : callable
    name : str
        Of the setting that it is, for an error.
    replies : mapping of int to Reply
        By client; a record has the metrics, and the upload where there is one. A client has no more
        examples in it than it counts for.

    Raises
    ------
    TypeError
        If it returns something else than a `MetricRecord`.
    """
    records = []
    for reply in replies.values():
        record = RecordDict({ARRAYS: to_array_record(reply.arrays)} if reply.arrays else {})
        record[METRICS] = MetricRecord({**reply.metrics, NUM_EXAMPLES: reply.num_examples})
        records.append(record)
    found = function(records, NUM_EXAMPLES)
    if not isinstance(found, MetricRecord):
        raise TypeError(
            f"{name} returned a {type(found).__name__}, expected a flwr.app.MetricRecord. Return "
            "MetricRecord({...})."
        )
    return cast(Metrics, dict(found))
