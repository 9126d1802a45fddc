"""What travels between a strategy and the clients of one node.

A node may host one client or many. With one, a message has the layout of Flower's own `FedAvg`:
an `ArrayRecord` under ``"arrays"`` and a `ConfigRecord` under ``"config"``; the reply has
``"arrays"`` and ``"metrics"``. With several hosted clients each record's key ends in ``@ID``, the
id of the client it belongs to, and a client that failed replies with a `ConfigRecord` under
``"error@ID"``, so that it fails alone.

A client may need more than one set of arrays (an anchor and a starting point; a personal and a
cluster model to evaluate). The first group is the one under ``"arrays"``, any further group stands
under ``"arrays.GROUP"``, and ``config["groups"]`` lists them in order with the names of their
arrays, as JSON: ``{"anchor": ["weight", "bias"], "start": ["weight"]}``. A `NumPyClient` receives
the groups concatenated, in that order. All lists of names travel as JSON, since a setting of
Flower's legacy API is one number or text and a name may hold any character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from ..maths.blocks import Arrays
from .interrupts import Interrupted

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
ERROR = "error"
GROUPS = "groups"
UPLOAD = "upload"
"""The setting that names the arrays to upload, where they are not those of the first group."""
NUM_EXAMPLES = "num-examples"
CLIENT_ID = "client-id"
CLIENT_IDS = "client-ids"
NUM_CLIENTS = "num-clients"
COLLECT = "collect"
"""The setting of a training message that asks for the client's personal model and nothing else."""
STATE_LOST = "state-lost"
"""In the error of a client that does not hold what the server takes it to hold, before its id."""

VERSIONS = "Server and client must use the same version of fl-admm-strategies."
_LONGEST_REASON = 500  # characters of somebody else's text in our log

Scalar = bool | bytes | float | int | str
Metrics = dict[str, float]


@dataclass(frozen=True)
class ClientInstruction:
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
        """Return the settings with the groups and the names of their arrays added."""
        groups = {name: list(arrays) for name, arrays in self.groups.items()}
        return {**self.config, GROUPS: to_json(groups)}

    def flat(self) -> list[NDArray[Any]]:
        """Return the arrays of all groups as one list, as a `NumPyClient` receives them."""
        return [array for arrays in self.groups.values() for array in arrays.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.flat())

    def upload_names(self) -> list[str]:
        """Return the names of the arrays to upload."""
        if (names := self.config.get(UPLOAD)) is not None:
            return read_names(UPLOAD, names)
        return list(next(iter(self.groups.values())))


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
        Why there is no result. Then there are no arrays, and metrics only if the client replied
        something that cannot be read.
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
    largest : float
        The largest absolute value in the arrays.
    """

    arrays: Arrays
    num_examples: float
    metrics: Metrics
    largest: float = 0.0


def to_json(value: Any) -> str:
    """Return lists and numbers as text, in the shortest form."""
    return json.dumps(value, separators=(",", ":"))


def read_names(setting: str, text: object) -> list[str]:
    """Read a list of names that travelled as JSON.

    Raises
    ------
    ValueError
        If it is none.
    """
    names = _parsed(text)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"The message's {setting} is {brief(repr(text))}, expected a JSON list of names. "
            f"{VERSIONS}"
        )
    return names


def _parsed(text: object) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None


def who_lost(error: str) -> int | None:
    """Return which client says in an error that it lost what it keeps; None for another error."""
    found = re.search(rf"\[{STATE_LOST} ([0-9]{{1,20}})\]", error)
    return None if found is None else int(found[1])


def _key(record: str, client: int | None) -> str:
    return record if client is None else f"{record}@{client}"


def pack_instructions(instructions: Mapping[int, ClientInstruction], *, hosted: bool) -> RecordDict:
    """Put the instructions of one node's clients into the content of one message.

    Parameters
    ----------
    instructions : mapping of client id to ClientInstruction
        With ``hosted=False`` exactly one.
    hosted : bool
        Whether the node hosts several clients, so that the keys carry the client's id.
    """
    content = RecordDict()
    for client_id, instruction in instructions.items():
        client = client_id if hosted else None
        for position, (group, arrays) in enumerate(instruction.groups.items()):
            record = ARRAYS if position == 0 else f"{ARRAYS}.{group}"
            content[_key(record, client)] = to_array_record(arrays)
        content[_key(CONFIG, client)] = ConfigRecord(dict(instruction.full_config()))
    return content


def unpack_instructions(content: RecordDict) -> Iterator[tuple[int | None, ClientInstruction]]:
    """Yield what a message asks for as (client id, instruction); a single client has no id.

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
            raise ValueError(f"The message holds {key!r}, expected 'config@ID'. {VERSIONS}")
        client = int(suffix) if at else None
        config: dict[str, Any] = dict(record)
        groups: dict[str, Arrays] = {}
        for position, group in enumerate(parse_groups(config) or {ARRAYS: None}):
            wanted = _key(ARRAYS if position == 0 else f"{ARRAYS}.{group}", client)
            arrays = content.get(wanted)
            if not isinstance(arrays, ArrayRecord):
                raise ValueError(f"The message lacks the ArrayRecord {wanted!r}. {VERSIONS}")
            groups[group] = from_array_record(arrays)
        yield client, ClientInstruction(groups, config)


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
        yield suffix or None, _read_reply(own)


