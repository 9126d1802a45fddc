"""What PyTorch clients are made of, whatever the method."""

from __future__ import annotations

from typing import Any

import torch
from flwr.app import Context, RecordDict

from clients import FedAPMClient
from simulations.data import ClientData, FederatedData
from simulations.experiments.experiment import RunConfig, load_experiment
from simulations.experiments.loading import load_settings
from simulations.methods import Federation
from simulations.problems import TorchProblem
from tests.support.refusals import refused

SMALL = ("data.name=digits", "model.name=mlp", "training.batch-size=20")
OPTIONS = "data.options={ clients = 4, samples = 400 }"


def federation_of(experiment: str, *changes: str) -> Federation:
    return load_experiment(RunConfig(experiment, changes=(*SMALL, OPTIONS, *changes))).federation


def client_of(federation: Federation, number: int) -> Any:
    context = Context(
        run_id=1,
        node_id=2,
        node_config={"partition-id": number, "num-partitions": 4},
        state=RecordDict(),
        run_config={},
    )
    return federation.build_client(context)


def test_every_client_starts_from_the_weights_of_the_seed() -> None:
    # v_i from the same start as u, however often a client is built (docs/methods/fedapm-notes.md,
    # P3).
    federation = federation_of("fedapm-cifar10", "algorithm.personal=^fc3")
    arrays = federation.problem.initial_arrays(federation.strategy()).to_torch_state_dict()
    for number in (0, 3, 0):
        client = client_of(federation, number)
        assert isinstance(client, FedAPMClient)
        for name, tensor in client.model.state_dict().items():
            assert torch.equal(tensor, arrays[name]), name
        with torch.no_grad():  # a model is its client's own
            for parameter in client.model.parameters():
                parameter.zero_()


def test_metrics_of_a_classification_are_refused_for_a_regression() -> None:
    settings = load_settings("housing-bodyfat", changes=["report.metrics=['f1']"])
    x, y = torch.zeros(2, 14), torch.zeros(2)
    client = ClientData((x, y), None, (x, y))
    data = FederatedData("made-up", [client], None, "regression", (14,), None)
    with refused(ValueError, "report.metrics", "made-up"):
        TorchProblem(settings, data)
    plain = TorchProblem(load_settings("housing-bodyfat"), data)
    assert (plain.metric.key, list(plain.client_arguments(0)["metrics"])) == ("rmse", ["rmse"])
