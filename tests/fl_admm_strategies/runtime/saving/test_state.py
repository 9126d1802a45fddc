"""A state is saved and loaded by what it declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.maths.clienttable import ClientTable
from fl_admm_strategies.runtime.saving.state import arrays_of, load_arrays, parts_by_client
from tests.support.refusals import refused


@dataclass
class Inner:
    w: NDArray[Any]
    rounds: int = 0


class Odd:
    """A structure of its own kind, which checks what it loads."""

    self_checked: ClassVar = True

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        return {"values": np.array(self.values)}

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        if arrays["values"].ndim != 1:
            raise ValueError("no list")
        self.values = arrays["values"].tolist()


@dataclass
class State:
    """A field of every kind."""

    x: NDArray[Any]
    scale: float
    count: int
    done: bool
    model: Arrays
    inner: Inner
    table: ClientTable
    rows: ClientTable
    odd: Odd
    empty: Arrays = field(default_factory=dict)


def state(value: float = 0.0, clients: tuple[int, ...] = (2, 7)) -> State:
    table = ClientTable(theta=np.full(2, value, np.float32), alpha=value)
    rows = ClientTable(u=np.full(3, value))
    for part in (table, rows):
        part.insert({client: {} for client in clients})
    return State(
        x=np.full(2, value, np.float32),
        scale=value,
        count=int(value),
        done=bool(value),
        model={"a/b": np.full((2, 2), value), 'n,"\n': np.array(int(value))},
        inner=Inner(np.full(1, value), int(value)),
        table=table,
        rows=rows,
        odd=Odd(value),
    )


NAMES = [
    *("x", "scale", "count", "done", "model/a/b", 'model/n,"\n', "inner/w", "inner/rounds"),
    *("table/theta", "table/alpha", "rows/u", "odd/values"),
]


def test_a_state_is_named_arrays() -> None:
    arrays = arrays_of(state(3.0))
    assert list(arrays) == NAMES
    assert all(type(array) is np.ndarray for array in arrays.values())
    assert_array_equal(arrays["model/a/b"], np.full((2, 2), 3.0))
    assert_array_equal(arrays["table/theta"], np.full((2, 2), 3.0))
    assert arrays["count"] == arrays["inner/rounds"] == 3
    assert arrays["done"].dtype == np.bool_


def test_a_loaded_state_is_the_saved_one_and_its_own() -> None:
    saved = {name: array.copy() for name, array in arrays_of(state(3.0)).items()}
    saved["odd/values"] = np.array([1.0, 2.0])
    loaded = state(0.0)
    load_arrays(loaded, saved, "Any")
    for name, array in arrays_of(loaded).items():
        assert array.dtype == saved[name].dtype, name
        assert_array_equal(array, saved[name], err_msg=name)
    assert (loaded.scale, loaded.count, loaded.done) == (3.0, 3, True)
    assert loaded.odd.values == [1.0, 2.0]
    assert [type(v) for v in (loaded.scale, loaded.count, loaded.done)] == [float, int, bool]
    assert loaded.inner == Inner(loaded.inner.w, 3)
    # Every part goes on alone.
    loaded.x += 1
    loaded.model["a/b"] += 1
    loaded.table[2].theta += 1
    loaded.rows[7].u += 1
    assert_array_equal(saved["x"], [3, 3])
    assert_array_equal(saved["table/theta"], np.full((2, 2), 3.0))
    assert_array_equal(saved["rows/u"], np.full((2, 3), 3.0))
    assert_array_equal(saved["model/a/b"], np.full((2, 2), 3.0))


def test_what_a_state_lacks_is_named() -> None:
    saved = arrays_of(state())
    del saved["table/alpha"], saved["inner/w"]
    with refused(ValueError, "['inner/w', 'table/alpha']"):
        load_arrays(state(), saved, "FLAME")


@pytest.mark.parametrize("name", ["x", "done", 'model/n,"\n', "inner/w", "table/alpha", "rows/u"])
@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_an_array_of_another_form_is_refused_by_name(name: str, change: str) -> None:
    own, saved = state(), dict(arrays_of(state(3.0)))
    old = saved[name]
    saved[name] = old.astype(np.float16) if change == "dtype" else old[np.newaxis]
    before = {key: array.copy() for key, array in arrays_of(own).items()}
    with refused(ValueError, f"'{name}'"):
        load_arrays(own, saved, "Any")
    for key, array in arrays_of(own).items():  # nothing was loaded by then
        assert_array_equal(array, before[key], err_msg=key)


def test_a_structure_that_checks_itself_is_left_to_do_so() -> None:
    saved = arrays_of(state()) | {"odd/values": np.zeros(5)}
    own = state()
    load_arrays(own, saved, "Any")
    assert own.odd.values == [0] * 5
    with refused(ValueError, "no list"):
        load_arrays(own, saved | {"odd/values": np.zeros((2, 2))}, "Any")


def test_what_is_kept_by_client_is_found() -> None:
    own = state()
    assert parts_by_client(own) == [own.table, own.rows]

    @dataclass
    class Bare:
        w: NDArray[Any]

    assert parts_by_client(Bare(np.zeros(2))) == []  # it knows no client
