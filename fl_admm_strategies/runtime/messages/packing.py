"""The content of messages between a strategy and a node, which hosts one client or many.

With one client a message has the layout of Flower's own `FedAvg`: an `ArrayRecord` under
``"arrays"`` and a `ConfigRecord` under ``"config"``; the reply has ``"arrays"`` and ``"metrics"``,
or a `ConfigRecord` under ``"error"``.

With several it has blocks. Clients whose messages have the same names, types and shapes share one,
number N (most messages have one, 0):

    "clients@N"   a `ConfigRecord`: the ids, and of each setting that differs a list in their order
    "config@N"    a `ConfigRecord`: the settings that are the same for all of them
    "arrays@N"    an `ArrayRecord`: for each array one array with a row for each client; of a
                  block of one client its arrays as they are

Clients whose arrays are `LARGE` have a block each, so that no array of theirs is copied into it.
Arrays that all clients of the message get, which have one, are in it once, under ``"arrays"``.
A reply has ``"clients@N"``, ``"arrays@N"`` and ``"metrics@N"``, a `MetricRecord` with a list for
each metric; of clients that failed it has in ``"clients@N"`` a list ``"error"`` and nothing else,
so that each fails alone.

A client may need more than one group of arrays (an anchor and a starting point; a personal and a
cluster model to evaluate). The first group is the one under ``"arrays"``, any further one stands
under ``"arrays.GROUP"``, and ``config["groups"]`` lists them in order with the names of their
arrays, as JSON: ``{"anchor": ["weight", "bias"], "start": ["weight"]}``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    groups_setting,
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


def _record(position: int, group: str) -> str:
    return ARRAYS if position == 0 else f"{ARRAYS}.{group}"


# --- Instructions -------------------------------------------------------------------------------


Known = dict[object, Array]
"""The arrays that were put into messages, by where they are in memory."""


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
        for position, (group, arrays) in enumerate(instruction.groups.items()):
            content[_record(position, group)] = _shared_record(arrays, known)
        content[CONFIG] = ConfigRecord(dict(instruction.full_config()))
        return content
    common = _common_arrays(instructions.values())
    for record in dict.fromkeys(record for record, _ in common):
        shared = {name: array for (of, name), array in common.items() if of == record}
        content[record] = _shared_record(shared, known)
    kinds = {client: _kind_of_instruction(asked) for client, asked in instructions.items()}

    def own(client: int) -> Iterable[NDArray[Any]]:
        return (array for key, array in _keyed(instructions[client]) if key not in common)

    for number, clients in enumerate(_blocks(kinds, own)):
        asked = [instructions[client] for client in clients]
        settings, columns = _split([one.config for one in asked])
        settings[GROUPS] = groups_setting(asked[0].groups)
        content[f"{CONFIG}@{number}"] = ConfigRecord(settings)
        content[f"{CLIENTS}@{number}"] = ConfigRecord({CLIENT_IDS: clients, **columns})
        for position, (group, names) in enumerate(asked[0].groups.items()):
            record = _record(position, group)
            rows = {
                name: _array_of([one.groups[group][name] for one in asked])
                for name in names
                if (record, name) not in common
            }
            if rows:
                content[f"{record}@{number}"] = ArrayRecord(rows)
    return content


def _keyed(
    instruction: ClientInstruction,
) -> Iterator[tuple[tuple[str, str], NDArray[Any]]]:
    """Yield the arrays of an instruction by record and name."""
    for position, (group, arrays) in enumerate(instruction.groups.items()):
        record = _record(position, group)
        for name, array in arrays.items():
            yield (record, name), array


def _common_arrays(
    instructions: Iterable[ClientInstruction],
) -> dict[tuple[str, str], NDArray[Any]]:
    """Return, by record and name, the arrays that are the same for all clients that get one."""
    first: dict[tuple[str, str], NDArray[Any]] = {}
    differing: set[tuple[str, str]] = set()
    for instruction in instructions:
        for key, array in _keyed(instruction):
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


def _kind_of_arrays(arrays: Arrays) -> tuple[Any, ...]:
    return tuple((name, array.shape, array.dtype) for name, array in arrays.items())


def _kind_of_instruction(instruction: ClientInstruction) -> tuple[Any, ...]:
    groups = tuple((g, _kind_of_arrays(arrays)) for g, arrays in instruction.groups.items())
    config = instruction.config
    return groups, tuple(config), tuple(map(type, config.values()))


def _split(configs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return the settings that are the same in all, and lists of the others."""
    common: dict[str, Any] = {}
    columns: dict[str, list[Any]] = {}
    for name, first in configs[0].items():
        values = [config[name] for config in configs]
        # 0.0 == -0.0, so zeros are a column.
        if (first or not isinstance(first, float)) and values.count(first) == len(values):
            common[name] = first
        else:
            columns[name] = values
    return common, columns


