"""The report of a path of lambdas: its table, and a run that has it."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fl_admm_strategies.algorithms.fpfc.path import PathTaken
from fl_admm_strategies.runtime.record import Traffic
from simulations.experiments.experiment import load_experiment
from simulations.experiments.loading import load_settings
from simulations.experiments.run_config import RunConfig
from simulations.reports.cluster_path import render_path
from tests.simulations.quick_runs import result_of, rounds_of, run
from tests.support.refusals import refused

# Six clients, three pairs; at the third lambda all of them are together, and it is the fourth's
# turn.
LABELS = np.array([[0, 0, 0], [1, 0, 0], [2, 1, 0], [3, 1, 0], [4, 2, 0], [5, 2, 0]])
TRUE = [0, 0, 1, 1, 2, 2]


def taken(chosen: int | None = 1) -> PathTaken:
    return PathTaken(
        lams=np.array([0.0, 0.5, 1.0, 2.0]),
        lam=0.5,
        chosen=chosen,
        values=np.array([0.8, 0.9, 0.7, np.nan]),
        last_rounds=np.array([10, 25, 30, 0]),
        labels=np.pad(LABELS, ((0, 0), (0, 1)), constant_values=-1),
        num_groups=np.array([6, 3, 1, 0]),
    )


def told(path: PathTaken, true: list[int] | None = TRUE) -> str:
    console = Console(width=80, record=True, file=StringIO())
    traffic = {r: Traffic(1_000_000, 500_000) for r in range(31)}
    for part in render_path(path, "accuracy", traffic, true):
        console.print(part)
    return console.export_text()


def test_the_table_has_a_row_for_every_lambda_that_was_tried() -> None:
    text = told(taken())
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "1-10", "0.8", "6", "0.00", "15"] in rows
    assert ["0.5", "*", "11-25", "0.9", "3", "1.00", "22.5"] in rows
    assert ["1", "26-30", "0.7", "1", "0.00", "7.5"] in rows
    assert not [row for row in rows if row[:1] == ["2"]]
    assert "chosen by the accuracy on held-out samples. All in all 46.5 MB were sent." in text
    assert "–" in told(taken(), None)
    assert "ended before a λ was chosen; its models are those at λ=0.5" in told(taken(None))


def test_a_grid_that_ends_too_early_is_said() -> None:
    text = told(replace(taken(), lams=np.array([0.0, 0.5]), last_rounds=np.array([10, 25])))
    assert "It is the largest of the grid: try larger ones." in " ".join(text.split())
    assert "the largest of the grid" not in told(taken())


PATH = (
    'algorithm.penalty={type = "path", lams = [0, 0.5], min-rounds = 1, max-rounds = 2, tol = 9.0}'
)


def test_a_file_can_ask_for_a_path() -> None:
    settings = load_settings("digits-fpfc", changes=[PATH])
    path = settings.algorithm.penalty.build()
    assert path.lams == (0.0, 0.5)
    assert (path.max_rounds, path.warm, path.monitor) == (2, True, "loss")
    assert 'type = "path"' in settings.to_toml()
    for bad in ("[1, 0.5]", "[]", '["a"]', "0.5"):
        change = f'algorithm.penalty={{type = "path", lams = {bad}}}'
        with refused(ValueError, "algorithm.penalty"):
            load_settings("digits-fpfc", changes=[change])


def test_a_run_ends_when_the_chosen_one_is_at_rest() -> None:
    for changes, stops in (((PATH,), True), ((), False)):
        experiment = load_experiment(RunConfig("digits-fpfc", changes=changes))
        strategy = experiment.federation.strategy()
        rule = experiment.report.stop_rule(strategy, experiment.problem)
        assert (rule is not None) is stops


@pytest.mark.slow
def test_a_run_has_the_path_in_its_result(tmp_path: Path) -> None:
    short = ("training.num-rounds=20", "training.evaluate-every=20", "algorithm.local-epochs=1")
    folder = run(RunConfig("digits-fpfc", changes=(PATH, *short), out=tmp_path / "out"))
    result = result_of(folder)
    assert result["path"]["lams"] == [0, 0.5]
    assert result["path"]["last_rounds"] == [2, 4]
    assert result["rounds"] < 20  # the chosen one was at rest
    sent = sum(sum(line["traffic"]) for line in rounds_of(folder))
    assert result["cost"] == sent // 4  # one bill, in numbers of four bytes
    assert any(row.startswith("clusters at ν=aλ=") for row in result["cells"])
