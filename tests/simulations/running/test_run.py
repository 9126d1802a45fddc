"""What a run leaves behind, and that the default experiment shows what it is there to show."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from safetensors.numpy import load_file

from clients import LocalClient
from fl_admm_strategies import load_models
from simulations.experiments.experiment import RunConfig, load_experiment
from simulations.experiments.loading import load_settings
from tests.simulations.quick_runs import TINY, result_of, run
from tests.support.federation import assert_same_bits, differs
from tests.support.refusals import refused

SHORT = ("training.num-rounds=6", "training.evaluate-every=3")


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 6 rounds of the default experiment."""
    out = tmp_path_factory.mktemp("runs") / "default"
    return run(RunConfig("digits-fpfc", changes=SHORT, out=out))


@pytest.mark.slow
def test_the_default_experiment_finds_the_three_groups(tmp_path: Path) -> None:
    # An independent prototype: 3 groups exactly, 0.93 mean accuracy, 0.3 for one global model.
    default_run = run(RunConfig("digits-fpfc", out=tmp_path / "default"))
    result = result_of(default_run)
    assert [(row["num"], row["ari"]) for row in result["clustering"]] == [(3, 1.0)] * 4
    assert result["models"]["personal model"]["mean"] > 0.9
    assert result["models"]["cluster model"]["mean"] > 0.9
    assert result["models"]["one global model"]["mean"] < 0.4
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    said = [float(share) / 100 for share in re.findall(r"([\d.]+) % with", readme)]
    kinds = ("personal model", "one global model")
    assert said == pytest.approx([result["models"][kind]["mean"] for kind in kinds], abs=0.01)
    assert result["rounds"] == 200
    # lambda was found: three groups of the five groupings that were tried.
    search = result["search"]
    assert (search["last_round"], search["num_groups"][search["chosen"]]) == (27, 3)
    assert result["lam"] == pytest.approx(2 * result["nu"] / 3.7)
    # 10 x 64 weights and 10 biases. In the consensus 6 up and 6 down for 20 rounds,
    # the model that half of them start from with it where they have not trained yet; 12 both ways
    # for the probes, K models each for 5 rounds, and down only for the scores; 12 both ways and
    # two models down for the re-check, the group as it is and the client's half of it; then 6
    # both ways.
    candidates = len(search["num_groups"])
    search_sent = 12 + 2 * 12 + candidates * 12 * (2 * 5 + 1)
    recheck_sent = 2 * 12 + 2 * 12
    sent = 2 * 6 * 20 + search_sent + recheck_sent + 2 * 6 * (200 - 27 - 2)
    # Beyond that a client's own model goes down where it may not hold it: a twentieth at most.
    assert 650 * sent <= result["cost"] <= 1.05 * 650 * sent
    traffic = result["traffic"]
    assert result["cost"] == (traffic["down"] + traffic["up"]) // 4
    # Within a group the models agree, between groups they do not (heat map and embedding).
    models = load_file(default_run / "state.safetensors")["state/pairs/omega"]
    distances = np.linalg.norm(models[:, None] - models[None, :], axis=2)
    same = np.arange(12)[:, None] // 4 == np.arange(12)[None, :] // 4
    assert distances[same].max() < 0.5
    assert distances[~same].min() > 5


def test_a_run_leaves_its_files(short_run: Path) -> None:
    assert sorted(path.name for path in short_run.iterdir()) == [
        "checkpoints",
        "distances.png",
        "embedding.png",
        "experiment.toml",
        "metric.png",
        "metrics.jsonl",
        "models",
        "result.json",
        "state.safetensors",
    ]
    models = load_models(short_run)
    assert models.personal.keys() == models.cluster_of.keys() == set(range(12))
    state = load_file(short_run / "state.safetensors")
    strategy = load_experiment(RunConfig("digits-fpfc")).federation.strategy()
    strategy.load_state_dict(state)  # complete, or it raises
    (checkpoint,) = (short_run / "checkpoints").glob("*.safetensors")  # the run is over
    assert checkpoint.samefile(short_run / "state.safetensors")  # the bytes are there once
    omega = state["state/pairs/omega"]
    personal = [np.append(one["weight"], one["bias"]) for one in models.personal.values()]
    np.testing.assert_array_equal(personal, omega.astype(np.float32))
    assert load_settings(str(short_run / "experiment.toml")) == load_settings(
        "digits-fpfc", changes=SHORT
    )


@pytest.mark.slow
def test_the_written_experiment_gives_the_same_bits(
    tmp_path: Path,
) -> None:
    changes = (*TINY, "algorithm.rho=0.02")
    first = run(RunConfig("fedadmm-digits", changes=changes, seed=3, out=tmp_path / "a"), nodes=4)
    state = load_file(first / "state.safetensors")
    again = RunConfig(str(first / "experiment.toml"), out=tmp_path / "b")
    assert_same_bits(load_file(run(again, nodes=4) / "state.safetensors"), state)
    other_seed = RunConfig(str(first / "experiment.toml"), seed=4, out=tmp_path / "c")
    other = load_file(run(other_seed) / "state.safetensors")
    # Other clients were sampled, too: the seed is not only that of the data.
    assert not np.array_equal(other["base/train_rng"], state["base/train_rng"])
    assert differs(other, state)


@pytest.mark.slow
def test_a_baseline_that_fails_costs_nothing_but_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise ValueError("not with these data")

    changes = ("training.num-rounds=1", "baselines.local.lr=0.1", "baselines.fedprox.mu=0.1")
    config = RunConfig("digits-fpfc", changes=changes, out=tmp_path / "out")
    with monkeypatch.context() as broken:
        broken.setattr(LocalClient, "steps", fail)
        with refused(RuntimeError, "--resume", "local", "not with these data"):
            run(config)
    result = result_of(tmp_path / "out")
    assert result["models"]["personal model"]["mean"] > 0
    assert list(result["baselines"]) == ["FedProx"]
    again = run(replace(config, resume=True))
    assert result_of(again)["baselines"].keys() == {"FedProx", "Local"}
    assert result_of(again)["models"] == result["models"]


@pytest.mark.slow
def test_published_numbers_stand_beside_their_data_and_model_alone() -> None:
    def published(*changes: str) -> list[str]:
        return [*load_experiment(RunConfig("synthetic-s1", changes=changes)).settings.published]

    assert published("training.num-rounds=1", "algorithm.lr=0.01") == published() != []
    assert published("data.options={clients=8}") == []
    assert published("attack.kind=gaussian", "attack.ratio=0.2") == []
    for experiment, profile, is_theirs in (
        ("synthetic-s1", "paper", True),
        ("synthetic-s1", "l1", True),
        ("synthetic-s1", "newcomers", True),  # it has rows of its own
        ("synthetic-s1", "quick", False),
        ("synthetic-s1", "attack", False),
        ("fedgia-v1", "quick", True),  # it changes the report only
        ("fedgia-v1", "m96", False),
    ):
        found = load_experiment(RunConfig(experiment, profile=profile))
        assert bool(found.settings.published) == is_theirs, (experiment, profile)
