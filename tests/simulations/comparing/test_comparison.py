"""What a comparison may say, and which experiment a cell of it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simulations.comparing.cell import Cell, run
from simulations.comparing.compare import steps_of
from simulations.comparing.comparison import ComparisonPlan, read, space_of
from simulations.data import load
from tests.support.pace import fast
from tests.support.refusals import refused

FILE = """
experiment = "compare"
data = "digits-swap"
seeds = [3, 1, 4]
budget = 7
target = 80.0
[methods]
fedavg = {}
ditto = {}
weak = { name = "ditto", lam = 0.01 }
[tune]
lr = "log:0.01:1"
"weak.lam" = "linear:0.1:0.5"
[set]
"training.num-rounds" = 2
"ditto.lam" = 3.0
"""


@pytest.fixture
def comparison(tmp_path: Path) -> ComparisonPlan:
    file = tmp_path / "mine.toml"
    file.write_text(FILE, encoding="utf-8")
    return read(file, {})


def test_a_file_and_the_command_line_say_the_same(
    comparison: ComparisonPlan, tmp_path: Path
) -> None:
    options = {
        "methods": ["fedavg", "ditto", "weak=ditto"],
        "data": "digits-swap",
        "seeds": [3, 1, 4],
        "tune": {"lr": "log:0.01:1", "weak.lam": "linear:0.1:0.5"},
        "budget": 7,
        "target": 80.0,
        "set": {"training.num-rounds": 2, "ditto.lam": 3.0, "weak.lam": 0.01},
    }
    spoken = read(None, options)
    for alias in comparison.methods:
        assert spoken.spaces_of(alias) == comparison.spaces_of(alias)
        assert spoken.raw_settings(alias, 1, {}) == comparison.raw_settings(alias, 1, {})
    again = tmp_path / "again.toml"
    again.write_text(comparison.to_toml(), encoding="utf-8")
    assert read(again, {}) == comparison
    # An option stands before what the file has.
    assert read(again, {"seeds": 2}).all_seeds == (0, 1)


def test_all_methods_have_the_same_experiment_but_for_their_table(
    comparison: ComparisonPlan,
) -> None:
    found = {alias: comparison.raw_settings(alias, 4, {}) for alias in comparison.methods}
    tables = {alias: raw.pop("baselines") for alias, raw in found.items()}
    assert found["fedavg"] == found["ditto"] == found["weak"]
    assert found["fedavg"]["seed"] == 4
    assert found["fedavg"]["training"]["num-rounds"] == 2
    assert tables["fedavg"] == {"fedavg": {}}
    assert tables["ditto"]["ditto"]["lam"] == 3.0
    assert tables["weak"]["ditto"]["lam"] == 0.01
    assert comparison.raw_settings("weak", 4, {"lam": 0.2})["baselines"]["ditto"]["lam"] == 0.2
    assert comparison.raw_settings("weak", 4, {}) == found["weak"] | {"baselines": tables["weak"]}


def test_some_methods_of_a_comparison_have_the_cells_of_the_whole(
    comparison: ComparisonPlan,
) -> None:
    part = comparison.only(["weak"])
    assert [*part.methods] == ["weak"]
    part.check()  # nothing is said of a method that is not there
    assert part.raw_settings("weak", 4, {}) == comparison.raw_settings("weak", 4, {})
    assert part.spaces_of("weak") == comparison.spaces_of("weak")
    with refused(ValueError, "'dito'", "'ditto'"):
        comparison.only(["dito"])


def test_a_sweep_has_every_combination_of_its_values() -> None:
    options = {
        "methods": ["fedavg", "ditto", "fedprox"],
        "set": {"attack.kind": "gaussian"},
        "sweep": {"attack.ratio": [0, 0.2], "lam": [0.1, 3]},
    }
    comparison = read(None, options)
    points = comparison.points
    assert points == [{"attack.ratio": r, "lam": lam} for r in (0, 0.2) for lam in (0.1, 3)]
    found = {
        alias: [comparison.raw_settings(alias, 0, {}, point) for point in points]
        for alias in comparison.methods
    }
    for raws in found.values():
        assert [raw["attack"]["ratio"] for raw in raws] == [0, 0, 0.2, 0.2]
    assert [raw["baselines"]["ditto"]["lam"] for raw in found["ditto"]] == [0.1, 3, 0.1, 3]
    # A method that has no such setting runs once.
    assert found["fedavg"][0] == found["fedavg"][1] != found["fedavg"][2]
    assert read(None, {"methods": ["ditto"]}).points == [{}]


def test_spaces_are_of_who_has_the_setting(comparison: ComparisonPlan) -> None:
    pytest.importorskip("optuna")
    lr = space_of("lr", "log:0.01:1")
    assert comparison.spaces_of("fedavg") == {"lr": lr}
    assert comparison.spaces_of("weak") == {"lr": lr, "lam": space_of("lam", "linear:0.1:0.5")}
    own = read(None, {"methods": ["local"], "tune": {"lr": "log:0.1:1", "local.lr": "log:0.2:1"}})
    assert own.spaces_of("local") == {"lr": space_of("lr", "log:0.2:1")}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"methods": ["dito"]}, ["dito", "ditto"]),
        ({"methods": ["ditto", "ditto"]}, ["methods", "ditto", "alias"]),
        ({"methods": ["data=ditto"]}, ["data", "alias"]),
        ({"methods": ["ditto"], "seeds": 0}, ["seeds", 0]),
        ({"methods": ["ditto"], "sede": 3}, ["sede", "seeds"]),
        ({"methods": ["ditto"], "tune": {"mu": "log:0.1:1"}}, ["tune", "mu"]),
        ({"methods": ["ditto"], "tune": {"lr": "log:0:1"}}, ["tune", "lr", "log:0:1"]),
        ({"methods": ["ditto"], "tune": {"ditto.lam": "linear:-1:1"}}, ["lam"]),
        ({"methods": ["ditto"], "set": {"trainig.num-rounds": 1}}, ["trainig", "training"]),
        ({"methods": ["ditto"], "set": {"data.options": {"cleints": 3}}}, ["cleints", "clients"]),
        ({"methods": ["ditto"], "sweep": {"lam": [1, -1]}}, ["lam", -1.0]),
        (
            {"methods": ["ditto"], "sweep": {"lam": [1]}, "tune": {"lam": "log:0.1:1"}},
            ["tune", "sweep", "lam"],
        ),
        ({"methods": ["ditto"], "work": 5, "sweep": {"local-epochs": [1]}}, ["epochs", "work"]),
        ({"methods": ["fedmavg"]}, ["fedmavg", "digits-swap"]),
    ],
)
def test_what_cannot_be_run_is_said_at_once(options: dict[str, Any], named: list[str]) -> None:
    with refused(ValueError, *named):
        read(None, options)


def test_a_cells_file_is_named_by_all_that_its_numbers_follow_from(
    comparison: ComparisonPlan, tmp_path: Path
) -> None:
    def path(alias: str, seed: int, tuned: dict[str, Any], *of_cell: Any) -> Path:
        raw = comparison.raw_settings(alias, seed, tuned)
        return Cell(alias, "ditto", raw, *(of_cell or (True, False)), None).path(tmp_path)

    same, *others = [
        path("weak", 3, {"lam": 0.2}),
        path("weak", 4, {"lam": 0.2}),
        path("weak", 3, {"lam": 0.3}),
        path("weak", 3, {"lam": 0.2}, True, True),
        path("weak", 3, {"lam": 0.2}, False, False),
        path("ditto", 3, {"lam": 0.2}),
    ]
    assert path("weak", 3, {"lam": 0.2}) == same
    assert len({same, *others}) == 6


def test_every_method_has_the_same_trials_on_validation_and_the_best_is_taken(
    comparison: ComparisonPlan,
) -> None:
    pytest.importorskip("optuna")
    for alias in comparison.methods:
        steps = steps_of(comparison, alias, None)
        batch, trials = next(steps), []
        while batch[0].on_validation:
            trials += batch
            # A score that falls with the distance from 0.3; one trial of each batch fails.
            found: list[dict[str, Any]] = [{"error": "diverged"}]
            for cell in batch[1:]:
                lr = next(iter(cell.raw["baselines"].values()))["lr"]
                score = {"mean": 1 - abs(lr - 0.3)}
                found.append({"metric": "accuracy", "models": {"m": score}})
            batch = steps.send(found)
        assert len(trials) == comparison.budget
        assert {cell.seed for cell in trials} == {3}
        assert all(cell.held_out for cell in (*trials, *batch))
        assert [cell.seed for cell in batch] == [3, 1, 4]
        drawn = [next(iter(cell.raw["baselines"].values()))["lr"] for cell in trials]
        valid = [lr for place, lr in enumerate(drawn) if place % 5]
        best = min(valid, key=lambda lr: abs(lr - 0.3))
        chosen = {next(iter(cell.raw["baselines"].values()))["lr"] for cell in batch}
        assert chosen == {best}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "lengths"),
    {
        "pfedme": ("local-rounds",),
        "ditto": ("local-epochs", "personal-epochs"),
        "perfedavg": ("local-steps",),
    }.items(),
)
def test_local_work_is_alike_as_near_as_the_settings_allow(
    method: str, lengths: tuple[str, ...]
) -> None:
    options = {"methods": [method], "seeds": 1, "work": 4, "set": {"training.num-rounds": 4}}
    comparison = read(None, options)
    assert comparison.lengths_of(method) == lengths
    steps = steps_of(comparison, method, None)
    gauged = [run(cell) for cell in next(steps)]
    (cell,) = steps.send(gauged)
    length = {cell.raw["baselines"][method][name] for name in lengths}
    assert len(length) == 1
    one_more = gauged[1]["passes"][-1] - gauged[0]["passes"][-1]
    assert run(cell)["passes"][-1] == pytest.approx(4, abs=one_more / 2 + 1e-9)


ROOT = Path(__file__).parents[3]
FILES = [f for f in sorted((ROOT / "docs").rglob("*.toml")) if f.name != "experiment.toml"]
FAST = ("digits-swap.toml",)


@pytest.mark.parametrize("file", fast(FAST, FILES))
def test_the_comparisons_of_the_documents_can_be_run(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = 'experiment = "experiment.toml"' in file.read_text(encoding="utf-8")
    monkeypatch.chdir(file.parent if beside else ROOT)  # where their commands are given
    comparison = read(file, {})
    data = comparison.raw_settings(next(iter(comparison.methods)), 1, {})["data"]
    if data["name"].startswith("digits"):  # the others need files
        assert load(data["name"], 1, None, **data.get("options", {})).clients
