"""What travels between a strategy and the clients of one node.

A node may host one client or many. With one, a message has the layout of Flower's own `FedAvg`:
an `ArrayRecord` under ``"arrays"`` and a `ConfigRecord` under ``"config"``; the reply has
``"arrays"`` and ``"metrics"``. With several hosted clients each record's key ends in ``@ID``, the
id of the client it belongs to, and a client that failed replies with a `ConfigRecord` under
``"error@ID"``, so that it fails alone.

A client may need more than one set of arrays (an anchor and a starting point; a personal and a
cluster model to evaluate). The first group is the one under ``"arrays"``, any further group stands
under ``"arrays.GROUP"``, and ``config["groups"]`` lists them in order with their number of arrays,
e.g. ``"anchor:2,start:2"``. A `NumPyClient` receives the groups concatenated, in that order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
ERROR = "error"
NUM_EXAMPLES = "num-examples"
CLIENT_ID = "client-id"
CLIENT_IDS = "client-ids"
NUM_CLIENTS = "num-clients"
STATE_LOST = "state-lost"
"""In the error of a client that does not hold what the server takes it to hold, before its id."""

_VERSIONS = "Server and client must use the same version of fl-admm-strategies."
_LONGEST_REASON = 500  # characters of somebody else's text in our log

Scalar = bool | bytes | float | int | str
Arrays = dict[str, NDArray[Any]]
"""Named arrays of one model, in the order of the model's ``state_dict``."""


@dataclass(frozen=True)
class Order:
    """What one client is asked to do in one phase of a round.

    Attributes
    ----------
    groups : dict of str to Arrays
        Named sets of arrays; the first is the one a plain FedAvg client reads.
    config : dict of str to Scalar
        Settings for this client in this round.
    """

    groups: dict[str, Arrays]
    config: dict[str, Scalar] = field(default_factory=dict)

    def full_config(self) -> dict[str, Scalar]:
        """Return the settings with the list of groups added."""
        groups = ",".join(f"{name}:{len(arrays)}" for name, arrays in self.groups.items())
        return {**self.config, "groups": groups}

    def flat(self) -> list[NDArray[Any]]:
        """Return the arrays of all groups as one list, as a `NumPyClient` receives them."""
        return [array for arrays in self.groups.values() for array in arrays.values()]


@dataclass(frozen=True)
class RawReply:
    """One client's reply as it arrived: nothing about it has been checked.

    Attributes
    ----------
    arrays : Arrays or None
        None where the phase has no arrays (evaluation).
    metrics : dict of str to Any
        Includes the number of examples.
    error : str or None
        Why the client has no result; then the other fields are empty.
    """

    arrays: Arrays | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


ClientReply = tuple[int | None, RawReply]
"""Who replied, None for somebody who is no client of the run, and what."""


@dataclass(frozen=True)
class Reply:
    """One client's reply after it was checked.

    Attributes
    ----------
    arrays : Arrays
        The uploaded arrays, in the order of the model; empty in an evaluation.
    num_examples : float
        Number of examples, more than 0.
    metrics : dict of str to float
        Every number the client reported.
    """

    arrays: Arrays
    num_examples: float
    metrics: dict[str, float]


def who_lost(error: str) -> int | None:
    """Return which client says in an error that it lost what it keeps; None for another error."""
    found = re.search(rf"\[{STATE_LOST} ([0-9]{{1,20}})\]", error)
    return None if found is None else int(found[1])


def _key(record: str, client: int | None) -> str:
    return record if client is None else f"{record}@{client}"


def pack_orders(orders: Mapping[int, Order], *, hosted: bool) -> RecordDict:
    """Put the orders of one node's clients into the content of one message.

    Parameters
    ----------
    orders : mapping of client id to Order
        With ``hosted=False`` exactly one.
    hosted : bool
        Whether the node hosts several clients, so that the keys carry the client's id.
    """
    content = RecordDict()
    for client_id, order in orders.items():
        client = client_id if hosted else None
        for position, (group, arrays) in enumerate(order.groups.items()):
            record = ARRAYS if position == 0 else f"{ARRAYS}.{group}"
            content[_key(record, client)] = to_array_record(arrays)
        content[_key(CONFIG, client)] = ConfigRecord(dict(order.full_config()))
    return content


def unpack_orders(content: RecordDict) -> Iterator[tuple[int | None, Order]]:
    """Yield the orders of a message as (client id, order); the id is None for a single client.

    Raises
    ------
    ValueError
        If the message is not one of this library's or of `FedAvg`'s layout.
    """
    for key, record in content.items():
        name, at, suffix = key.partition("@")
        if name != CONFIG or not isinstance(record, ConfigRecord):
            continue
        if at and not (suffix.isascii() and suffix.isdigit()):
            raise ValueError(f"The message holds {key!r}, expected 'config@ID'. {_VERSIONS}")
        client = int(suffix) if at else None
        config: dict[str, Any] = dict(record)
        groups: dict[str, Arrays] = {}
        for position, (group, _) in enumerate(parse_groups(config)):
            wanted = _key(ARRAYS if position == 0 else f"{ARRAYS}.{group}", client)
            arrays = content.get(wanted)
            if not isinstance(arrays, ArrayRecord):
                raise ValueError(f"The message lacks the ArrayRecord {wanted!r}. {_VERSIONS}")
            groups[group] = from_array_record(arrays)
        yield client, Order(groups, config)


