"""The content of messages between a strategy and a node, which hosts one client or many.

With one client a message has the layout of Flower's own `FedAvg`: an `ArrayRecord` under
``"arrays"`` and a `ConfigRecord` under ``"config"``; the reply has ``"arrays"`` and ``"metrics"``,
or a `ConfigRecord` under ``"error"``.

With several it has blocks. Clients with messages of the same names, types and shapes share one,
number N (most messages have one, 0):

    "clients@N"   a `ConfigRecord`: the ids, and of each value that differs a list in their order
    "config@N"    a `ConfigRecord`: the values that are the same for all of them
    "arrays@N"    an `ArrayRecord`: for each array one array with a row for each client; of a
                  block of one client its arrays as they are

Values are the settings of an instruction, the metrics of a reply, or ``"error"``, a text, of a
client that failed: each fails alone. Clients with `LARGE` arrays have a block each, so that no
array of theirs is copied into it. Arrays that all clients of an instruction get are in it once,
under ``"arrays"``.

A client may need more than one group of arrays (an anchor and a starting point; a personal and a
cluster model to evaluate). The first group is the one under ``"arrays"``, any further one stands
under ``"arrays.GROUP"``, and ``config["groups"]`` lists them in order with the names of their
arrays, as JSON: ``{"anchor": ["weight", "bias"], "start": ["weight"]}``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from ...maths.blocks import Arrays
from ...maths.checks import listing
from .identity import is_client_id
from .records import (
    ARRAYS,
    CLIENT_IDS,
    CONFIG,
    ERROR,
    GROUPS,
    METRICS,
    VERSIONS,
    ClientInstruction,
    RawReply,
    brief,
    npy_header,
    parse_groups,
    to_array,
    to_array_record,
    views,
)

_AT_ONCE = 2**16  # bytes that are compared first
LARGE = 2**20
"""Bytes of a client's arrays from which on it has a block of its own: 1 MiB."""

CLIENTS = "clients"

Known = dict[object, Array]
"""The arrays that were put into messages, by where they are in memory."""


def _record(position: int, group: str) -> str:
    return ARRAYS if position == 0 else f"{ARRAYS}.{group}"


def _records_of(instruction: ClientInstruction) -> dict[str, Arrays]:
    """Return the groups of an instruction by the record that holds them."""
    groups = enumerate(instruction.groups.items())
    return {_record(position, group): arrays for position, (group, arrays) in groups}


# --- Packing ------------------------------------------------------------------------------------


def pack_instructions(
    instructions: Mapping[int, ClientInstruction], *, hosted: bool, known: Known | None = None
) -> RecordDict:
    """Put the instructions of one node's clients into the content of one message.

    Parameters
    ----------
    instructions : mapping of client id to ClientInstruction
        With ``hosted=False`` exactly one.
    hosted : bool
        Whether the node hosts several clients.
    known : dict, optional
        Taken along from message to message while nothing changes: what several of them hold is
        then in memory once.
    """
    content, known = RecordDict(), {} if known is None else known
    if not hosted:
        (instruction,) = instructions.values()
        for record, arrays in _records_of(instruction).items():
            content[record] = _shared_record(arrays, known)
        content[CONFIG] = ConfigRecord(dict(instruction.full_config()))
        return content
    records = {client: _records_of(one) for client, one in instructions.items()}
    common = _common_arrays(records.values())
    for record in dict.fromkeys(record for record, _ in common):
        shared = {name: array for (of, name), array in common.items() if of == record}
        content[record] = _shared_record(shared, known)
    values = {client: one.full_config() for client, one in instructions.items()}
    _pack_blocks(content, records, values, common)
    return content


def pack_replies(replies: Mapping[Any, RawReply]) -> RecordDict:
    """Put the replies of one node's clients into the content of one message.

    Parameters
    ----------
    replies : mapping of (int or None) to RawReply
        By client; that of a node's only one is under None. Their arrays hold real numbers.
    """
    content = RecordDict()
    if None not in replies:
        records = {client: {ARRAYS: reply.arrays or {}} for client, reply in replies.items()}
        values = {
            client: reply.metrics if reply.error is None else {ERROR: reply.error}
            for client, reply in replies.items()
        }
        _pack_blocks(content, records, values, ())
        return content
    reply = replies[None]
    if reply.error is not None:
        return RecordDict({ERROR: ConfigRecord({"reason": reply.error})})
    if reply.arrays is not None:
        content[ARRAYS] = to_array_record(reply.arrays)
    content[METRICS] = MetricRecord(reply.metrics)
    return content


def _common_arrays(
    clients: Iterable[Mapping[str, Arrays]],
) -> dict[tuple[str, str], NDArray[Any]]:
    """Return, by record and name, the arrays that are the same for all clients that get one."""
    first: dict[tuple[str, str], NDArray[Any]] = {}
    differing: set[tuple[str, str]] = set()
    for records in clients:
        for record, arrays in records.items():
            for name, array in arrays.items():
                key = record, name
                if key not in differing and not _same_bits(first.setdefault(key, array), array):
                    differing.add(key)
    return {key: array for key, array in first.items() if key not in differing}


