"""The report of a path of lambdas: its table, and a run that has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulations.experiments.experiment import RunConfig, load_experiment
from simulations.experiments.loading import load_settings
from tests.simulations.quick_runs import result_of, rounds_of, run
from tests.support.refusals import refused

PATH = (
    'algorithm.penalty={type = "path", lams = [0, 0.5], min-rounds = 1, max-rounds = 2, tol = 9.0}'
)


def test_a_file_can_ask_for_a_path() -> None:
    settings = load_settings("digits-fpfc", changes=[PATH])
    path = settings.algorithm.penalty.build()
    assert path.lams == (0.0, 0.5)
    assert (path.max_rounds, path.monitor) == (2, "loss")
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
    assert result["path"]["last_rounds"] == [2, 4]
    assert result["rounds"] < 20  # the chosen one was at rest
    sent = sum(sum(line["traffic"]) for line in rounds_of(folder))
    assert result["cost"] == sent // 4  # one bill, in numbers of four bytes
