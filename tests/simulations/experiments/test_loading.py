"""What an experiment file becomes, and what is said of one that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fl_admm_strategies import FPFC, L1, SmoothedSCAD, StepDecay
from simulations.experiments.catalogue import experiment_names
from simulations.experiments.loading import changed_settings, load_settings
from simulations.methods import METHODS
from simulations.settings.tables import Settings, published_rows, setting_of

NAMES = experiment_names()


def test_the_experiments_of_the_papers_are_there() -> None:
    assert set(NAMES) >= {
        "digits-fpfc",
        "ditto-digits",
        "fashion-mnist-swap",
        "housing-bodyfat",
        "mnist-swap",
        *(f"synthetic-s{k}" for k in range(1, 6)),
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_and_profile_builds_its_methods(name: str) -> None:
    for profile in ("", *load_settings(name).profiles):
        settings = load_settings(name, profile=profile)
        tables: dict[str, Any] = {settings.algorithm.name: settings.algorithm}
        for method, table in (tables | settings.baselines.methods()).items():
            strategy = table.build()
            assert type(strategy) is METHODS[method]
            for parameter, value in table.arguments().items():
                assert getattr(strategy, parameter) == value


@pytest.mark.parametrize("name", NAMES)
def test_settings_survive_their_file(name: str, tmp_path: Path) -> None:
    settings = load_settings(name)
    path = tmp_path / "experiment.toml"
    path.write_text(settings.to_toml(), encoding="utf-8")
    assert load_settings(str(path)) == settings


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


def test_what_was_run_has_its_malicious_and_its_new_clients() -> None:
    changes = ["attack={ kind = 'sign-flip', ratio = 0.4 }", "newcomers.share=0.2"]
    setting = setting_of(load_settings("mnist-swap", changes=changes))
    assert "attack.kind=sign-flip, attack.ratio=0.4" in setting
    assert "newcomers.share=0.2" in setting
    plain = setting_of(load_settings("mnist-swap"))
    assert "attack" not in plain
    assert "newcomers" not in plain


def test_the_rate_decays_every_five_rounds_from_the_first() -> None:
    # Section 6.1: 0.01 times 0.9 every 5 rounds. The paper's round 0 is Flower's round 1, so rounds
    # 1 to 5 have the full rate (docs/methods/fpfc.md, P5).
    strategy = load_settings("mnist-swap").algorithm.build()
    assert strategy.lr == StepDecay(0.01, factor=0.9, every=5)
    rates = [strategy.lr(k) for k in (1, 5, 6, 10, 11)]
    assert rates == pytest.approx([0.01, 0.01, 0.009, 0.009, 0.0081])
    quick = load_settings("mnist-swap", profile="quick").algorithm.build()
    assert quick.lr == 0.05  # a number takes the place of the table


def test_the_strategy_is_what_the_table_says() -> None:
    strategy = load_settings("digits-fpfc").algorithm.build(seed=3)
    expected = FPFC(rho=1.0, lr=0.3, local_epochs=10, seed=3)
    assert strategy.settings() == expected.settings()
    strategy = load_settings("synthetic-s1").algorithm.build(seed=3)
    expected = FPFC(SmoothedSCAD(0.6), rho=1.0, lr=0.1, local_epochs=10, seed=3)
    assert strategy.settings() == expected.settings()


def test_the_settings_of_fedapm_stand_beside_the_plain_loss() -> None:
    # The paper's rho = 0.01 and its code's sigma = 0.01 and 0.1 or 0.5 for lr, beside f_i/m; and
    # lambda/2 |.|^2 with lambda = 0.01 in f_i.
    for name, clients, lr in (("fedapm-cifar10", 20, 0.1), ("fedapm-har", 30, 0.5)):
        own: Any = load_settings(name).algorithm
        assert (own.rho, own.sigma) == (0.01 * clients, 0.01 * clients)
        assert own.lr == lr / clients
        assert load_settings(name).training.weight_decay == 0.01
        assert load_settings(name, profile="quick").training.weight_decay == 0


def test_published_rows_are_plain_numbers_without_gaps() -> None:
    rows = published_rows(load_settings("synthetic-s1"))
    # Table 1, S1.
    assert rows["FPFC"] == {"acc": 89.46, "acc_std": 4.0, "num": 4.0, "ari": 1.0, "cost": 7.33e7}
    assert rows["LOCAL"] == {"acc": 84.97, "acc_std": 6.0, "cost": 0.0}


def test_what_a_resumed_run_says_has_changed() -> None:
    before = load_settings("mnist-swap")
    changes = ["algorithm.lr.factor=0.8", "client.device=cuda", "report.metrics=['f1']"]
    changes += ["baselines.fedavg.lr=0.1"]  # they run anew in any case
    assert changed_settings(before, load_settings("mnist-swap", changes=changes)) == {
        "algorithm.lr.factor": "0.8 (was 0.9)",
        "client.device": "cuda (was cpu)",
        "report.metrics": "('f1',) (was ())",
    }


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["nonsense.key=1"], "nonsense: there is no such setting[.] Known: title, seed, data"),
        (
            ["training.num-rounds=0"],
            "training.num-rounds is 0, expected greater than or equal",
        ),
        (["training.num-rounds=2.5"], "training.num-rounds is 2.5, expected an integer"),
        (["training.fraction-train=0"], "training.fraction-train is 0, expected"),
        (["training.fraction-train=1.5"], "training.fraction-train is 1.5, expected"),
        (["training.batch-size=0"], "training.batch-size is 0, expected"),
        (["training.momentum=1"], "training.momentum is 1, expected"),
        (["training.rounds=3"], "training.rounds: .* Did you mean 'num-rounds'[?]"),
        (["data.name=digit"], "unknown data set 'digit'. Did you mean 'digits'"),
        (["lam"], "'lam' is not section.key=value, e.g. algorithm.lr=0.1"),
        (["algorithm.lr.x=1"], "'algorithm.lr.x': 'lr' is a value, not a section"),
        (["model={}"], "model.name: is missing"),
        (["report.metrics=['f2']"], r"report.metrics.0 is 'f2', expected 'f1', 'macro-f1' or 'a"),
    ],
)
def test_a_bad_change_is_refused(changes: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_settings("digits-fpfc", changes=changes)


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"(?s)num-rounds.*lambda.*penalty.xi"):
        load_settings(
            "digits-fpfc",
            changes=["algorithm.lambda=1", "training.num-rounds=0", "algorithm.penalty.xi=no"],
        )


def test_the_settings_of_another_method_are_unknown() -> None:
    with pytest.raises(ValueError, match=r"algorithm.penalty: is not a parameter of FedADMM"):
        load_settings("fedadmm-digits", changes=["algorithm.penalty.lam=1"])
    with pytest.raises(
        ValueError, match=r"report.sweep: there is no such setting[.] Known: metrics"
    ):
        load_settings("fedadmm-digits", changes=["report.sweep=[1]"])


def test_an_unknown_method_is_answered_with_what_was_meant() -> None:
    with pytest.raises(ValueError, match=r"unknown algorithm 'fpcf'. Did you mean 'fpfc' .*Known"):
        load_settings("digits-fpfc", changes=["algorithm.name=fpcf"])
    with pytest.raises(ValueError, match=r"algorithm.name: is missing. Known: .*ditto.*fpfc"):
        load_settings("digits-fpfc", changes=["algorithm={ lr = 1 }"])
    with pytest.raises(ValueError, match=r"unknown baseline 'fedprx'. Did you mean 'fedprox'"):
        load_settings("digits-fpfc", changes=["baselines.fedprx={}"])


@pytest.mark.parametrize(
    ("experiment", "changes", "message"),
    [
        (
            "fedgia-v1",
            ["baselines.fedavg={}"],
            "data set 'synthetic-v1' is TabularData, baseline 'fedavg' learns from FederatedData: ",
        ),
        (
            "movielens-100k",
            ["data={name = 'digits'}"],
            "data set 'digits' is FederatedData, algorithm 'fedmc-admm' learns from RatingsData",
        ),
        (
            "digits-fpfc",
            ["data={name = 'synthetic-ratings'}"],
            "data set 'synthetic-ratings' is RatingsData, algorithm 'fpfc' learns from FederatedD",
        ),
        (
            "fedgia-v1",
            ["training.fraction-train=0.5"],
            "training.fraction-train is 0.5, but all clients of 'fedgia' train in every round",
        ),
        ("fedgia-v1", ["training.batch-size=8"], r"leave training.batch-size out"),
        ("fedgia-v1", ['model.name="softmax"'], r"linear model .*: leave \[model\] out"),
        ("movielens-100k", ["training.momentum=0.5"], r"ratings, .* leave training.momentum out"),
    ],
)
def test_tables_that_do_not_go_together_are_refused(
    experiment: str, changes: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_settings(experiment, changes=changes)


@pytest.mark.parametrize("name", ["digits-fpfc", "movielens-100k"])
def test_an_experiment_without_a_model_is_refused(name: str, tmp_path: Path) -> None:
    text = load_settings(name).to_toml()
    path = tmp_path / "mine.toml"
    model = text[text.index("[model]") : text.index("[training]")]
    path.write_text(text.replace(model, ""), encoding="utf-8")
    with pytest.raises(ValueError, match=r"^\[model\] is missing: data set '"):
        load_settings(str(path))


def test_an_unknown_experiment_is_answered_with_what_was_meant() -> None:
    with pytest.raises(ValueError, match=r"'digits-fpcf'. Did you mean 'digits-fpfc'\?.* Known: "):
        load_settings("digits-fpcf")


def test_an_unknown_profile_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"profile of synthetic-s1 'fast'.*Known: .*clustered.*quick"
    ):
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