def _read_reply(records: Mapping[str, Any]) -> RawReply:
    if isinstance(error := records.get(ERROR), ConfigRecord):
        return RawReply(error=brief(str(error.get("reason", "no reason given"))))
    array_records = [value for value in records.values() if isinstance(value, ArrayRecord)]
    metric_records = [value for value in records.values() if isinstance(value, MetricRecord)]
    if len(array_records) > 1 or len(metric_records) != 1:
        return RawReply(
            error=f"the reply holds {len(array_records)} ArrayRecords and {len(metric_records)} "
            "MetricRecords, expected one of each"
        )
    metrics = dict(metric_records[0])
    try:
        arrays = from_array_record(array_records[0]) if array_records else None
    except ValueError as unreadable:
        return RawReply(None, metrics, str(unreadable))
    return RawReply(arrays, metrics)


def parse_groups(config: Mapping[str, Any]) -> dict[str, list[str]] | None:
    """Read ``config["groups"]``; None for a message of a plain FedAvg server, which has none.

    Raises
    ------
    ValueError
        If it cannot be read.
    """
    if (text := config.get(GROUPS)) is None:
        return None
    groups = _parsed(text)
    if not (
        isinstance(groups, dict)
        and groups
        and all(isinstance(names, list) for names in groups.values())
        and all(isinstance(name, str) for names in groups.values() for name in names)
        and all(len(set(names)) == len(names) for names in groups.values())
    ):
        raise ValueError(
            f"The message's groups are {brief(repr(text))}, expected JSON with the names of the "
            f'arrays of every group, e.g. {{"anchor":["weight"]}}. {VERSIONS}'
        )
    return groups


def split_groups(
    parameters: Sequence[NDArray[Any]], config: Mapping[str, Any], names: Sequence[str] = ()
) -> dict[str, Arrays]:
    """Cut the list that a `NumPyClient` received into its groups of named arrays.

    Parameters
    ----------
    parameters, config
        What the client received.
    names : sequence of str, optional
        Names of the arrays of a plain FedAvg server, which sends one group and does not say them.

    Raises
    ------
    ValueError
        If ``config["groups"]`` cannot be read, or the list is not as long as it says.
    """
    expected = parse_groups(config)
    groups: dict[str, list[str]] = {ARRAYS: list(names)} if expected is None else expected
    found, announced = len(parameters), sum(map(len, groups.values()))
    if found != announced:
        raise ValueError(
            f"The message has {found} arrays, expected {announced}: "
            f"{brief(', '.join(name for own in groups.values() for name in own))}. {VERSIONS}"
        )
    arrays = iter(parameters)
    return {group: {name: next(arrays) for name in own} for group, own in groups.items()}


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


def named_arrays(record: ArrayRecord) -> Arrays:
    """Return the initial model as named arrays; raise TypeError unless it is an `ArrayRecord`."""
    if not isinstance(record, ArrayRecord):
        raise TypeError(
            f"initial_arrays is a {type(record).__name__}, expected a flwr.app.ArrayRecord, e.g. "
            "ArrayRecord(model.state_dict())."
        )
    return from_array_record(record)


def read_array(name: str, read: Callable[[], Any]) -> NDArray[Any]:
    """Return what `read` decodes from somebody else's bytes.

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
    """Return somebody else's text as one line of bounded length, without what does not print."""
    most = 4 * _LONGEST_REASON
    if cut := len(text) > 2 * most:  # before the work
        text = f"{text[:most]} {text[-most:]}"
    line = " ".join(printable(text).split())
    if not cut and len(line) <= _LONGEST_REASON:
        return line
    half = _LONGEST_REASON // 2  # the end of a traceback says most
    return f"{line[:half]} ... {line[-half:]}"


def printable(text: str) -> str:
    """Return text with spaces for all that does not print, but the ends of its lines.

    A terminal takes some of it as commands, and marks of the writing direction show a line as
    another than it is.
    """
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def describe(error: BaseException) -> str:
    """Return an error as one line, "its type: its text", whatever its ``__str__`` does."""
    try:
        text = str(error)
    except Interrupted:
        raise
    except BaseException as worse:  # a client's error may be anything
        text = f"(no text: its __str__ raises {type(worse).__name__})"
    return brief(f"{type(error).__name__}: {text}")
