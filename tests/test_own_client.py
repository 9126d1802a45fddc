"""docs/own-client.md and docs/messages.md say what is true."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context
from numpy.testing import assert_allclose
from sklearn.datasets import load_iris

import clients
import fl_admm_strategies
from clients import FedADMMClient, MethodClient, client_app
from fl_admm_strategies import FedADMM, InProcessGrid, Instruction, messages
from fl_admm_strategies.maths.blocks import Arrays
from tests.apps.converted import block

DOCS = Path(__file__).parents[1] / "docs"
MESSAGES = (DOCS / "messages.md").read_text(encoding="utf-8")
GUIDE = (DOCS / "own-client.md").read_text(encoding="utf-8")

SCHEMAS = {
    name: thing
    for name, thing in vars(messages).items()
    if isinstance(thing, type) and issubclass(thing, Instruction)
}


def described(schema: type) -> list[tuple[str, str]]:
    """Return a message's fields and their types, as its table writes them."""
    rows = []
    for name, hint in ((f.name, get_type_hints(schema)[f.name]) for f in fields(schema)):
        parts = [part for part in get_args(hint) if part is not type(None)]
        optional = type(None) in get_args(hint)
        kind = parts[0] if optional else hint
        word = "Arrays" if kind == Arrays else str(kind) if get_args(kind) else kind.__name__
        rows.append((name, f"{word}, optional" if optional else word))
    return rows


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_tables_of_the_messages_are_true(name: str) -> None:
    (table,) = re.findall(rf"^`{name}`[^|]*?\n\n((?:\|[^\n]*\n)+)", MESSAGES, re.M)
    rows = re.findall(r"^\| `(\w+)` \| ([\w\[\], ]+) \| .+ \|$", table, re.M)
    assert rows == described(SCHEMAS[name])


def test_every_message_of_a_client_is_exported() -> None:
    for name in clients.__all__:
        client = getattr(clients, name)
        if isinstance(client, type) and issubclass(client, MethodClient):
            asked = getattr(client, "instruction", None)
            assert asked is None or not fields(asked) or asked.__name__ in SCHEMAS, name


def test_the_table_of_objectives_names_every_client_and_those_without_one() -> None:
    start = GUIDE.index("| client | calls `minimise` with |")
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", GUIDE[start:], re.M)
    said = {name: cell != "never" for cells, cell in rows for name in re.findall(r"`(\w+)`", cells)}
    exported = {name: getattr(clients, name) for name in clients.__all__ if name in said}
    assert {name: not client.closed_form for name, client in exported.items()} == said
    bases = {"MethodClient", "MirrorClient", "TorchClient"}
    assert set(said) == {n for n in clients.__all__ if n.endswith("Client")} - bases


# --- A client without PyTorch -------------------------------------------------------------------

NUM_CLIENTS = 3


def _parts(client: int) -> tuple[Any, Any]:
    """Return training and test data of a client: its share of the irises, in centimetres."""
    x, y = load_iris(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))[client::NUM_CLIENTS]
    x, y = x[order] - x.mean(axis=0), y[order]
    return (x[:40], y[:40]), (x[40:], y[40:])


def test_the_client_without_pytorch_is_fedadmms() -> None:
    names: dict[str, Any] = {}
    exec(compile(block("example: numpy"), "own-client.md", "exec", dont_inherit=True), names)
    linear = ArrayRecord({"weight": Array(np.zeros((3, 4))), "bias": Array(np.zeros(3))})

    def numpy_client(context: Context) -> Any:
        train, test = _parts(int(context.node_config["partition-id"]))
        return names["SklearnClient"](context, train, test, num_classes=3)

    def torch_client(context: Context) -> Any:
        import torch

        parts = _parts(int(context.node_config["partition-id"]))
        train, test = ([(torch.from_numpy(x), torch.from_numpy(y))] for x, y in parts)
        model = torch.nn.Linear(4, 3, dtype=torch.float64)
        loss = torch.nn.CrossEntropyLoss()
        return FedADMMClient(
            context,
            model,
            train,
            loss,
            test_loader=test,
            metrics={"accuracy": clients.accuracy},
            full_batch=True,
        )

    own, ours = (
        FedADMM(rho=0.03, lr=1.0, local_epochs=5, fraction_train=0.67, seed=1) for _ in range(2)
    )
    for strategy, client_fn in ((own, numpy_client), (ours, torch_client)):
        with InProcessGrid(client_app(client_fn), NUM_CLIENTS) as grid:
            strategy.start(grid, linear, num_rounds=4)
    for mine, theirs in zip(
        own.global_arrays.to_numpy_ndarrays(), ours.global_arrays.to_numpy_ndarrays(), strict=True
    ):
        assert_allclose(mine, theirs, rtol=1e-9)
    for client, metrics in own.evaluate_metrics[4].items():
        assert metrics["global-accuracy"] == pytest.approx(
            ours.evaluate_metrics[4][client]["global-accuracy"]
        )
        assert metrics["global-accuracy"] > 0.6


# --- The snippets -------------------------------------------------------------------------------


def test_every_python_snippet_compiles_and_its_names_exist() -> None:
    for source in re.findall(r"^```python\n(.*?)^```$", GUIDE, re.M | re.S):
        compile(source, "own-client.md", "exec")
        for module in (clients, fl_admm_strategies):
            for line in re.findall(rf"^from {module.__name__} import (.*)$", source, re.M):
                assert set(line.split(", ")) <= set(module.__all__), line