def _shared_record(arrays: Arrays, known: Known) -> ArrayRecord:
    found: dict[str, Array] = {}
    for name, array in arrays.items():
        # A number of NumPy's has no place of its own.
        place = _place(array) if isinstance(array, np.ndarray) else None
        found[name] = known.get(place) or to_array(np.asarray(array))
        if place is not None:
            known[place] = found[name]
    return ArrayRecord(found)


def _place(array: NDArray[Any]) -> tuple[Any, ...]:
    """Return where an array is in memory, and how it is read there."""
    start = array.__array_interface__["data"][0]
    return start, array.shape, array.strides, array.dtype.str


def _same_bits(one: NDArray[Any], other: NDArray[Any]) -> bool:
    if one is other:
        return True
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if one.nbytes <= _AT_ONCE:
        return one.tobytes() == other.tobytes()
    if _place(one) == _place(other):
        return True
    left, right = (array.reshape(-1).view(np.uint8) for array in (one, other))
    return np.array_equal(left[:_AT_ONCE], right[:_AT_ONCE]) and np.array_equal(left, right)


def _pack_blocks(
    content: RecordDict,
    records: Mapping[int, Mapping[str, Arrays]],
    values: Mapping[int, Mapping[str, Any]],
    common: Container[tuple[str, str]],
) -> None:
    """Add the blocks of some clients, given their arrays by record and name, and their values."""
    for number, clients in enumerate(_blocks(records, values, common)):
        shared, columns = _split([values[client] for client in clients])
        content[f"{CONFIG}@{number}"] = ConfigRecord(shared)
        content[f"{CLIENTS}@{number}"] = ConfigRecord({CLIENT_IDS: clients, **columns})
        for record, names in records[clients[0]].items():
            rows = {
                name: _array_of([records[client][record][name] for client in clients])
                for name in names
                if (record, name) not in common
            }
            if rows:
                content[f"{record}@{number}"] = ArrayRecord(rows)


def _blocks(
    records: Mapping[int, Mapping[str, Arrays]],
    values: Mapping[int, Mapping[str, Any]],
    common: Container[tuple[str, str]],
) -> Iterator[list[int]]:
    """Yield the clients of each block: those of one kind, or one with large arrays."""
    alike: dict[object, list[int]] = {}
    for client, of_client in records.items():
        own = [
            (record, name, array.shape, array.dtype)
            for record, arrays in of_client.items()
            for name, array in arrays.items()
        ]
        said = values[client]
        kind = tuple(own), tuple(said), tuple(map(type, said.values())), said.get(GROUPS)
        alike.setdefault(kind, []).append(client)
    for clients in alike.values():
        num_bytes = sum(
            array.nbytes
            for record, arrays in records[clients[0]].items()
            for name, array in arrays.items()
            if (record, name) not in common
        )
        yield from [clients] if num_bytes < LARGE else ([client] for client in clients)