def _blocks(
    kinds: Mapping[int, object], own: Callable[[int], Iterable[NDArray[Any]]]
) -> Iterator[list[int]]:
    """Yield the clients of each block: those of one kind, or one whose own arrays are large."""
    alike: dict[object, list[int]] = {}
    for client, kind in kinds.items():
        alike.setdefault(kind, []).append(client)
    for clients in alike.values():
        if sum(array.nbytes for array in own(clients[0])) < LARGE:
            yield clients
        else:
            yield from ([client] for client in clients)


def _array_of(rows: Sequence[NDArray[Any]]) -> Array:
    """Return an array of a block: one row for each client."""
    if len(rows) == 1:
        return to_array(np.asarray(rows[0]))
    shape, dtype = (len(rows), *rows[0].shape), rows[0].dtype
    parts: list[Any] = [npy_header(shape, dtype), *map(np.ascontiguousarray, rows)]
    return Array(dtype=str(dtype), shape=shape, stype="numpy.ndarray", data=b"".join(parts))


def unpack_instructions(content: RecordDict) -> Iterator[tuple[int | None, ClientInstruction]]:
    """Yield what a message asks for as (client id, instruction); a single client has no id.

    The arrays are read-only views of the message.

    Raises
    ------
    ValueError
        If the message is not one of this library's or of `FedAvg`'s layout.
    """
    for key, record in content.items():
        name, at, number = key.partition("@")
        if not isinstance(record, ConfigRecord):
            continue
        if key == CONFIG:
            groups = {}
            for position, group in enumerate(parse_groups(record) or {ARRAYS: None}):
                groups[group] = _common(content, _record(position, group))
            config: dict[str, Any] = dict(record)
            yield None, ClientInstruction(groups, config)
        elif at and name == CLIENTS:
            yield from _unpack_block(content, record, number)


def _common(content: RecordDict, key: str) -> Arrays:
    if not isinstance(record := content.get(key), ArrayRecord):
        raise ValueError(f"The message lacks the ArrayRecord {brief(repr(key))}. {VERSIONS}")
    return views(record)


def _unpack_block(
    content: RecordDict, record: ConfigRecord, number: str
) -> Iterator[tuple[int, ClientInstruction]]:
    clients, columns = _read_clients(record)
    settings = content.get(f"{CONFIG}@{number}")
    config: dict[str, Any] = dict(settings) if isinstance(settings, ConfigRecord) else {}
    if (groups := parse_groups(config)) is None:
        raise ValueError(f"The message lacks the groups of 'config@{brief(number)}'. {VERSIONS}")
    by_group: dict[str, Iterable[Arrays]] = {}
    for position, (group, names) in enumerate(groups.items()):
        key = _record(position, group)
        blocks = _read_blocks(content.get(f"{key}@{number}"), len(clients))
        rows: dict[str, Iterable[NDArray[Any]]] = {
            name: _rows_of(block) for name, block in blocks.items()
        }
        if missing := [name for name in names if name not in rows]:
            shared = _common(content, key)
            if absent := [name for name in missing if name not in shared]:
                raise ValueError(
                    f"The message lacks the arrays {brief(listing(absent))} of {brief(repr(key))}. "
                    f"{VERSIONS}"
                )
            rows |= {name: repeat(shared[name]) for name in missing}
        by_group[group] = _by_client({name: rows[name] for name in names})
    for client, values, *arrays in zip(
        clients, _by_client(columns), *by_group.values(), strict=False
    ):
        yield client, ClientInstruction(dict(zip(by_group, arrays, strict=True)), config | values)


def _read_clients(record: object) -> tuple[list[int], dict[str, list[Any]]]:
    """Return the clients of a block, and the lists with an entry for each.

    Raises
    ------
    ValueError
        If the record is none of a block.
    """
    columns: dict[str, Any] = dict(record) if isinstance(record, ConfigRecord) else {}
    clients = columns.pop(CLIENT_IDS, None)
    if not isinstance(clients, list) or not all(map(is_client_id, clients)):
        raise ValueError(
            f"the clients of a block are {brief(repr(clients))}, expected a list of ids"
        )
    _check_columns(columns, len(clients))
    return clients, columns


def _check_columns(columns: Mapping[str, Any], count: int) -> None:
    for name, column in columns.items():
        if not isinstance(column, list) or len(column) != count:
            found = f"{len(column)} values" if isinstance(column, list) else "one value"
            raise ValueError(f"{brief(repr(name))} has {found} for {count} clients")


def _by_client(columns: Mapping[str, Iterable[Any]]) -> Iterator[dict[str, Any]]:
    """Yield a dict for each client; without any columns, empty ones for ever."""
    if not columns:
        return repeat({})
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=False))


