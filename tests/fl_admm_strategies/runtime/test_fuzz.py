"""Nothing that comes from outside can do more than be refused.

Replies with arbitrary content: every one ends in a refusal or an error of ours, and none changes a
state. Hypothesis makes the content up: from
nothing, and by changing one thing in a message that was good.
"""

from __future__ import annotations

import io
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from clients import client_app
from clients.toolkit.round.memory import Memory
from fl_admm_strategies import InProcessGrid, StatefulStrategy
from tests.support.cases import CHEAP, grid_of, run
from tests.support.federation import Federation, assert_same_bits, client_fn_of, node_of
from tests.support.texts import text

VICTIM = 3

some = settings(max_examples=8)


# --- Content of any kind ------------------------------------------------------------------------


def saved(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


class Bomb:
    """What a pickle of it would do, were it ever loaded."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was loaded",)


HUGE = b"\x93NUMPY\x01\x00v\x00" + (
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999,), }".ljust(117) + b"\n"
)

BYTES = [
    b"",
    b"no numpy file",
    b"\x93NUMPY",
    saved(np.zeros(4, np.float32))[:-3],
    HUGE,
    saved(np.array([Bomb(), None], dtype=object), allow_pickle=True),
    saved(np.array("text")),
    saved(np.zeros(3, [("a", "<f4"), ("b", "O")]), allow_pickle=True),
    saved(np.zeros((2, 0, 3), ">f4")),
]

numbers = st.one_of(
    st.integers(-5, 5),
    st.integers(),
    st.floats(),
    st.sampled_from([10**400, -(10**400), 2**63, 2**64, 1e308, -1e308, 5e-324]),
)
texts = st.one_of(text(max_size=8), st.sampled_from(["@", "x@y", "\n\n", "\0", "é" * 3]))
scalars = st.one_of(st.booleans(), st.binary(max_size=8), texts, numbers)
values = st.one_of(
    scalars,
    st.lists(st.integers(-5, 2**64), max_size=3),
    st.lists(st.floats(), max_size=3),
    st.lists(st.booleans(), max_size=3),
    st.lists(texts, max_size=3),
    st.lists(st.binary(max_size=4), max_size=3),
)


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    if draw(st.booleans()):
        dtype = draw(hnp.scalar_dtypes())
        shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
        return Array(np.zeros(shape, dtype))
    return Array(
        dtype=draw(st.sampled_from(["float32", "object", "", "no dtype"])),
        shape=tuple(draw(st.lists(st.integers(-2, 2**40), max_size=3))),
        stype=draw(st.sampled_from(["numpy.ndarray", "numpy.ndarray", "pickle", ""])),
        data=draw(st.one_of(st.sampled_from(BYTES), st.binary(max_size=200))),
    )


array_names = st.one_of(texts, st.sampled_from(["w", "b", "head.weight"]))
metric_names = st.one_of(texts, st.sampled_from(["num-examples", "num-examples", "loss"]))
metrics = st.dictionaries(
    metric_names,
    st.one_of(numbers, st.lists(st.integers(), max_size=3), st.lists(st.floats(), max_size=3)),
    max_size=4,
)
configs = st.dictionaries(
    st.one_of(texts, st.sampled_from(["reason", "client-ids", "num-clients", "groups", "upload"])),
    values,
    max_size=4,
)
records = st.one_of(
    st.builds(ArrayRecord, st.dictionaries(array_names, arrays(), max_size=4)),
    st.builds(MetricRecord, metrics),
    st.builds(ConfigRecord, configs),
)
record_names = st.one_of(
    texts,
    st.sampled_from(["arrays", "metrics", "config", "error", "arrays@", "error@", "arrays.anchor"]),
    st.sampled_from(["metrics@0", "clients@0", "config@0", "arrays@0@0", "clients@x"]),
)
contents = st.builds(RecordDict, st.dictionaries(record_names, records, max_size=4))


@st.composite
def changed(draw: st.DrawFn, good: RecordDict) -> RecordDict:
    """Return a good message with one thing changed, added or gone."""
    content = RecordDict(dict(good))
    key = draw(st.sampled_from(list(content)))
    how = draw(st.sampled_from(["gone", "renamed", "another", "one more", "inside", "inside"]))
    if how == "gone":
        del content[key]
    elif how == "renamed":
        content[draw(record_names)] = content.pop(key)
    elif how == "another":
        content[key] = draw(records)
    elif how == "one more":
        content[draw(record_names)] = draw(records)
    else:
        inside: dict[str, Any] = dict(content[key])
        name = draw(st.sampled_from([*inside, "another"]))
        new = {ArrayRecord: arrays(), MetricRecord: numbers, ConfigRecord: values}
        inside[name] = draw(new[type(content[key])])
        content[key] = type(content[key])(inside)
    return content


# --- Replies ------------------------------------------------------------------------------------


def replay(content: RecordDict | None) -> StatefulStrategy:
    """Return a run in which the victim's reply of round 2 is another one, or lost."""

    def spoil(replies: list[Message]) -> list[Message]:
        others = [r for r in replies if r.metadata.src_node_id != node_of(VICTIM)]
        (own,) = (r for r in replies if r.metadata.src_node_id == node_of(VICTIM))
        if content is None:
            return others
        own.content = content
        return [*others, own]

    return run(CHEAP, grid_of(CHEAP, spoil={2: spoil}), 2)


@cache
def good_reply() -> RecordDict:
    grid = grid_of(CHEAP)
    run(CHEAP, grid, 2)
    return grid.replies(MessageType.TRAIN, 2)[VICTIM].content


@some
@given(data=st.data())
def test_a_reply_of_any_content_is_refused_or_good(data: st.DataObject) -> None:
    content = data.draw(st.one_of(contents, changed(good_reply())))
    strategy = replay(content)
    if VICTIM in strategy.train_metrics[2]:  # then it is what the strategy asked for
        own = [r for key, r in content.array_records.items() if not key.partition("@")[2]]
        sent = {name: array.numpy() for record in own for name, array in record.items()}
        assert len(own) == 1
        assert {n: (a.shape, a.dtype) for n, a in sent.items()} == strategy.upload_spec()
        assert all(np.isfinite(array).all() for array in sent.values())
        assert 0 < strategy.train_metrics[2][VICTIM]["num-examples"] <= 2**53
    else:
        expected = replay(None)
        assert_same_bits(strategy.state_dict(), expected.state_dict())
        assert strategy.train_metrics == expected.train_metrics


def test_a_node_refuses_the_instruction_of_a_client_that_it_does_not_host() -> None:
    app = client_app(client_fn_of(CHEAP.client_class), num_clients=3)
    good = Federation(app, 1)
    run(CHEAP, good, 2)
    content = RecordDict(dict(good.phase(MessageType.TRAIN, 2)[0].content))
    content["clients@0"] = ConfigRecord({**content["clients@0"], "client-ids": [7, 8, 9]})
    grid = InProcessGrid(app, 1)
    message = Message(content, node_of(0), MessageType.TRAIN, group_id="2")
    (reply,) = grid.send_and_receive([message])
    assert reply.has_error()
    assert "client 7" in reply.error.reason
    assert not grid.context(node_of(0)).state


# --- Clients' files ------------------------------------------------------------------------------


@some
@given(data=st.binary(max_size=200))
def test_a_clients_file_of_any_bytes_counts_as_lost(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        memory = Memory(Context(1, 2, {}, RecordDict(), {}), folder)
        config = {"server-round": 1, "version": 0, "durable": "[]", "run": "a"}
        memory.keep(config, {"u": np.ones(3)})
        (path,) = (Path(folder) / "client-2").iterdir()
        path.write_bytes(data)
        then = config | {"server-round": 2, "version": 1}
        assert memory.recall(then) is None
        assert path.read_bytes() == data
        memory.keep(then | {"version": 0}, {"u": np.zeros(3)})
        assert memory.recall(config | {"server-round": 3, "version": 2})["u"].tolist() == [0] * 3


# --- Pickles ------------------------------------------------------------------------------------

# `pickle` copies messages between this process and its own workers there.
TRUSTED = {Path(f"fl_admm_strategies/hosting/{name}.py") for name in ("inprocess", "workers")}
TRUSTED |= {Path("simulations/comparing/workers.py")}  # between processes of one machine
ROOT = Path(__file__).parents[3]


LOADS = r"^\s*(import|from) (pickle|marshal|shelve|joblib)\b|torch\.load\(|allow_pickle=True"


def test_no_pickle_is_loaded() -> None:
    packages = ("fl_admm_strategies", "clients", "simulations")
    files = [path for package in packages for path in ROOT.glob(f"{package}/**/*.py")]
    assert len(files) > 40
    texts = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in files}
    assert {path for path, text in texts.items() if re.search(LOADS, text, re.M)} == TRUSTED
