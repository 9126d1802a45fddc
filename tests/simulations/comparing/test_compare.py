"""The command `compare` from end to end: interrupted, gone on with, and its page opened."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simulations.comparing import cell as cells
from simulations.running import cli
from tests.support.refusals import names

ROOT = Path(__file__).parents[3]

OWN = """
import torch
from simulations.data import ClientData, FederatedData


def load(seed, root):
    generator = torch.Generator().manual_seed(seed)

    def samples(n, sign):
        x = torch.randn(n, 4, generator=generator)
        return x, (sign * x[:, 0] > 0).long()

    signs = [1, 1, -1, -1]
    clients = [ClientData(samples(30, sign), None, samples(20, sign)) for sign in signs]
    return FederatedData("mine", clients, None, "classification", (4,), 2)
"""


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["dito"], ["dito", "ditto"]),
        (["ditto", "--tune", "lr"], ["lr"]),
        (["ditto", "--tune", "lr=0.1"], ["tune", "lr", "0.1"]),
    ],
)
@pytest.mark.usefixtures("flower_logger_as_before")
def test_what_is_wrong_is_said_before_anything_runs(
    arguments: list[str], named: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(cli.cli, ["compare", *arguments, "--out", str(out)])
    assert result.exit_code == 1
    assert names(result.output, *named)
    assert not out.exists()


@pytest.mark.slow
def test_an_interrupted_comparison_of_own_data_goes_on_and_has_a_page(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    (tmp_path / "mine.py").write_text(OWN, encoding="utf-8")
    command = [sys.executable, "-m", "simulations", "compare", "ditto", "fedavg", "local"]
    command += ["--data", "mine:load", "--seeds", "2", "--tune", "lr=log:0.01:1", "--budget", "2"]
    command += ["--set", "training.num-rounds=2", "--out", "cmp", "--workers", "1"]
    environment = {"PYTHONPATH": f"{ROOT}:{':'.join(sys.path)}", "PATH": "/usr/bin:/bin"}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        )

    first = start()
    said = [first.stdout.readline() for _ in range(4)]
    first.send_signal(signal.SIGINT)
    assert first.wait(60) == 130
    first.stdout.close()
    assert said[-1].startswith("4 ")
    folder = tmp_path / "cmp" / "cells"
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    assert 4 <= len(kept) < 12

    second = start()
    output, _ = second.communicate(timeout=300)
    assert second.returncode == 0
    assert "there already" in output
    after = {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    assert len(after) == 12
    assert kept.items() <= after.items()
    found = [cells.read(path) for path in sorted(after)]
    assert all(one is not None and "error" not in one for one in found)

    page = (tmp_path / "cmp" / "report.md").read_text(encoding="utf-8")
    assert names(page, "3 methods on mine, 2 seeds", "Holm p", "Paired differences")


@pytest.mark.slow
@pytest.mark.usefixtures("flower_logger_as_before")
def test_a_worker_that_is_killed_is_a_row_with_its_reason_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As the system does for want of memory; with seed 1 alone.
    dying = "\n    if seed == 1 and os.path.exists('die'):\n        os.kill(os.getpid(), 9)"
    start = "def load(seed, root):"
    (tmp_path / "dying.py").write_text("import os\n" + OWN.replace(start, start + dying))
    (tmp_path / "die").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    arguments = ["compare", "fedavg", "local", "--data", "dying:load", "--seeds", "3"]
    arguments += ["--set", "training.num-rounds=1", "--out", "cmp"]
    result = CliRunner().invoke(cli.cli, arguments)
    assert result.exit_code == 1
    assert names(result.output, "2 cells failed", "signal 9", "memory")
    report = (tmp_path / "cmp" / "report.md").read_text(encoding="utf-8")
    for method in ("fedavg", "local"):
        assert re.search(rf"\| {method} \| 1 \| worker process \d+ was ended by signal 9", report)
    # What failed is run again by the same command, and nothing else.
    (tmp_path / "die").unlink()
    result = CliRunner().invoke(cli.cli, arguments)
    assert result.exit_code == 0, result.output
    assert result.output.count("there already") == 4
    assert "Failed cells" not in (tmp_path / "cmp" / "report.md").read_text(encoding="utf-8")