def _read_blocks(blocks: object, count: int) -> Arrays:
    """Return the blocks of a record by name, each an array of `count` rows.

    Those of a single client have no rows in the message.

    Raises
    ------
    ValueError
        If an array has another number of rows, or cannot be read.
    """
    found = views(blocks) if isinstance(blocks, ArrayRecord) else {}
    if count == 1:
        return {name: array[None] for name, array in found.items()}
    for name, block in found.items():
        if block.shape[:1] != (count,):
            raise ValueError(
                f"the block of {brief(repr(name))} has the shape {brief(str(block.shape))} for "
                f"{count} clients"
            )
    return found


def _rows_of(block: NDArray[Any]) -> list[NDArray[Any]]:
    """Return the rows of a block as arrays, those of single numbers as well."""
    return list(block) if block.ndim > 1 else [block[row, ...] for row in range(len(block))]


# --- Replies ------------------------------------------------------------------------------------


def pack_replies(replies: Mapping[Any, RawReply]) -> RecordDict:
    """Put the replies of one node's clients into the content of one message.

    Parameters
    ----------
    replies : mapping of (int or None) to RawReply
        By client; that of a node's only one is under None. Their arrays hold real numbers.
    """
    if None in replies:
        return _of_the_only_client(replies[None])
    content = RecordDict()
    kinds = {client: _kind_of_reply(reply) for client, reply in replies.items()}
    arrays = {client: reply.arrays or {} for client, reply in replies.items()}
    for number, clients in enumerate(_blocks(kinds, lambda client: arrays[client].values())):
        some = [replies[client] for client in clients]
        said: dict[str, Any] = {CLIENT_IDS: clients}
        if some[0].error is not None:
            said[ERROR] = [reply.error for reply in some]
        content[f"{CLIENTS}@{number}"] = ConfigRecord(said)
        if some[0].error is None:
            if names := arrays[clients[0]]:
                rows = {name: _array_of([arrays[c][name] for c in clients]) for name in names}
                content[f"{ARRAYS}@{number}"] = ArrayRecord(rows)
            metrics: dict[str, Any] = {
                name: [reply.metrics[name] for reply in some] for name in some[0].metrics
            }
            content[f"{METRICS}@{number}"] = MetricRecord(metrics)
    return content


def _of_the_only_client(reply: RawReply) -> RecordDict:
    content = RecordDict()
    if reply.error is not None:
        return RecordDict({ERROR: ConfigRecord({"reason": reply.error})})
    if reply.arrays is not None:
        content[ARRAYS] = to_array_record(reply.arrays)
    content[METRICS] = MetricRecord(reply.metrics)
    return content


def _kind_of_reply(reply: RawReply) -> tuple[Any, ...]:
    if reply.error is not None:
        return ()
    arrays = None if reply.arrays is None else _kind_of_arrays(reply.arrays)
    return arrays, tuple(reply.metrics), tuple(map(type, reply.metrics.values()))


def unpack_replies(content: RecordDict) -> Iterator[tuple[int | None, RawReply]]:
    """Yield the replies of a message as (client id that it says, reply).

    The sender is not trusted: whatever cannot be read becomes a reply with an error, of the clients
    that a block says it is of, of None where it does not. None is also the id of a node's only
    client, whose own choice of record names is accepted where there is no doubt (one
    `ArrayRecord`, one `MetricRecord`), as `FedAvg` does.
    """
    blocks: dict[str, dict[str, Any]] = {}
    alone: dict[str, Any] = {}
    for key, record in content.items():
        name, at, number = key.partition("@")
        (blocks.setdefault(number, {}) if at else alone)[name] = record
    if alone or not blocks:
        yield None, _read_reply(alone)
    for block in blocks.values():
        yield from _read_block_of_replies(block)


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


def _read_block_of_replies(records: Mapping[str, Any]) -> Iterator[tuple[int | None, RawReply]]:
    try:
        clients, columns = _read_clients(records.get(CLIENTS))
    except ValueError as unreadable:
        yield None, RawReply(error=str(unreadable))
        return
    if (reasons := columns.get(ERROR)) is not None:
        for client, reason in zip(clients, reasons, strict=True):
            yield client, RawReply(error=brief(str(reason)))
        return
    try:
        if not isinstance(record := records.get(METRICS), MetricRecord):
            raise ValueError("its node replied without metrics")
        metrics: dict[str, Any] = dict(record)
        _check_columns(metrics, len(clients))
        arrays = records.get(ARRAYS)
        blocks = _read_blocks(arrays, len(clients))
    except ValueError as unreadable:
        for client in clients:
            yield client, RawReply(error=str(unreadable))
        return
    rows = (
        repeat(None) if arrays is None else _by_client({n: _rows_of(b) for n, b in blocks.items()})
    )
    for client, own, values in zip(clients, rows, _by_client(metrics), strict=False):
        yield client, RawReply(own or None, values)
