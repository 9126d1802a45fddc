"""What the commands import: one that runs nothing does not wait for what runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "ray", "flwr", "matplotlib", "sklearn", "scipy", "pandas")

# `describe` shows the parameters of a method's client, which is a class that needs PyTorch.
COMMANDS = {
    "--help": HEAVY,
    "list": HEAVY,
    "describe fedgia-v1": ("ray", "matplotlib", "sklearn", "scipy", "pandas"),
}


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=[pytest.mark.slow] * c.startswith("describe")) for c in COMMANDS],
)
def test_a_command_imports_what_it_needs(command: str) -> None:
    code = (
        "import sys\n"
        "from simulations.running.cli import cli\n"
        f"cli({command.split()}, standalone_mode=False)\n"
        f"print([name for name in {COMMANDS[command]} if name in sys.modules])"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
