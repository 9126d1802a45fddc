"""Flower's advanced PyTorch example and JAX quickstart, converted by docs/own-client.md."""

from __future__ import annotations

from pathlib import Path

from tests.apps.converted import block, copy_of, patched, swapped

ADVANCED = "advanced-pytorch/pytorch_example"
JAX = "quickstart-jax/jaxexample"
WANDB = """
def init(**options): ...
def log(metrics, step): ...
"""


def advanced_pytorch(to: Path, method: str | None, *, samples: int = 60_000) -> Path:
    """Copy the advanced example with data from here, and convert it to a method; None: as it is."""
    folder = copy_of("advanced-pytorch", to)
    (folder / "wandb.py").write_text(WANDB, encoding="utf-8")
    task, server, strategy, client = (
        folder / "pytorch_example" / f"{name}.py"
        for name in ("task", "server_app", "strategy", "client_app")
    )
    texts = {file: file.read_text(encoding="utf-8") for file in (task, server, strategy, client)}
    if method is not None:
        for file in (task, server, strategy):
            texts[file] = patched(texts[file], block(f"app: {ADVANCED}/{file.name}"))
        texts[client] = swapped(
            block(f"app: {ADVANCED}/{client.name}"), {"FedADMMClient": f"{method}Client"}
        )
        texts[strategy] = swapped(texts[strategy], {"FedADMM": method})
    if method == "FedAPM":  # whose global model is no whole one
        server_text = swapped(
            texts[server], {"CustomFedAvg(\n": 'CustomFedAvg(\n        "^fc2",\n'}
        )
        evaluation = "        evaluate_fn=get_global_evaluate_fn(device=device),\n"
        saving = "    torch.save(state_dict, "
        texts[server] = swapped(server_text, {evaluation: "", saving: "    torch.save({}, "})
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