def pack_replies(replies: Mapping[int | None, RawReply]) -> RecordDict:
    """Put the replies of one node's clients into the content of one message."""
    content = RecordDict()
    for client, reply in replies.items():
        if reply.error is not None:
            content[_key(ERROR, client)] = ConfigRecord({"reason": reply.error})
            continue
        if reply.arrays is not None:
            content[_key(ARRAYS, client)] = to_array_record(reply.arrays)
        content[_key(METRICS, client)] = MetricRecord(reply.metrics)
    return content


def unpack_replies(content: RecordDict) -> Iterator[tuple[str | None, RawReply]]:
    """Yield the replies of a message as (client id as it was written, reply).

    The sender is not trusted: the ids are returned as text, and whatever cannot be read becomes a
    reply with an error. A client's own choice of record names is accepted where there is no doubt
    (one `ArrayRecord`, one `MetricRecord`), as `FedAvg` does.
    """
    by_client: dict[str, dict[str, Any]] = {} if len(content) else {"": {}}
    for key, value in content.items():
        name, _, suffix = key.partition("@")
        by_client.setdefault(suffix, {})[name] = value
    for suffix, own in by_client.items():
        client = suffix or None
        if isinstance(error := own.get(ERROR), ConfigRecord):
            yield client, RawReply(error=brief(str(error.get("reason", "no reason given"))))
            continue
        array_records = [value for value in own.values() if isinstance(value, ArrayRecord)]
        metric_records = [value for value in own.values() if isinstance(value, MetricRecord)]
        if len(array_records) > 1 or len(metric_records) != 1:
            yield (
                client,
                RawReply(
                    error=f"the reply holds {len(array_records)} ArrayRecords and "
                    f"{len(metric_records)} MetricRecords, expected one of each"
                ),
            )
            continue
        try:
            arrays = from_array_record(array_records[0]) if array_records else None
        except ValueError as unreadable:
            yield client, RawReply(error=str(unreadable))
            continue
        yield client, RawReply(arrays, dict(metric_records[0]))


def parse_groups(config: Mapping[str, Any]) -> list[tuple[str, int | None]]:
    """Read ``config["groups"]``; a message without it (a plain FedAvg server) has one group."""
    text = config.get("groups")
    if text is None:
        return [("arrays", None)]
    pairs = [item.rpartition(":") for item in str(text).split(",")]
    names, counts = [name for name, _, _ in pairs], [count for _, _, count in pairs]
    if len(set(names)) < len(names) or not all(re.fullmatch("[0-9]{1,9}", c) for c in counts):
        raise ValueError(
            f"The message's groups are {brief(repr(text))}, expected different names with their "
            f"numbers of arrays, e.g. 'anchor:2,start:2'. {_VERSIONS}"
        )
    return [(name, int(count)) for name, count in zip(names, counts, strict=True)]


def split_groups(
    parameters: Sequence[NDArray[Any]], config: Mapping[str, Any]
) -> dict[str, list[NDArray[Any]]]:
    """Cut the list that a `NumPyClient` received into its groups.

    Raises
    ------
    ValueError
        If ``config["groups"]`` cannot be read, or the list is not as long as it says.
    """
    groups: dict[str, list[NDArray[Any]]] = {}
    start = 0
    for name, count in parse_groups(config):
        stop = len(parameters) if count is None else start + count
        groups[name] = list(parameters[start:stop])
        start = stop
    if start != len(parameters):
        raise ValueError(
            f"The server announced {config.get('groups')!r} but sent {len(parameters)} arrays. "
            f"{_VERSIONS}"
        )
    return groups


def to_array_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return named numpy arrays as an `ArrayRecord`."""
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def from_array_record(record: ArrayRecord) -> Arrays:
    """Return an `ArrayRecord` as named numpy arrays.

    Raises
    ------
    ValueError
        If an array's bytes are not one plain numpy array. Pickled objects are never loaded.
    """
    return {name: read_array(name, array.numpy) for name, array in record.items()}


def read_array(name: str, read: Callable[[], Any]) -> NDArray[Any]:
    """Return what `read` decodes from the bytes of a stranger.

    Raises
    ------
    ValueError
        If it is not one plain numpy array.
    """
    try:
        array = read()
    except Exception as error:  # numpy may raise anything
        reason = brief(f"{type(error).__name__}: {error}")
    else:
        if isinstance(array, np.ndarray):
            return array
        reason = f"they are a {type(array).__name__}"  # np.load takes archives too
    raise ValueError(f"the bytes of array {brief(repr(name))} cannot be read: {reason}")


def brief(text: str) -> str:
    """Return somebody else's text as one line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}..."
