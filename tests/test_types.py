"""A type checker knows the constructors, which follow from annotated fields."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RIGHT = """
class Mine(Ditto):
    mine: float = 1.0
class ByHand(Ditto):
    def __init__(self, extra: float = 1.0, **base: Any) -> None:
        super().__init__(**base)
FPFC(LambdaPath([0.1]), lr=StepDecay(0.1, 0.9), seed=3)
FedAPM("head", lr=lambda server_round: 0.1)
Mine(mine=2.0, lam=3)
ByHand(2.0, lam=3)
"""
WRONG = """
Ditto(lamm=1)
Ditto(lam="x")
Ditto(1.0)
FedAPM()
FedAPM(3)
Ditto(lr=lambda server_round: "x")
AsyncFPFC(LambdaPath([0.1]))
"""


@pytest.mark.slow
def test_mypy_tells_right_from_wrong_settings(tmp_path: Path) -> None:
    names = "AsyncFPFC, Ditto, FedAPM, FPFC, LambdaPath, StepDecay"
    head = f"from typing import Any\nfrom fl_admm_strategies import {names}\n"
    lines = (head + RIGHT.strip() + "\n" + WRONG.strip()).splitlines()
    (tmp_path / "calls.py").write_text("\n".join(lines))
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        "pyproject.toml",
        "--no-error-summary",
    ]
    done = subprocess.run(
        [*command, "--follow-imports", "silent", str(tmp_path / "calls.py")],
        capture_output=True,
        text=True,
    )
    found = [int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line]
    first = len(lines) - len(WRONG.strip().splitlines()) + 1
    assert sorted(set(found)) == list(range(first, len(lines) + 1)), done.stdout
