"""FedADMM and FedAPM in the app, on digits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from safetensors.numpy import load_file

from clients import FedAPMClient
from fl_admm_strategies import FedADMM, FedAPM
from simulations.config import RunConfig
from simulations.settings import load_experiment, load_settings
from tests.simulations.test_run import run

DIGITS = (
    "data.name=digits",
    "data.options={ clients = 4, samples = 400 }",
    "training.num-rounds=3",
    "training.fraction-train=0.5",
    "training.evaluate-every=3",
    "training.batch-size=20",
)
MLP = (*DIGITS, "model.name=mlp", "algorithm.personal=^fc3", "algorithm.lr=0.5")


def result_of(folder: Path) -> Any:
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def last_evaluation(folder: Path) -> Any:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return json.loads(lines[-1])["clients"]["evaluate"]


def test_fedapm_reports_both_kinds_of_model_beside_the_baselines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(RunConfig("fedapm-cifar10", changes=MLP, out=tmp_path / "run"))
    result = result_of(folder)
    clients = last_evaluation(folder).values()
    assert len(clients) == 4
    titles = {"personal model": "personal", "own part with the shared one": "global"}
    assert list(result["models"]) == list(titles)
    assert list(result["baselines"]) == ["FedAvg (global model)", "local training"]
    for title, kind in titles.items():
        for metric in ("accuracy", "f1", "auc"):
            assert all(0 <= own[f"{kind}-{metric}"] <= 1 for own in clients)
        accuracies = [own[f"{kind}-accuracy"] for own in clients]
        assert result["models"][title]["mean"] == pytest.approx(np.mean(accuracies))
    # 8 x 8 pixels: fc1 64 x 128 + 128, fc2 128 x 64 + 64; fc3 64 x 10 + 10.
    assert result["shared"] == 8320 + 8256
    assert result["personal"] == 650
    assert result["gap"] > 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "16,576 of its 17,226 parameters they share" in shown
    # What the server keeps is the shared part: w, u_i and pi_i of 4 clients, and their sum.
    state = load_file(folder / "state.safetensors")
    assert state["state/consensus/w"].shape == (16576,)


def test_fedadmm_reports_its_one_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(RunConfig("fedadmm-digits", changes=DIGITS, out=tmp_path / "run"))
    result = result_of(folder)
    assert list(result["models"]) == ["one global model"]
    accuracies = [own["global-accuracy"] for own in last_evaluation(folder).values()]
    assert result["models"]["one global model"]["mean"] == pytest.approx(np.mean(accuracies))
    assert "FedADMM trained one model with 4 clients" in capsys.readouterr().out


def test_the_settings_reach_the_strategies() -> None:
    changes = (
        *MLP,
        "algorithm.rho=0.2",
        "algorithm.sigma=0.3",
        "algorithm.local-epochs=4",
        "algorithm.personal-epochs=5",
        "algorithm.u-start=server",
        "algorithm.tolerance=0.6",
        "algorithm.tolerance-decay=0.7",
        "algorithm.max-steps=8",
        "algorithm.duals=client",
    )
    settings, data = load_experiment(RunConfig("fedapm-cifar10", changes=changes))
    strategy = settings.algorithm.strategy(settings, data, seed=9)
    assert isinstance(strategy, FedAPM)
    expected = FedAPM(
        "^fc3",
        rho=0.2,
        sigma=0.3,
        lr=0.5,
        local_epochs=4,
        personal_epochs=5,
        u_start="server",
        tolerance=0.6,
        tolerance_decay=0.7,
        max_steps=8,
        duals="client",
        seed=9,
    )
    assert strategy.hyperparameters() == expected.hyperparameters()
    assert strategy.seed == 9

    changes = (*DIGITS, "algorithm.weights=size", "algorithm.duals=client", "algorithm.rho=0.2")
    settings, data = load_experiment(RunConfig("fedadmm-digits", changes=changes))
    strategy = settings.algorithm.strategy(settings, data)
    assert isinstance(strategy, FedADMM)
    expected_settings = FedADMM(
        rho=0.2, lr=1.0, local_epochs=3, weights="size", duals="client"
    ).hyperparameters()
    assert strategy.hyperparameters() == expected_settings


def test_every_client_starts_from_the_weights_of_the_seed() -> None:
    # Specs 6.1, 11: v_i from the same random start as u, however often a client is built.
    changes = (*MLP, "algorithm.l2=0.2")
    settings, data = load_experiment(RunConfig("fedapm-cifar10", changes=changes))
    initial = settings.algorithm.initial_arrays(settings, data).to_torch_state_dict()
    for number in (0, 3, 0):
        context = Context(
            run_id=1,
            node_id=2,
            node_config={"partition-id": number, "num-partitions": 4},
            state=RecordDict(),
            run_config={},
        )
        client = settings.algorithm.client(context, settings, data)
        assert isinstance(client, FedAPMClient)
        for name, tensor in client.model.state_dict().items():
            assert torch.equal(tensor, initial[name]), name
        optimizer = client.optimizer_fn(client.model.parameters(), lr=0.1)
        # lambda/2 |.|^2 in f_i, under alpha_i = 1/4.
        assert optimizer.param_groups[0]["weight_decay"] == 0.05


def test_the_experiments_are_the_papers() -> None:
    for name, clients in (("fedapm-cifar10", 20), ("fedapm-har", None)):
        settings = load_settings(name, profile="paper")
        assert settings.training.fraction_train == 0.3
        assert settings.algorithm.rho == 0.01  # type: ignore[attr-defined]
        assert settings.algorithm.local_epochs == 3  # type: ignore[attr-defined]
        assert settings.data.options.get("clients") == clients
        assert "FedAPM" in settings.published
        load_settings(name, profile="quick")
