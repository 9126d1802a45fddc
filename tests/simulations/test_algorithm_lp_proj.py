"""Lp-Proj by ADMM in the app."""

import json
from pathlib import Path

import pytest

from simulations.config import RunConfig
from tests.simulations.test_run import run


def test_a_run_reports_personal_models_and_a_few_numbers_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = (
        "data.name=digits",
        "data.options={ clients = 4, samples = 400 }",
        "model.name=mlr",
        "training.num-rounds=4",
        "training.batch-size=20",
        "algorithm.lr=0.05",
        "algorithm.dimension=3",
    )
    folder = run(RunConfig("lp-proj-mnist", changes=changes, out=tmp_path / "run"))
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert list(result["models"]) == ["personal model"]
    # float32: 650 numbers of the model down to each client once, then 3 a client, both ways.
    assert result["traffic"]["up"] == 4 * 4 * (4 * 3)
    assert result["traffic"]["down"] == 4 * 4 * (4 * 3 + 650)
    shown = " ".join(capsys.readouterr().out.split())
    assert "in 3 numbers a client and round" in shown
