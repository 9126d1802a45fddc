"""What a strategy and a client say to each other; `packing` has how it travels.

A `NumPyClient` receives the groups of arrays of its instruction concatenated, in their order. All
lists of names travel as JSON, since a setting of Flower's legacy API is one number or text and a
name may hold any character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from itertools import chain
from typing import Any, Literal, cast

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.lib import format as npy
from numpy.typing import NDArray

from ...maths.blocks import Arrays
from ..common.interrupts import Interrupted
from .wire import restored

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
ERROR = "error"
GROUPS = "groups"
UPLOAD = "upload"
"""The setting that names the arrays to upload, where they are not those of the first group."""
NUM_EXAMPLES = "num-examples"
STEP_SUM = "step-sum"
"""The metric of a client that is asked for S_i, the sum of the step sizes of its round."""
CLIENT_ID = "client-id"
CLIENT_IDS = "client-ids"
NUM_CLIENTS = "num-clients"
COLLECT = "collect"
"""The setting of a training message that asks for the client's personal model and nothing else."""
STATE_LOST = "state-lost"
"""In the error of a client that does not hold what the server takes it to hold, before its id."""
ALTERED = "upload-altered"
"""The metric of a reply by which a client says that its mods have changed the upload."""
OF_RUN = frozenset({"run", "durable"})
"""The settings that differ between runs of the same bits."""

VERSIONS = "Server and client must use the same version of fl-admm-strategies."
_LARGE = 2**16  # bytes that are copied once
_LONGEST_REASON = 500  # characters of a client's text in our log

Scalar = bool | bytes | float | int | str
Metrics = dict[str, float]


@dataclass(slots=True)  # frozen takes four times as long to make
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
        if GROUPS in self.config:  # of a message that was received
            return dict(self.config)
        return {**self.config, GROUPS: groups_setting(self.groups)}

    def flat(self) -> list[NDArray[Any]]:
        """Return the arrays of all groups as one list, as a `NumPyClient` receives them."""
        return list(chain.from_iterable(map(dict.values, self.groups.values())))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.flat())

    def upload_names(self) -> list[str]:
        """Return the names of the arrays to upload."""
        if (names := self.config.get(UPLOAD)) is not None:
            return read_names(UPLOAD, names)
        return list(next(iter(self.groups.values())))


@dataclass(slots=True)
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
"""A client, None for a sender that is no client of the run, and its reply."""

NOT_CONNECTED = RawReply(error="its node is not connected")
"""The reply of a client without a connected node."""


@dataclass(slots=True)
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
    nbytes : int
        Bytes of the arrays as they travelled.
    sent : ClientInstruction
        What its client was sent for training, in this round or in an earlier one; empty in other
        phases. `Instruction.read` has it typed. Its arrays may be views of the state as it is now:
        they are not kept a second time.
    altered : bool
        Whether it is another upload than its client sent, by its seal.
    """

    arrays: Arrays
    num_examples: float
    metrics: Metrics
    nbytes: int = 0
    sent: ClientInstruction = field(default_factory=lambda: ClientInstruction({}))
    altered: bool = False


def numbers_among(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the numbers among the metrics of a `NumPyClient`, which may be texts as well."""
    return {
        key: int(value) if isinstance(value, int) else float(value)
        for key, value in metrics.items()
        if isinstance(value, int | float)
    }


def to_json(value: Any) -> str:
    """Return lists and numbers as text, in the shortest form."""
    return json.dumps(value, separators=(",", ":"))


@lru_cache(maxsize=64)  # all clients of a round are told the same names
def names_setting(names: tuple[str, ...]) -> str:
    """Return names as a setting, which `read_names` reads."""
    return to_json(names)


def read_names(setting: str, text: object) -> list[str]:
    """Read a list of names that travelled as JSON.

    Raises
    ------
    ValueError
        If it is none.
    """
    names = _parsed(str(text))
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"The message's {setting} is {brief(repr(text))}, expected a JSON list of names. "
            f"{VERSIONS}"
        )
    return list(names)


@lru_cache(maxsize=64)
def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def who_lost(error: str) -> int | None:
    """Return which client says in an error that it lost what it keeps; None for another error."""
    found = re.search(rf"\[{STATE_LOST} ([0-9]{{1,20}})\]", error)
    return None if found is None else int(found[1])


def groups_setting(groups: Mapping[str, Arrays]) -> str:
    """Return the setting ``groups``, which `parse_groups` reads."""
    return _groups_text(tuple((group, tuple(arrays)) for group, arrays in groups.items()))


