"""What a client keeps between rounds, and that it and the server never disagree about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, RecordDict

from clients.toolkit.round.memory import Memory
from tests.support.refusals import refused


def new_context() -> Context:
    return Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})


def value_of(held: dict[str, Any] | None) -> float | None:
    return None if held is None else float(held["u"][0])


def at(server_round: int, version: int) -> dict[str, Any]:
    return {"server-round": server_round, "version": version}


def kept(value: float) -> dict[str, np.ndarray]:
    return {"u": np.array([value]), "n": np.array(3)}


def test_an_accepted_round_is_recalled_and_a_lost_one_has_not_happened() -> None:
    context = new_context()
    context.state["mine"] = ConfigRecord({"a": 1})
    memory = Memory(context)
    assert memory.recall(at(1, 0)) is None  # at first it holds nothing
    memory.keep(at(1, 0), kept(1.0))
    assert memory.recall(at(2, 0)) is None  # a first round that was lost is a first round again
    held = memory.require(at(2, 1))
    assert (held["u"].tolist(), held["n"]) == ([1.0], 3)
    memory.keep(at(2, 1), kept(2.0))
    # The reply of round 2 is lost: in round 5 the server still takes it to be at round 1.
    assert value_of(memory.recall(at(5, 1))) == 1.0
    memory.keep(at(5, 1), kept(5.0))
    assert Memory(context).latest()["u"] == 5.0
    assert value_of(memory.recall(at(6, 5))) == 5.0
    # Not more than two rounds are kept, beside what others keep.
    assert sorted(context.state) == ["memory.1", "memory.5", "mine"]
    memory.keep(at(6, 5), kept(6.0))
    assert sorted(context.state) == ["memory.5", "memory.6", "mine"]


def test_where_the_server_sends_all_again_a_round_is_kept_alone() -> None:
    context = new_context()
    memory = Memory(context)
    for server_round, version in ((1, 0), (2, 1), (4, 2)):
        memory.keep(at(server_round, version), kept(server_round), resent=True)
        assert list(context.state) == [f"memory.{server_round}"]


def test_what_is_kept_is_a_copy() -> None:
    memory = Memory(new_context())
    arrays = kept(1.0)
    memory.keep(at(1, 0), arrays)
    arrays["u"][0] = 9
    assert memory.latest()["u"] == 1.0


def test_what_is_gone_is_named() -> None:
    memory = Memory(new_context())
    memory.keep(at(4, 3), kept(1.0))
    assert memory.require(at(5, 4))["u"] == 1.0
    assert memory.recall(at(5, 3)) is None
    with refused(ValueError, "[state-lost 2]", "round 3", "rounds [4]"):
        memory.require_known(at(5, 3))
    assert memory.require_known(at(5, 0)) is None
    with pytest.raises(RuntimeError):
        Memory(new_context()).latest()


# --- A folder -----------------------------------------------------------------------------------


def saving(server_round: int, version: int, *durable: int, run: str = "a") -> dict[str, Any]:
    return {**at(server_round, version), "durable": json.dumps(durable), "run": run}


def test_a_folder_outlives_the_context_and_keeps_what_the_server_could_go_back_to(
    tmp_path: Path,
) -> None:
    Memory(new_context(), tmp_path).keep(saving(1, 0), kept(1.0))
    Memory(new_context(), tmp_path).keep(saving(2, 1, 0), kept(2.0))
    Memory(new_context(), tmp_path).keep(saving(5, 2, 1, 2), kept(5.0))
    Memory(new_context(), tmp_path).keep(saving(6, 5, 1, 2), kept(6.0))
    memory = Memory(new_context(), tmp_path)
    held = [value_of(memory.recall(saving(7, version, 1, 2))) for version in range(8)]
    assert held == [None, 1.0, 2.0, None, None, 5.0, 6.0, None]
    memory.keep(saving(9, 6, 5, 6), kept(9.0))
    held = [value_of(memory.recall(saving(7, version, 1, 2))) for version in range(10)]
    assert held == [None, None, None, None, None, 5.0, 6.0, None, None, 9.0]
    assert memory.latest()["u"] == 9.0
    # A context ends with the run, so it keeps no more than it must; files are each client's own.
    context = new_context()
    Memory(context).keep(saving(5, 2, 1, 2), kept(5.0))
    Memory(context).keep(saving(6, 5, 1, 2, 5), kept(5.0))
    assert sorted(context.state) == ["memory.5", "memory.6"]
    other = Context(1, 2, {"partition-id": 7}, RecordDict(), {})
    assert Memory(other, tmp_path).recall(saving(7, 6)) is None
    Memory(other, tmp_path).keep(saving(7, 6), kept(7.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["client-2", "client-7"]


def test_what_another_run_left_in_a_folder_is_not_recalled(tmp_path: Path) -> None:
    memory = Memory(new_context(), tmp_path)
    memory.keep(saving(1, 0, run="a"), kept(1.0))
    assert memory.recall(saving(2, 1, run="b")) is None
    assert value_of(memory.recall(saving(2, 1, run="a"))) == 1.0


def test_a_damaged_file_counts_as_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory(new_context(), tmp_path)
    memory.keep(saving(1, 0), kept(1.0))
    (path,) = (tmp_path / "client-2").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert memory.recall(saving(2, 1)) is None
    assert "is damaged" in caplog.text
