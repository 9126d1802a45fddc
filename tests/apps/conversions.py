"""Flower's advanced PyTorch example and JAX quickstart, converted by docs/own-client.md."""

from __future__ import annotations

import re
from pathlib import Path

from tests.apps.converted import ROOT, block, copy_of, patched, swapped

ADVANCED = "advanced-pytorch/pytorch_example"
JAX = "quickstart-jax/jaxexample"
WANDB = """
import sys

run = sys.modules[__name__]
def init(**options): ...
def log(metrics, step): ...
"""


def advanced_pytorch(
    to: Path, method: str | None, *, samples: int = 60_000, own_strategy: bool = True
) -> Path:
    """Copy the advanced example with data from here, and convert it to a method; None: as it is.

    By the guide's first way, with the app's own strategy, or by the second, without.
    """
    folder = copy_of("advanced-pytorch", to)
    (folder / "wandb.py").write_text(WANDB, encoding="utf-8")
    task, server, strategy, client = (
        folder / "pytorch_example" / f"{name}.py"
        for name in ("task", "server_app", "strategy", "client_app")
    )
    texts = {file: file.read_text(encoding="utf-8") for file in (task, server, strategy, client)}
    if method is not None:
        texts[task] = patched(texts[task], block(f"app: {ADVANCED}/task.py"))
        texts[client] = swapped(
            block(f"app: {ADVANCED}/client_app.py"), {"FedADMMClient": f"{method}Client"}
        )
        way = "app" if own_strategy else "plain"
        texts[server] = patched(texts[server], block(f"{way}: {ADVANCED}/server_app.py"))
        if own_strategy:
            texts[strategy] = patched(texts[strategy], block(f"app: {ADVANCED}/strategy.py"))
            texts[strategy] = swapped(texts[strategy], {"FedADMM": method})
        else:
            texts[server] = swapped(texts[server], {"FedADMM": method})
            del texts[strategy]
            strategy.unlink()
    if method == "FedAPM":
        texts[server] = swapped(texts[server], {"FedAPM(\n": 'FedAPM(\n        "^fc2",\n'})
    # Flower 1.41 has no such name there; the app's is 1.27.
    typing = {"from flwr.common.typing import UserConfig": "UserConfig = dict"}
    texts[task] = swapped(texts[task], typing)
    texts[task] += f"""
from functools import partial
from tests.apps.data import fashion_loaders
load_data = partial(fashion_loaders, samples={samples})
"""
    texts[server] += "\nfrom tests.apps.data import Hub as load_dataset\n"
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8")
    return folder


def quickstart_jax(to: Path, method: str | None, *, samples: int = 60_000) -> Path:
    """Copy the JAX quickstart with data from here, and convert it to FedADMM; None: as it is."""
    folder = copy_of("quickstart-jax", to)
    package = folder / "jaxexample"
    task = (package / "task.py").read_text(encoding="utf-8")
    if method is not None:
        task = patched(task, block(f"app: {JAX}/task.py"))
        server = (package / "server_app.py").read_text(encoding="utf-8")
        server = patched(server, block(f"app: {JAX}/server_app.py"))
        (package / "server_app.py").write_text(server, encoding="utf-8")
        client = block(f"app: {JAX}/client_app.py")
        (package / "client_app.py").write_text(client, encoding="utf-8")
    task += f"""
from functools import partial
from tests.apps.data import jax_batches
load_data = partial(jax_batches, samples={samples})
"""
    (package / "task.py").write_text(task, encoding="utf-8")
    return folder


OPACUS = "opacus/opacus_fl"


def opacus(to: Path, method: str | None, *, samples: int = 20_000, lr: float = 0.001) -> Path:
    """Copy the Opacus example with data from here, and convert it to FedADMM; None: as it is.

    `lr` in place of the app's step size, here and there.
    """
    folder = copy_of("opacus", to)
    package = folder / "opacus_fl"
    if method is not None:
        server = (package / "server_app.py").read_text(encoding="utf-8")
        server = patched(server, block(f"app: {OPACUS}/server_app.py"))
        (package / "server_app.py").write_text(server, encoding="utf-8")
        client = block(f"app: {OPACUS}/client_app.py")
        (package / "client_app.py").write_text(client, encoding="utf-8")
    with (package / "task.py").open("a", encoding="utf-8") as file:
        file.write(f"""
from functools import partial
from tests.apps.data import cifar_parts
load_data = partial(cifar_parts, samples={samples})
""")
    name = "client_app.py" if method is None else "server_app.py"
    text = (package / name).read_text(encoding="utf-8")
    (package / name).write_text(swapped(text, {"lr=0.001": f"lr={lr}"}), encoding="utf-8")
    return folder


OWN = Path(__file__).parent / "own"
DROP_IN = (ROOT / "docs" / "drop-in.md").read_text(encoding="utf-8")
"""Its diffs: the server and the client of the current API, and of the legacy one."""


def own(to: Path, model: str, method: str | None, *, legacy: bool = False, rounds: int = 3) -> Path:
    """Make an app of our own, and convert it to FedADMM by docs/drop-in.md; None: as it is.

    Parameters
    ----------
    to : Path
    model : {"mlp", "transformer", "resnet"}
        A file of `OWN`.
    method : str or None
    legacy : bool (default: False)
        With ``server_fn`` and a `NumPyClient`.
    rounds : int (default: 3)
    """
    diffs = re.findall(r"^```diff\n(.*?)^```$", DROP_IN, re.M | re.S)
    server, client = (_side(diff, new=method is not None) for diff in diffs[2 * legacy :][:2])
    if method is None and not legacy:  # the guide has no more of the handlers than their names
        client = (OWN / "client_app.py").read_text(encoding="utf-8")
    if method is not None:
        server = swapped(
            server,
            {
                "FPFC, ": f"{method}, ",
                ", SmoothedSCAD": "",
                "FPFC(SmoothedSCAD(lam=0.6), lr=0.1": f"{method}(lr=0.05, local_epochs=1",
            },
        )
        client = swapped(client, {"FPFCClient": f"{method}Client"})
        client = swapped(client, {"_loader=test)": '_loader=test, metrics={"accuracy": accuracy})'})
        client = client.replace("from clients import ", "from clients import accuracy, ")
    server = swapped(server, {"num_rounds=3": f"num_rounds={rounds}"})
    if legacy:  # half of the clients in a round, there as here, and their accuracy
        if method is None:
            own = "fraction_fit=0.5, evaluate_metrics_aggregation_fn=mean_accuracy"
            server = swapped(server, {"FedAvg()": f"FedAvg({own})"})
            server = "from tests.apps.data import mean_accuracy\n" + server
        else:
            server = swapped(server, {"local_epochs=1": "local_epochs=1, fraction_train=0.5"})
    folder = to / "own"
    (folder / "own").mkdir(parents=True)
    (folder / "pyproject.toml").write_text("[tool.flwr.app.config]\n", encoding="utf-8")
    texts = {
        "server_app": server,
        "client_app": client,
        "task": (OWN / "task.py").read_text(encoding="utf-8"),
        "model": (OWN / f"{model}.py").read_text(encoding="utf-8"),
        "__init__": "",
    }
    for name, text in texts.items():
        moved = text.replace("from task import", "from own.task import")
        (folder / "own" / f"{name}.py").write_text(moved, encoding="utf-8")
    return folder


def _side(diff: str, *, new: bool) -> str:
    """Return a file before or after a change of the guide."""
    lines = [line or " " for line in diff.splitlines()]
    return "".join(f"{line[1:]}\n" for line in lines if line[0] in (" +" if new else " -"))
