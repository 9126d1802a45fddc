"""Matrix completion in the app: its experiments, on made-up ratings and on MovieLens."""

import math
import os
from pathlib import Path

import pytest

from simulations.experiments.experiment import RunConfig
from simulations.experiments.loading import load_settings
from tests.simulations.quick_runs import result_of, rounds_of, run

ROOT = Path(os.environ.get("FL_ADMM_DATA", "~/.cache/fl-admm-strategies")).expanduser()
HERE = "data.name=synthetic-ratings"
OPTIONS = (
    "data.options={{ clients = 6, users = 120, items = 40, rank = 2, density = 0.6, "
    "rating_transform = '{}' }}"
)


def small(out: Path, *changes: str, transform: str = "none") -> RunConfig:
    changes = (
        HERE,
        OPTIONS.format(transform),
        "training.num-rounds=40",
        "training.fraction-train=0.5",
        "model.rank=3",
        "algorithm.regularizer={ type = 'l2', lam = 0.3 }",
        "client.regularizer={ type = 'l2', lam = 0.3 }",
        *changes,
    )
    return RunConfig("movielens-100k", changes=changes, out=out)


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["none", "zscore"])
def test_a_run_is_measured_in_stars(tmp_path: Path, transform: str) -> None:
    folder = run(small(tmp_path / "run", transform=transform))
    result = result_of(folder)
    federated = result["models"]["users' and items' factors"]["mean"]
    last = rounds_of(folder)[-1]
    assert federated == pytest.approx(last["result"][1]["rmse"], rel=1e-12)
    pooled = last["evaluate"].values()
    total = sum(reported["squared-error"] for reported in pooled)
    assert federated == pytest.approx(
        math.sqrt(total / sum(reported["test-ratings"] for reported in pooled)), rel=1e-12
    )
    # In stars whatever the transform, and close to the noise of 0.1, below which nobody gets.
    assert 0.1 < federated < 0.15


def test_ranking_heads_the_results_of_methods_that_predict_no_stars(tmp_path: Path) -> None:
    changes = (HERE, OPTIONS.format("none"), "algorithm.lam=20")
    ridge = "{ type = 'l2', lam = 3.0 }"
    changes += tuple(
        f"baselines.{name}.{part}={ridge}"
        for name in ("fedals", "fedmc-admm")
        for part in ("regularizer", "client.regularizer")
    )
    out = run(RunConfig("movielens-ranking", changes=changes, out=tmp_path / "run"))
    result = result_of(out)
    assert result["metric"] == "ndcg"
    (score,) = result["models"].values()
    assert score["mean"] == rounds_of(out)[-1]["result"][1]["ndcg"]
    assert len(result["baselines"]) == 2
    for row in result["baselines"].values():
        assert 0 < row["models"]["users' and items' factors"]["mean"] < 1


def test_the_two_presets_of_the_paper_and_its_code() -> None:
    paper, authors = (load_settings("movielens-1m", profile=name) for name in ("paper", "authors"))
    for settings in (paper, authors):
        assert settings.training.num_rounds == 100
        assert settings.training.fraction_train == 0.1  # 10 of 100
        assert settings.data.options["clients"] == 100
        assert settings.model.rank == 5
    assert "rating_transform" not in paper.data.options
    assert authors.data.options["rating_transform"] == "zscore"
    assert (authors.algorithm.beta, authors.algorithm.init_scale) == (1e4, 2e-4)  # type: ignore[attr-defined]
