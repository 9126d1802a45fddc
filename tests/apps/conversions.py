"""Flower's advanced PyTorch example, JAX quickstart and Opacus example, by docs/own-client.md."""

from __future__ import annotations

from pathlib import Path

from tests.apps.converted import block, copy_of, patched, swapped

ADVANCED = "advanced-pytorch/pytorch_example"
JAX = "quickstart-jax/jaxexample"
OPACUS = "opacus/opacus_fl"
WANDB = """
import sys

run = sys.modules[__name__]
def init(**options): ...
def log(metrics, step): ...
"""


def rewrite(file: Path, change: str) -> None:
    """Change a file as a diff of the guide says."""
    file.write_text(patched(file.read_text(encoding="utf-8"), change), encoding="utf-8")


def stand_in(task: Path, function: str, samples: int) -> None:
    """Have an app's `load_data` read data that are here, with so many samples."""
    with task.open("a", encoding="utf-8") as file:
        file.write(f"""
from functools import partial
from tests.apps.data import {function}
load_data = partial({function}, samples={samples})
""")


def advanced_pytorch(to: Path, method: str, *, samples: int, own_strategy: bool = True) -> Path:
    """Copy the advanced example with data from here, and convert it to a method.

    By the guide's first way, with the app's own strategy, or by the second, without.
    """
    folder = copy_of("advanced-pytorch", to)
    (folder / "wandb.py").write_text(WANDB, encoding="utf-8")
    task, server, strategy, client = (
        folder / "pytorch_example" / f"{name}.py"
        for name in ("task", "server_app", "strategy", "client_app")
    )
    rewrite(task, block(f"app: {ADVANCED}/task.py"))
    own = swapped(block(f"app: {ADVANCED}/client_app.py"), {"FedADMMClient": f"{method}Client"})
    client.write_text(own, encoding="utf-8")
    rewrite(server, block(f"{'app' if own_strategy else 'plain'}: {ADVANCED}/server_app.py"))
    if own_strategy:
        rewrite(strategy, block(f"app: {ADVANCED}/strategy.py"))
    else:
        strategy.unlink()
    named = strategy if own_strategy else server
    text = swapped(named.read_text(encoding="utf-8"), {"FedADMM": method})
    named.write_text(text, encoding="utf-8")
    text = server.read_text(encoding="utf-8")
    if method == "FedAPM":
        text = swapped(text, {"FedAPM(\n": 'FedAPM(\n        "^fc2",\n'})
    text += "\nfrom tests.apps.data import Hub as load_dataset\n"
    server.write_text(text, encoding="utf-8")
    # Flower 1.41 has no such name there; the app's is 1.27.
    typing = {"from flwr.common.typing import UserConfig": "UserConfig = dict"}
    task.write_text(swapped(task.read_text(encoding="utf-8"), typing), encoding="utf-8")
    stand_in(task, "fashion_loaders", samples)
    return folder


def quickstart_jax(to: Path, *, samples: int) -> Path:
    """Copy the JAX quickstart with data from here, and convert it to FedADMM."""
    folder = copy_of("quickstart-jax", to)
    package = folder / "jaxexample"
    for name in ("task", "server_app"):
        rewrite(package / f"{name}.py", block(f"app: {JAX}/{name}.py"))
    (package / "client_app.py").write_text(block(f"app: {JAX}/client_app.py"), encoding="utf-8")
    stand_in(package / "task.py", "jax_batches", samples)
    return folder


def opacus(to: Path, *, samples: int) -> Path:
    """Copy the Opacus example with data from here, and convert it to FedADMM."""
    folder = copy_of("opacus", to)
    package = folder / "opacus_fl"
    rewrite(package / "server_app.py", block(f"app: {OPACUS}/server_app.py"))
    (package / "client_app.py").write_text(block(f"app: {OPACUS}/client_app.py"), encoding="utf-8")
    stand_in(package / "task.py", "cifar_parts", samples)
    return folder
