from __future__ import annotations

from pathlib import Path

import pytest

from simulations.algorithms import ALGORITHMS
from simulations.settings import Settings, experiment_names, load_settings, published_rows

NAMES = experiment_names()


def is_fpfc(name: str) -> bool:
    return load_settings(name).algorithm.name == "fpfc"


def test_the_experiments_of_the_issue_are_there() -> None:
    assert set(experiment_names()) >= {
        "digits-fpfc",
        "fashion-mnist-swap",
        "housing-bodyfat",
        "mnist-swap",
        *(f"synthetic-s{k}" for k in range(1, 6)),
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_and_profile_is_complete(name: str) -> None:
    for profile in ("", *load_settings(name).profiles):
        settings = load_settings(name, profile=profile)
        assert type(settings.algorithm) is ALGORITHMS[settings.algorithm.name]


@pytest.mark.parametrize("name", [name for name in NAMES if is_fpfc(name)])
def test_every_experiment_of_fpfc_builds_its_strategy(name: str) -> None:
    for profile in ("", *load_settings(name).profiles):
        settings = load_settings(name, profile=profile)
        strategy = settings.algorithm.strategy(settings, None)
        assert strategy.rho == settings.algorithm.rho
        assert strategy.penalty.lam == settings.algorithm.lam


@pytest.mark.parametrize("name", NAMES)
def test_settings_survive_their_file(name: str, tmp_path: Path) -> None:
    settings = load_settings(name)
    path = tmp_path / "experiment.toml"
    path.write_text(settings.to_toml(), encoding="utf-8")
    assert load_settings(str(path)) == settings


def test_a_profile_and_changes_apply_in_this_order() -> None:
    settings = load_settings(
        "synthetic-s1",
        profile="quick",
        changes=[
            "training.num-rounds=7",  # over the profile's 60
            "algorithm.penalty=l1",  # a bare word is text
            'model.name = "linear"',
            "data.options={num_clients = 10}",
        ],
        seed=5,
    )
    assert settings.training.num_rounds == 7
    assert settings.training.evaluate_every == 10  # the profile's
    assert settings.algorithm.penalty == "l1"
    assert settings.model.name == "linear"
    assert settings.data.options == {"num_clients": 10}
    assert settings.seed == 5


def test_the_rate_decays_every_five_rounds_from_the_first() -> None:
    # Section 6.1: 0.01 times 0.9 every 5 rounds. The paper's round 0 is Flower's round 1, so rounds
    # 1 to 5 have the full rate.
    settings = load_settings("mnist-swap")
    lr = settings.algorithm.strategy(settings, None).lr
    assert callable(lr)
    assert [lr(k) for k in (1, 5, 6, 10, 11)] == pytest.approx([0.01, 0.01, 0.009, 0.009, 0.0081])


def test_published_rows_are_plain_numbers_without_gaps() -> None:
    rows = published_rows(load_settings("synthetic-s1"))
    # Table 1, S1.
    assert rows["FPFC"] == {"acc": 89.46, "acc_std": 4.0, "num": 4.0, "ari": 1.0, "cost": 7.33e7}
    assert rows["LOCAL"] == {"acc": 84.97, "acc_std": 6.0, "cost": 0.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["algorithm.lambda=1"], "algorithm.lambda: there is no such setting"),
        (["nonsense.key=1"], "nonsense: there is no such setting"),
        (["training.num-rounds=0"], "training.num-rounds: .*greater than or equal to 1, given 0"),
        (["training.num-rounds=2.5"], "training.num-rounds: .*given 2.5"),
        (["training.fraction-train=0"], "training.fraction-train: .*given 0"),
        (["training.fraction-train=1.5"], "training.fraction-train: .*given 1.5"),
        (["training.batch-size=0"], "training.batch-size: .*given 0"),
        (["algorithm.name=fpcf"], "unknown algorithm 'fpcf'. Did you mean 'fpfc'"),
        (["algorithm.penalty=ridge"], "algorithm.penalty: .*'scad', 'l1' or 'mcp', given 'ridge'"),
        (["algorithm.lr=fast"], "algorithm.lr: .*given 'fast'"),
        (["lam"], "'lam' is not section.key=value, e.g. algorithm.lam=1.0"),
        (["algorithm.lam.x=1"], "'algorithm.lam.x': 'lam' is a value, not a section"),
    ],
)
def test_a_bad_change_is_refused(changes: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_settings("digits-fpfc", changes=changes)


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"(?s)num-rounds.*lambda"):
        load_settings("digits-fpfc", changes=["algorithm.lambda=1", "training.num-rounds=0"])


def test_an_unknown_experiment_is_answered_with_what_was_meant() -> None:
    with pytest.raises(ValueError, match=r"'digits-fpcf'. Did you mean 'digits-fpfc'\? Known: "):
        load_settings("digits-fpcf")


def test_an_unknown_profile_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"profile of synthetic-s1 'fast'.*Known: quick"):
        load_settings("synthetic-s1", profile="fast")


def test_a_file_that_is_missing_or_no_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no experiment file .*mine[.]toml"):
        load_settings(str(tmp_path / "mine.toml"))
    (tmp_path / "mine.toml").write_text("title = ", encoding="utf-8")
    with pytest.raises(ValueError, match=r"mine[.]toml is not a TOML file"):
        load_settings(str(tmp_path / "mine.toml"))
    (tmp_path / "mine.toml").write_text("title = 'mine'", encoding="utf-8")
    with pytest.raises(ValueError, match=r"(?s)data: is missing.*training: is missing"):
        load_settings(str(tmp_path / "mine.toml"))


def test_settings_cannot_be_changed_behind_the_file() -> None:
    settings: Settings = load_settings("digits-fpfc")
    with pytest.raises(ValueError, match="frozen"):
        settings.seed = 3
