"""The command `compare` from end to end: interrupted, gone on with, and its page opened."""

from __future__ import annotations

import shutil
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
        (["mine.toml", "ditto"], ["mine.toml", "ditto"]),
        (["mine.toml"], ["mine.toml"]),
        (["ditto", "--tune", "lr"], ["lr"]),
        (["ditto", "--tune", "lr=0.1"], ["tune", "lr", "0.1"]),
        (["ditto", "--set", "ditto.lam=-1"], ["lam"]),
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
def test_an_interrupted_comparison_of_own_data_goes_on_and_its_page_opens(tmp_path: Path) -> None:
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
    assert first.stdout is not None
    said = [first.stdout.readline() for _ in range(4)]
    first.send_signal(signal.SIGINT)
    assert first.wait(60) == 130
    first.stdout.close()
    assert names(said[-1], "4/12", "left")
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

    page = tmp_path / "cmp" / "report.html"
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("all but the last: there is no browser to open the page with")
    opened = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", str(page)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=environment | {"HOME": str(tmp_path)},
    )
    assert names(opened.stdout, "3 methods on mine, 2 seeds", "Holm p", "Paired differences")
    assert opened.stdout.count("<img ") == 3
