from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path

from simulations.experiments.experiment import RunConfig, read_run_config


def test_every_key_of_the_run_configuration_is_read() -> None:
    raw = {
        "experiment": "synthetic-s1",
        "profile": "quick",
        "set": "algorithm.lam=1.0;training.num-rounds=3",
        "seed": 0,
        "data-root": "/data",
        "out": "out",
        "resume": True,
    }
    changes = ("algorithm.lam=1.0", "training.num-rounds=3")
    assert read_run_config(raw) == RunConfig(
        "synthetic-s1", "quick", changes, 0, Path("/data"), Path("out"), True
    )


def test_the_app_config_of_the_project_is_the_default_experiment() -> None:
    root = Path(__file__).parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    defaults = project["tool"]["flwr"]["app"]["config"]
    assert read_run_config(defaults) == RunConfig("digits-fpfc")
    # `flwr run -c` takes only keys that stand there.
    assert {key.replace("-", "_") for key in defaults} == {
        {"changes": "set"}.get(field.name, field.name) for field in fields(RunConfig)
    }


def test_empty_changes_are_dropped() -> None:
    assert read_run_config({"set": " a.b=1 ; ;c.d=2;"}).changes == ("a.b=1", "c.d=2")