def _split(all_values: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return the values that are the same for all clients, and lists of the others."""
    shared: dict[str, Any] = {}
    columns: dict[str, list[Any]] = {}
    for name, first in all_values[0].items():
        column = [values[name] for values in all_values]
        # 0.0 == -0.0, so zeros are a column.
        if (first or not isinstance(first, float)) and column.count(first) == len(column):
            shared[name] = first
        else:
            columns[name] = column
    return shared, columns


def _array_of(rows: Sequence[NDArray[Any]]) -> Array:
    """Return an array of a block: one row for each client."""
    if len(rows) == 1:
        return to_array(np.asarray(rows[0]))
    shape, dtype = (len(rows), *rows[0].shape), rows[0].dtype
    parts: list[Any] = [npy_header(shape, dtype), *map(np.ascontiguousarray, rows)]
    return Array(dtype=str(dtype), shape=shape, stype="numpy.ndarray", data=b"".join(parts))


# --- Unpacking ----------------------------------------------------------------------------------


def unpack_instructions(content: RecordDict) -> Iterator[tuple[int | None, ClientInstruction]]:
    """Yield what a message asks for as (client id, instruction); a single client has no id.

    The arrays are read-only views of the message.

    Raises
    ------
    ValueError
        If the message is not one of this library's or of `FedAvg`'s layout.
    """
    alone, blocks = _in_blocks(content)
    if isinstance(record := alone.get(CONFIG), ConfigRecord):
        groups = {}
        for position, group in enumerate(parse_groups(record) or {ARRAYS: None}):
            groups[group] = _shared_arrays(alone, _record(position, group))
        config: dict[str, Any] = dict(record)
        yield None, ClientInstruction(groups, config)
    for block in blocks.values():
        clients = _read_clients(block)
        all_values = _read_values(block, clients)
        if not all_values or (names_of := parse_groups(all_values[0])) is None:
            raise ValueError(f"The message lacks the groups of clients {clients}. {VERSIONS}")
        by_group: list[Iterator[Arrays]] = []
        for position, (group, names) in enumerate(names_of.items()):
            key = _record(position, group)
            rows = _read_rows(block.get(key), len(clients))
            shared = _shared_arrays(alone, key) if set(names) - rows.keys() else {}
            if absent := [name for name in names if name not in rows and name not in shared]:
                raise ValueError(
                    f"The message lacks the arrays {brief(listing(absent))} of "
                    f"{brief(repr(key))}. {VERSIONS}"
                )
            by_group.append(
                _by_client({n: rows[n] if n in rows else repeat(shared[n]) for n in names})
            )
        for client, values, *arrays in zip(clients, all_values, *by_group, strict=False):
            yield client, ClientInstruction(dict(zip(names_of, arrays, strict=True)), values)


def unpack_replies(content: RecordDict) -> Iterator[tuple[int | None, RawReply]]:
    """Yield the replies of a message as (client id that it says, reply).

    The sender is not trusted: whatever cannot be read becomes a reply with an error, of the clients
    that a block says it is of, of None where it does not. None is also the id of a node's only
    client: any names of its records are accepted where there is no doubt (one
    `ArrayRecord`, one `MetricRecord`), as `FedAvg` does.
    """
    alone, blocks = _in_blocks(content)
    if alone or not blocks:
        yield None, _read_reply(alone)
    for block in blocks.values():
        try:
            clients = _read_clients(block)
        except ValueError as unreadable:
            yield None, RawReply(error=str(unreadable))
            continue
        try:
            all_values = _read_values(block, clients)
            rows = _by_client(_read_rows(block.get(ARRAYS), len(clients)))
        except ValueError as unreadable:
            rows, all_values = repeat({}), [{ERROR: str(unreadable)}] * len(clients)
        for client, arrays, values in zip(clients, rows, all_values, strict=False):
            if isinstance(error := values.get(ERROR), str):
                yield client, RawReply(error=brief(error))
            else:
                yield client, RawReply(arrays or None, values)


def _in_blocks(content: RecordDict) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the records of no block, and those of each block under the names before its "@"."""
    alone: dict[str, Any] = {}
    blocks: dict[str, dict[str, Any]] = {}
    for key, record in content.items():
        name, at, number = key.partition("@")
        (blocks.setdefault(number, {}) if at else alone)[name] = record
    return alone, blocks


def _shared_arrays(records: Mapping[str, Any], key: str) -> Arrays:
    if not isinstance(record := records.get(key), ArrayRecord):
        raise ValueError(f"The message lacks the ArrayRecord {brief(repr(key))}. {VERSIONS}")
    return views(record)


def _read_clients(block: Mapping[str, Any]) -> list[int]:
    """Return the clients of a block; raise ValueError if it does not name them."""
    record = block.get(CLIENTS)
    clients: Any = record.get(CLIENT_IDS) if isinstance(record, ConfigRecord) else None
    if not isinstance(clients, list) or not all(map(is_client_id, clients)):
        raise ValueError(
            f"the clients of a block are {brief(repr(clients))}, expected a list of ids"
        )
    found: list[int] = clients
    return found


def _read_values(block: Mapping[str, Any], clients: Sequence[int]) -> list[dict[str, Any]]:
    """Return the values of each client; raise ValueError if a list has not one for each."""
    columns: dict[str, Any] = dict(block[CLIENTS])
    del columns[CLIENT_IDS]
    for name, column in columns.items():
        if not isinstance(column, list) or len(column) != len(clients):
            found = f"{len(column)} values" if isinstance(column, list) else "one value"
            raise ValueError(f"{brief(repr(name))} has {found} for {len(clients)} clients")
    record = block.get(CONFIG)
    shared: dict[str, Any] = dict(record) if isinstance(record, ConfigRecord) else {}
    return [shared | own for _, own in zip(clients, _by_client(columns), strict=False)]


def _by_client(columns: Mapping[str, Iterable[Any]]) -> Iterator[dict[str, Any]]:
    """Yield a dict for each client; without any columns, empty ones for ever."""
    if not columns:
        return repeat({})
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=False))


def _read_rows(record: object, count: int) -> dict[str, list[NDArray[Any]]]:
    """Return the arrays of a block by name: a row for each of `count` clients.

    That of a single client has no rows in the message.

    Raises
    ------
    ValueError
        If an array has another number of rows, or cannot be read.
    """
    found = views(record) if isinstance(record, ArrayRecord) else {}
    if count == 1:
        return {name: [array] for name, array in found.items()}
    for name, block in found.items():
        if block.shape[:1] != (count,):
            raise ValueError(
                f"the block of {brief(repr(name))} has the shape {brief(str(block.shape))} for "
                f"{count} clients"
            )
    return {  # numbers as arrays, too
        name: list(block) if block.ndim > 1 else [block[row, ...] for row in range(count)]
        for name, block in found.items()
    }


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
        arrays = views(array_records[0]) if array_records else None
    except ValueError as unreadable:
        return RawReply(None, metrics, str(unreadable))
    return RawReply(arrays, metrics)