@lru_cache(maxsize=64)
def _groups_text(groups: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    return to_json(dict(groups))


def parse_groups(config: Mapping[str, Any]) -> dict[str, list[str]] | None:
    """Read ``config["groups"]``; None for a message of a plain FedAvg server, which has none.

    Raises
    ------
    ValueError
        If it cannot be read.
    """
    if (text := config.get(GROUPS)) is None:
        return None
    if (groups := _groups_of(str(text))) is None:
        raise ValueError(
            f"The message's groups are {brief(repr(text))}, expected JSON with the names of the "
            f'arrays of every group, e.g. {{"anchor":["weight"]}}. {VERSIONS}'
        )
    return groups


@lru_cache(maxsize=64)
def _groups_of(text: str) -> dict[str, list[str]] | None:
    groups = _parsed(text)
    lists = list(groups.values()) if isinstance(groups, dict) else []
    good = all(
        isinstance(names, list)
        and all(isinstance(name, str) for name in names)
        and len(set(names)) == len(names)
        for names in lists
    )
    return groups if lists and good else None


def split_groups(
    parameters: Sequence[NDArray[Any]], config: Mapping[str, Any], names: Sequence[str] = ()
) -> dict[str, Arrays]:
    """Cut the list that a `NumPyClient` received into its groups of named arrays.

    Those that travelled in half precision are in full precision again.

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
            f"{brief(', '.join(name for names in groups.values() for name in names))}. {VERSIONS}"
        )
    arrays = iter(restored(parameters, config))
    return {group: {name: next(arrays) for name in names} for group, names in groups.items()}


def to_array_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return named numpy arrays as an `ArrayRecord`."""
    return ArrayRecord({name: to_array(np.asarray(array)) for name, array in arrays.items()})


def to_array(array: NDArray[Any]) -> Array:
    """Return an array as Flower's `Array` of it: one copy in place of three, none of a `view`."""
    if not (array.flags.c_contiguous and array.dtype.kind in "biuf"):
        return Array(array)
    shape, dtype = array.shape, array.dtype
    header, data = npy_header(shape, dtype), cast(Any, array.base)
    whole = type(data) is bytes and len(data) == len(header) + array.nbytes
    if not (whole and data.startswith(header)):
        parts: list[Any] = [header, np.ascontiguousarray(array)]
        data = b"".join(parts)
    return Array(dtype=str(dtype), shape=shape, stype="numpy.ndarray", data=data)


def packed(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only copy of an array that no message and no context copies again."""
    return view(to_array(array))


def owned(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array that no other code changes: a copy, `packed` if it is large."""
    return packed(array) if array.nbytes >= _LARGE else array.copy()


@lru_cache(maxsize=256)
def npy_header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """Return what `numpy.save` writes before the numbers of an array."""
    file, descr = BytesIO(), npy.dtype_to_descr(dtype)
    npy.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


def view(array: Array) -> NDArray[Any]:
    """Return a Flower `Array` as a read-only view of its bytes; raise anything if it is none."""
    if array.stype != "numpy.ndarray":
        raise TypeError(f"they are of the type {array.stype!r}, expected 'numpy.ndarray'")
    data, lengths = array.data, 2 if array.data[6:7] == b"\x01" else 4
    start = 8 + lengths + int.from_bytes(data[8 : 8 + lengths], "little")
    shape, order, dtype = _read_npy_header(data[:start])
    return np.ndarray(shape, dtype, data, start, order=order)


@lru_cache(maxsize=256)
def _read_npy_header(header: bytes) -> tuple[tuple[int, ...], Literal["C", "F"], np.dtype[Any]]:
    """Read what `npy_header` writes, of any version, in a file that anybody wrote."""
    file = BytesIO(header)
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran_order, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("they hold Python objects")
    return shape, "F" if fortran_order else "C", dtype


def views(record: ArrayRecord) -> Arrays:
    """Return an `ArrayRecord` as read-only views of its bytes, by name.

    Raises
    ------
    ValueError
        If an array's bytes are not one plain numpy array. Pickled objects are never loaded.
    """
    arrays: Arrays = {}
    for name, array in record.items():
        try:
            arrays[name] = view(array)
        except Exception as error:  # numpy may raise anything
            reason = brief(f"{type(error).__name__}: {error}")
            raise ValueError(
                f"the bytes of array {brief(repr(name))} cannot be read: {reason}"
            ) from None
    return arrays


def from_array_record(record: ArrayRecord) -> Arrays:
    """Return an `ArrayRecord` as named numpy arrays of their own; errors are those of `views`."""
    return {name: array.copy(order="K") for name, array in views(record).items()}


def named_arrays(record: ArrayRecord) -> Arrays:
    """Return the initial model as `views`; raise TypeError unless it is an `ArrayRecord`."""
    if not isinstance(record, ArrayRecord):
        raise TypeError(
            f"initial_arrays is a {type(record).__name__}, expected a flwr.app.ArrayRecord, e.g. "
            "ArrayRecord(model.state_dict())."
        )
    return views(record)


def brief(text: str) -> str:
    """Return a text of a client as one line of bounded length, without what does not print."""
    most = 4 * _LONGEST_REASON
    if cut := len(text) > 2 * most:  # before the work
        text = f"{text[:most]} {text[-most:]}"
    # A terminal takes some of it as commands, and marks of the writing direction show a line as
    # another than it is.
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    if not cut and len(line) <= _LONGEST_REASON:
        return line
    half = _LONGEST_REASON // 2  # the end of a traceback says most
    return f"{line[:half]} ... {line[-half:]}"


def describe(error: BaseException) -> str:
    """Return an error as one line, "its type: its text", whatever its ``__str__`` does."""
    try:
        text = str(error)
    except Interrupted:
        raise
    except BaseException as worse:  # a client's error may be anything
        text = f"(no text: its __str__ raises {type(worse).__name__})"
    return brief(f"{type(error).__name__}: {text}")
