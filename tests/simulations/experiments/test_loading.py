"""What an experiment file becomes, and what is said of one that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fl_admm_strategies import L1
from simulations.experiments.loading import changed_settings, load_settings
from simulations.methods import METHODS
from tests.simulations.quick_runs import EXPERIMENTS
from tests.support.refusals import refused


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_and_profile_builds_its_methods(name: str, tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    for profile in ("", *load_settings(name).profiles):
        settings = load_settings(name, profile=profile)
        path.write_text(settings.to_toml(), encoding="utf-8")
        assert load_settings(str(path)) == settings
        tables: dict[str, Any] = {settings.algorithm.name: settings.algorithm}
        for method, table in (tables | settings.baselines.methods()).items():
            strategy = table.build()
            assert type(strategy) is METHODS[method]
            for parameter, value in table.arguments().items():
                assert getattr(strategy, parameter) == value


def test_a_profile_and_changes_apply_in_this_order() -> None:
    settings: Any = load_settings(
        "synthetic-s1",
        profile="quick",
        changes=[
            "training.num-rounds=7",  # over the profile's 60
            "algorithm.penalty.type=l1",  # a bare word is text
            "algorithm.penalty.lam=0.7",
            'model.name = "linear"',
            "data.options={num_clients = 10}",
        ],
        seed=5,
    )
    assert settings.training.num_rounds == 7
    assert settings.training.evaluate_every == 10  # the profile's
    assert settings.algorithm.build().penalty == L1(0.7)
    assert settings.model.name == "linear"
    assert settings.data.options == {"num_clients": 10}
    assert settings.seed == 5


def test_what_a_resumed_run_says_has_changed() -> None:
    before = load_settings("mnist-swap")
    changes = ["algorithm.lr.factor=0.8", "client.device=cuda", "report.metrics=['f1']"]
    changes += ["baselines.fedavg.lr=0.1"]  # they run anew in any case
    assert changed_settings(before, load_settings("mnist-swap", changes=changes)) == [
        "algorithm.lr.factor 0.8 (was 0.9)",
        "client.device cuda (was cpu)",
        "report.metrics ('f1',) (was ())",
    ]


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experiment", "change", "named"),
    [
        ("digits-fpfc", "nonsense.key=1", ["nonsense", "title", "seed", "data"]),
        ("digits-fpfc", "training.num-rounds=0", ["training.num-rounds", 0]),
        ("digits-fpfc", "training.rounds=3", ["training.rounds", "num-rounds"]),
        ("digits-fpfc", "report.metrics=['f2']", ["report.metrics.0", "f2", "auc"]),
        ("digits-fpfc", "algorithm.name=fpcf", ["fpcf", "fpfc"]),
        ("digits-fpfc", "data.name=.:", ["module:function"]),
        ("digits-fpfc", "algorithm={ lr = 1 }", ["algorithm.name", "ditto", "fpfc"]),
        ("fedadmm-digits", "algorithm.penalty.lam=1", ["algorithm.penalty", "FedADMM"]),
        ("fedgia-v1", "baselines.fedavg={}", ["synthetic-v1", "fedavg", "FederatedData"]),
        ("movielens-100k", "data={name = 'digits'}", ["digits", "fedmc-admm", "RatingsData"]),
        ("movielens-100k", "baselines.fedease={}", ["fedease", "model.headline", "ndcg"]),
    ],
)
def test_a_change_that_cannot_be_is_refused(
    experiment: str, change: str, named: list[object]
) -> None:
    with refused(ValueError, *named):
        load_settings(experiment, changes=[change])


def test_all_mistakes_are_named_at_once() -> None:
    changes = ["algorithm.lambda=1", "training.num-rounds=0", "client.devise=cpu"]
    with refused(ValueError, "algorithm.lambda", "training.num-rounds", "client.devise"):
        load_settings("digits-fpfc", changes=changes)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    with refused(ValueError, path):
        load_settings(str(path))
    path.write_text("title = ", encoding="utf-8")
    with refused(ValueError, path):
        load_settings(str(path))
    path.write_text("title = 'mine'", encoding="utf-8")
    with refused(ValueError, "data", "training"):
        load_settings(str(path))
    text = load_settings("digits-fpfc").to_toml()
    model = text[text.index("[model]") : text.index("[training]")]
    path.write_text(text.replace(model, ""), encoding="utf-8")
    with refused(ValueError, "[model]", "digits-swap"):
        load_settings(str(path))
    with refused(ValueError, "digits-fpcf", "digits-fpfc"):
        load_settings("digits-fpcf")
    with refused(ValueError, "synthetic-s1", "fast", "clustered", "quick"):
        load_settings("synthetic-s1", profile="fast")
