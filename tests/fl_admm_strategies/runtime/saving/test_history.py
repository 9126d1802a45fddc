"""What was measured is in a file beside the checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, MetricRecord

from fl_admm_strategies.runtime.saving.history import History
from tests.support.checkpoints import ROUNDS, Killed, killer, new_strategy, start
from tests.support.federation import assert_same_bits
from tests.support.refusals import refused


def entry(server_round: int, loss: float = 0.5) -> dict[str, Any]:
    clients = {"0": {"loss": loss}, "7": {"loss": 2 * loss}}
    means = [{"loss": 1.5 * loss}, {}, {"per-class": [0.5, 0.25]}]
    return {
        "round": server_round,
        "traffic": [8, 4],
        "train": clients,
        "evaluate": None,
        "result": means,
    }


# --- The file -----------------------------------------------------------------------------------


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_every_line_is_strict_json_and_what_is_not_finite_is_read_back(tmp_path: Path) -> None:
    history, whole = History(tmp_path / "history.jsonl"), entry(1)
    means = [{"loss": math.inf}, {}, {"per-class": [0.5, -math.inf]}]
    diverged = {**entry(2, loss=math.nan), "result": means}
    history.append(whole)
    history.append(diverged)
    lines = history.path.read_text().splitlines()
    plain, strict = (json.loads(line, parse_constant=refuse_constant) for line in lines)
    assert plain == whole
    assert strict["train"] == {"0": {"loss": None}, "7": {"loss": None}}
    assert strict["result"] == [{"loss": "Infinity"}, {}, {"per-class": [0.5, "-Infinity"]}]
    assert repr([*history.entries()]) == repr([whole, diverged])


@pytest.mark.parametrize("torn", ["", '{"round": 5, "tra', '{"round": 5}', "?\n", "[5]\n"])
def test_a_checkpoint_goes_on_from_where_it_was(torn: str, tmp_path: Path) -> None:
    history = History(tmp_path / "history.jsonl")
    for server_round in range(4):
        history.append(entry(server_round))
    history.append(entry(4, loss=9.0))  # of rounds after the checkpoint, which a kill has ended
    with history.path.open("a") as file:
        file.write(torn)
    again = History(history.path)
    again.open(3)
    assert again.last_round == 3
    again.append(entry(4, loss=1.0))
    again.append(entry(5))
    expected = [*(entry(r) for r in range(4)), entry(4, loss=1.0), entry(5)]
    assert [json.loads(line) for line in history.path.read_text().splitlines()] == expected
    assert [*again.entries()] == expected


# --- Runs ---------------------------------------------------------------------------------------


@pytest.fixture
def folders(copy: Path) -> dict[str, Any]:
    """Return the options that continue a copy of a run of 4 rounds."""
    return {"state_dir": copy / "clients", "checkpoint_dir": copy / "checkpoints"}


def test_a_damaged_history_does_not_lose_the_state(folders, whole, warned, caplog):
    path = folders["checkpoint_dir"] / "history.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], "?", *lines[3:]]))  # rounds 0 to 4
    strategy = new_strategy()
    start(strategy, ROUNDS, resume=True, **folders)
    assert_same_bits(strategy.state_dict(), whole[1])
    assert sorted(strategy.train_metrics) == [1, 2, 5, 6]
    assert warned() == warned("history", "round 2", "lost")
    caplog.clear()
    again = new_strategy()
    start(again, ROUNDS, resume=True, **folders)
    assert warned() == []
    assert again.train_metrics == strategy.train_metrics


# --- The user's functions -----------------------------------------------------------------------


class Fault(Exception):  # noqa: N818 - what a user's function may raise
    pass


@pytest.mark.parametrize("name", ["evaluate_fn", "stop", "on_round"])
def test_a_function_that_raises_loses_no_round_that_is_saved(
    name: str, tmp_path: Path, whole: Any
) -> None:
    def function(server_round: int, _: Any) -> None:
        if server_round == 4:
            raise Fault(name)

    folder: dict[str, Any] = {
        "state_dir": tmp_path / "clients",
        "checkpoint_dir": tmp_path / "checkpoints",
    }
    function_of_users: dict[str, Any] = {name: function}
    with pytest.raises(Fault, match=name):
        start(new_strategy(), ROUNDS, **folder, **function_of_users)
    saved = 4 if name == "on_round" else 3
    assert f"round-00000{saved}" in {p.stem for p in folder["checkpoint_dir"].glob("round-*")}
    seen: list[int] = []
    strategy = new_strategy()
    start(strategy, ROUNDS, resume=True, on_round=lambda number, _: seen.append(number), **folder)
    assert seen == list(range(saved, ROUNDS + 1))  # the last one is reported again
    assert_same_bits(strategy.state_dict(), whole[1])


@pytest.mark.parametrize("value", [2**62, float("nan"), [], [0.5, float("-inf")]])
def test_any_metric_that_flower_allows_is_put_back(value: Any, tmp_path: Path) -> None:
    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"value": value})

    options: dict[str, Any] = {"checkpoint_dir": tmp_path, "evaluate_fn": evaluate}
    with pytest.raises(Killed):
        start(new_strategy(), 3, on_round=killer(3), **options)
    central = start(new_strategy(), 3, resume=True, **options).evaluate_metrics_serverapp
    assert [repr(record["value"]) for record in central.values()] == [repr(value)] * 4
    options["evaluate_fn"] = lambda server_round, arrays: {"accuracy": 0.5}
    with refused(TypeError, "dict", "MetricRecord"):
        start(new_strategy(), 4, resume=True, **options)
