"""Flower's PyTorch quickstart with its own train() and test(), by our guide, under both APIs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fl_admm_strategies import StatefulStrategy
from tests.apps.converted import block, copy_of, needs_app, patched, run_app, swapped

pytestmark = [pytest.mark.slow, needs_app("quickstart-pytorch")]

PACKAGE = "quickstart-pytorch/pytorchexample"
RUN_CONFIG = {
    "num-server-rounds": 3,
    "fraction-evaluate": 1.0,
    "local-epochs": 1,
    "learning-rate": 0.02,
    "batch-size": 16,
}
NUM_CLIENTS = 4
DATA = """
from tests.apps.data import cifar_loaders as load_data, cifar_test as load_centralized_dataset
"""

METHODS = {
    "FPFC": "SmoothedSCAD(lam=0.6),",
    "FedADMM": "",
    "FedAPM": '"^fc3",',
    "FLAME": "",
    "LpProjADMM": "",
    "Ditto": "",
    "FedProx": "",
    "PFedMeMatched": "",
    "CFL": "eps1=0.4, eps2=1.6,",
    "IFCA": "num_clusters=2,",
    "Local": "",
}
"""What a method's constructor takes before the settings that all have."""
NO_WHOLE_GLOBAL_MODEL = ("FedAPM", "LpProjADMM", "CFL", "IFCA", "Local")
"""There the app's own evaluation on the server has nothing to evaluate."""

LEGACY_SERVER = """
from flwr.server import ServerAppComponents, ServerConfig
from flwr.serverapp import ServerApp
from flwr.app import ArrayRecord, Context
from fl_admm_strategies import LegacyServer, FPFC, SmoothedSCAD
from pytorchexample.task import Net


def server_fn(context: Context) -> ServerAppComponents:
    config = context.run_config
    options = {"lr": config["learning-rate"], "local_epochs": config["local-epochs"]}
    strategy = FPFC(SmoothedSCAD(lam=0.6), fraction_evaluate=1.0, **options)
    server = LegacyServer(strategy, ArrayRecord(Net().state_dict()))
    return ServerAppComponents(
        server=server, config=ServerConfig(num_rounds=config["num-server-rounds"])
    )


app = ServerApp(server_fn=server_fn)
"""


def convert(
    folder: Path, method: str, api: str, *, handlers: bool = False, plain: bool = False
) -> None:
    """Change the app's files as the guide says, for a method of ours."""
    files = {name: folder / "pytorchexample" / f"{name}.py" for name in ("task", "client_app")}
    server = folder / "pytorchexample" / "server_app.py"
    task = patched(files["task"].read_text(), block(f"app: {PACKAGE}/task.py"))
    files["task"].write_text(task + DATA)

    own = block(f"{'plain' if plain else 'app'}: {PACKAGE}/client_app.py")
    client = swapped(own, {"FPFCClient": f"{method}Client"})
    if handlers:
        client = swapped(client, {"app = client_app(client_fn)\n": ""})
        client += block(f"handlers: {PACKAGE}/client_app.py")
    if api == "legacy":
        legacy = {
            "app = client_app(client_fn)": "app = ClientApp(client_fn=client_fn)",
            "device=device)\n\n": "device=device).to_client()\n\n",
        }
        client = "from flwr.clientapp import ClientApp\n" + swapped(client, legacy)
    files["client_app"].write_text(client)

    text = LEGACY_SERVER
    if api == "current":
        text = patched(server.read_text(), block(f"app: {PACKAGE}/server_app.py"))
        if method in NO_WHOLE_GLOBAL_MODEL:
            text = swapped(text, {"        evaluate_fn=global_evaluate,\n": ""})
    if method != "FPFC":
        names = {"FPFC, SmoothedSCAD\n": f"{method}\n", "strategy = FPFC(": f"strategy = {method}("}
        text = swapped(text, names | {"SmoothedSCAD(lam=0.6),": METHODS.get(method, "")})
    server.write_text(text)


Train = Callable[..., None]


@pytest.fixture
def train(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    made: list[StatefulStrategy],
    caplog: pytest.LogCaptureFixture,
) -> Train:
    """Return what converts a copy of the app as `convert` does, runs it, and checks the run."""

    def run(method: str, api: str, **how: bool) -> None:
        folder = copy_of("quickstart-pytorch", tmp_path)
        convert(folder, method, api, **how)
        run_app(folder, "pytorchexample", NUM_CLIENTS, RUN_CONFIG, monkeypatch)
        check(made, caplog)

    return run


@pytest.mark.parametrize("api", ["current", "legacy"])
@pytest.mark.parametrize("method", METHODS)
def test_it_trains(method: str, api: str, train: Train) -> None:
    train(method, api)


def test_it_needs_no_loop_of_its_own(train: Train) -> None:
    train("FPFC", "current", plain=True)


def test_it_keeps_its_handlers(train: Train) -> None:
    train("FedADMM", "current", handlers=True)


def check(made: list[StatefulStrategy], caplog: pytest.LogCaptureFixture) -> None:
    (strategy,) = made
    losses = [
        np.mean([own["loss"] for own in clients.values()])
        for _, clients in sorted(strategy.train_metrics.items())
    ]
    assert len(losses) == RUN_CONFIG["num-server-rounds"]
    assert losses[-1] < losses[0]
    for clients in strategy.evaluate_metrics.values():
        assert len(clients) == NUM_CLIENTS
        for own in clients.values():
            kinds = set(strategy.kinds) - {"hm-val"}  # which takes validation data
            assert {f"{kind}-accuracy" for kind in kinds} <= own.keys()
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warnings == []
