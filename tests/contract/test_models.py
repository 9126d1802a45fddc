"""Ordinary models in every method, with its default settings: what has a gradient is optimised.

Each model is one that broke some method when arrays were told apart by their names on the server.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from clients import (
    DittoClient,
    FedADMMClient,
    FedAPMClient,
    FedGiAClient,
    FedProxClient,
    FLAMEClient,
    FPFCClient,
    LocalClient,
    LocalSGDClient,
    LpProjADMMClient,
    LpProjClient,
    PerFedAvgClient,
    PFedMeClient,
    PFedMeMatchedClient,
    accuracy,
    client_app,
    initial_arrays,
)
from fl_admm_strategies import (
    FLAME,
    FPFC,
    Ditto,
    FedADMM,
    FedAPM,
    FedGiA,
    FedProx,
    InProcessGrid,
    Local,
    LocalSGD,
    LpProj,
    LpProjADMM,
    PerFedAvg,
    PFedMe,
    PFedMeMatched,
    SmoothedSCAD,
    StatefulStrategy,
)
from tests.support.federation import (
    NUM_CLASSES,
    WatchedGrid,
    assert_same_bits,
    dataset,
)
from tests.support.refusals import Warned, refused

METHODS: dict[str, tuple[Callable[..., StatefulStrategy], Callable[..., Any]]] = {
    "FPFC": (partial(FPFC, SmoothedSCAD(0.5), local_epochs=1), FPFCClient),
    "FedADMM": (partial(FedADMM, local_epochs=1), FedADMMClient),
    "FedADMM-client-duals": (partial(FedADMM, local_epochs=1, duals="client"), FedADMMClient),
    "FedAPM": (partial(FedAPM, "^(head|fc)", local_epochs=1, personal_epochs=1), FedAPMClient),
    "FLAME": (FLAME, FLAMEClient),
    "FLAME-client-duals": (partial(FLAME, duals="client"), FLAMEClient),
    "LpProjADMM": (LpProjADMM, LpProjADMMClient),
    "FedGiA": (partial(FedGiA, curvature=2.0), FedGiAClient),
    "FedProx": (FedProx, FedProxClient),
    "Ditto": (Ditto, DittoClient),
    "Local": (Local, LocalClient),
    "LocalSGD": (LocalSGD, LocalSGDClient),
    "PFedMe": (partial(PFedMe, lr=0.01), PFedMeClient),
    "PFedMeMatched": (PFedMeMatched, PFedMeMatchedClient),
    "LpProj": (partial(LpProj, lr=0.01), LpProjClient),
    "PerFedAvg": (PerFedAvg, PerFedAvgClient),
}


class Net(nn.Module):
    """A body of some kind, from 3 numbers to 4, and a head; floating point inputs are cast."""

    def __init__(self, body: nn.Module, head: nn.Module | None = None) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(4, NUM_CLASSES) if head is None else head

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(inputs.to(next(self.parameters()).dtype)))
        return outputs


class Tied(nn.Module):
    """One matrix as encoder and, transposed by its shape, as decoder: a parameter of two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.head = nn.Linear(3, NUM_CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.second(torch.tanh(self.first(inputs))))
        return outputs


class Counting(nn.Module):
    """A layer with a floating point, an integer and a boolean buffer under names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.register_buffer("mean_so_far", torch.zeros(4))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mask", torch.tensor([True, True, False, True]))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs) * self.mask
        if self.training:
            self.mean_so_far = 0.5 * self.mean_so_far + 0.5 * outputs.detach().mean(dim=0)
            self.calls += 1
        return outputs - self.mean_so_far


class LoRA(nn.Module):
    """A frozen layer with an adapter of rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 4)
        self.base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(1, 3))
        self.lora_b = nn.Parameter(torch.zeros(4, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.base(inputs) + inputs @ self.lora_a.T @ self.lora_b.T
        return outputs


@dataclass(frozen=True)
class Model:
    """A model, and what of its ``state_dict`` does not travel.

    Attributes
    ----------
    make : callable
    stays : str
        Regular expression: frozen parameters and second names.
    """

    make: Callable[[], nn.Module]
    stays: str = "$^"


def batch_norm() -> nn.Module:
    return Net(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()))


MODELS: dict[str, Model] = {
    "plain": Model(lambda: Net(nn.Linear(3, 4))),
    "batch-norm": Model(batch_norm),
    "tied": Model(Tied, stays="second.weight"),
    "frozen": Model(
        lambda: _frozen(Net(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)))), "body.0"
    ),
    "lora": Model(lambda: Net(LoRA()), stays="base"),
    "buffers": Model(lambda: Net(Counting())),
    "dropout": Model(lambda: Net(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)))),
    "bfloat16": Model(lambda: batch_norm().bfloat16()),
    "float16": Model(lambda: Net(nn.Linear(3, 4)).half()),
}


def _frozen(net: nn.Module) -> nn.Module:
    net.body[0].requires_grad_(False)  # type: ignore[index, union-attr]
    return net


def build(model: str) -> nn.Module:
    """Return the same model at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return MODELS[model].make()


def make_client(client_class: Callable[..., Any], context: Context, net: nn.Module) -> Any:
    inputs, labels = dataset(int(context.node_config["partition-id"])).tensors
    data = TensorDataset(inputs[:8], labels[:8])
    return client_class(
        context,
        net,
        DataLoader(data, batch_size=4, shuffle=True),
        nn.CrossEntropyLoss(),
        test_loader=DataLoader(data, batch_size=8),
        metrics={"accuracy": accuracy},
    ).to_client()


def app_of(client_class: Callable[..., Any], make: Callable[[], nn.Module]) -> ClientApp:
    return client_app(lambda context: make_client(client_class, context, make()))


def run(
    method: str,
    model: str,
    *,
    on_server: Callable[[nn.Module], nn.Module] = lambda net: net,
    on_client: Callable[[nn.Module], nn.Module] = lambda net: net,
) -> tuple[StatefulStrategy, WatchedGrid]:
    make, client_class = METHODS[method]
    strategy = make(seed=1)
    grid = WatchedGrid(app_of(client_class, lambda: on_client(build(model))), 3)
    strategy.start(grid, initial_arrays(on_server(build(model))), 2)
    return strategy, grid


def load_all(strategy: StatefulStrategy, kind: str) -> list[Mapping[str, Tensor]]:
    """Return the models of a kind that the server has."""
    found = []
    for client in strategy.client_ids:
        try:
            found.append(strategy.model_arrays(kind, client).to_torch_state_dict())
        except RuntimeError:  # they stay with their clients
            break
    return found


SLOW = ("FedADMM-client-duals", "FLAME-client-duals", "FedProx", "Local")  # like others in most
SLOW += ("LocalSGD", "PFedMe", "PFedMeMatched", "LpProj", "PerFedAvg")


def pairs(methods: Sequence[str], models: Sequence[str]) -> list[Any]:
    """Return each method with each model; not slow are each method and each model twice or so.

    What a method makes of an array follows from the array's role, which is found in one place.
    """
    return [
        pytest.param(
            method,
            model,
            marks=[pytest.mark.slow] * (method in SLOW or (k - n) % len(models) > 1),
        )
        for k, method in enumerate(methods)
        for n, model in enumerate(models)
    ]


@pytest.mark.parametrize(("method", "model"), pairs([*METHODS], [*MODELS]))
def test_a_model_is_trained(method: str, model: str, warned: Warned) -> None:
    strategy, grid = run(method, model)
    assert not warned()
    for server_round in (1, 2):
        assert sorted(strategy.train_metrics[server_round]) == [0, 1, 2]
    assert sorted(strategy.evaluate_metrics[2]) == [0, 1, 2]
    own = build(model)
    travels = {name for name in own.state_dict() if not re.search(MODELS[model].stays, name)}
    seen = {
        name.removeprefix("dual/")
        for _, _, messages in grid.sent + grid.received
        for message in messages
        for record in message.content.array_records.values()
        for name in record
    }
    assert seen - {"P theta", "w_i", "w", "roles", "checksums"} <= travels
    for kind in strategy.kinds:
        for arrays in load_all(strategy, kind):
            own.load_state_dict(arrays, strict=method != "FedAPM")  # which has the shared part


# --- A wrapper's prefix on one side ---------------------------------------------------------------


@pytest.mark.parametrize("side", ["on_server", "on_client"])
def test_a_prefix_on_one_side_changes_no_bit(side: str) -> None:
    plain, _ = run("FPFC", "batch-norm")
    other, _ = run("FPFC", "batch-norm", **{side: nn.DataParallel})
    prefix = "module." if side == "on_server" else ""
    expected = {prefix + n: a.numpy() for n, a in plain.personal_arrays(1).items()}
    assert_same_bits({n: a.numpy() for n, a in other.personal_arrays(1).items()}, expected)
    assert_same_bits(other.state_dict(), plain.state_dict())


# --- Buffers: each kind of model has its own ------------------------------------------------------


def uploads(grid: WatchedGrid, server_round: int) -> dict[int, dict[str, Any]]:
    """Return what each client uploaded in a round."""
    replies = grid.replies("train", server_round)
    return {
        reply.metadata.src_node_id - 2: {
            name: array.numpy() for name, array in reply.content["arrays"].items()
        }
        for reply in replies
    }


@pytest.mark.parametrize(("method", "epochs"), [("FPFC", 1), ("FLAME", 3)])
def test_a_personal_model_has_the_buffers_of_its_client(method: str, epochs: int) -> None:
    strategy, grid = run(method, "batch-norm")
    sent = uploads(grid, 2)
    name = "body.1.running_mean"
    for client in strategy.client_ids:
        personal = strategy.personal_arrays(client)[name].numpy()
        np.testing.assert_array_equal(personal, sent[client][name])
    mean = np.mean([sent[c][name] for c in sent], axis=0)  # all have 8 examples
    np.testing.assert_allclose(strategy.global_arrays[name].numpy(), mean, rtol=1e-6)
    assert len({sent[c][name].tobytes() for c in sent}) == 3
    counter = strategy.personal_arrays(0)["body.1.num_batches_tracked"].numpy()
    assert (counter, counter.dtype) == (2 * 2 * epochs, np.int64)  # two batches, from its own count


def test_a_cluster_has_the_mean_of_its_clients_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, grid = run("FPFC", "batch-norm")
    assert isinstance(strategy, FPFC)
    sent, name = uploads(grid, 2), "body.1.running_mean"
    labels = np.array([0, 1, 0])
    monkeypatch.setattr(type(strategy.state.source), "labels", lambda *_: labels)
    first, second = strategy.cluster_arrays()
    both = (sent[0][name] + sent[2][name]) / 2
    np.testing.assert_allclose(first[name].numpy(), both, rtol=1e-6)
    np.testing.assert_array_equal(second[name].numpy(), sent[1][name])
    in_model = strategy.model_arrays("cluster", 2)[name].numpy()
    np.testing.assert_array_equal(in_model, first[name].numpy())


# --- Frozen arrays --------------------------------------------------------------------------------


def test_frozen_arrays_that_differ_are_refused_before_round_1() -> None:
    make, client_class = METHODS["FedADMM"]

    def other_weights() -> nn.Module:
        net = build("lora")
        nn.init.ones_(net.body.base.bias)  # type: ignore[union-attr, arg-type]
        return net

    with (
        InProcessGrid(app_of(client_class, lambda: build("lora")), 3) as grid,
        refused(ValueError, "body.base.bias", "client 0"),
    ):
        make().start(grid, initial_arrays(other_weights()), 1)


def test_an_adapter_alone_will_do_for_initial_arrays() -> None:
    make, client_class = METHODS["Ditto"]
    whole = initial_arrays(build("lora"))
    trained = ArrayRecord({n: a for n, a in whole.items() if "base" not in n})
    strategy = make(seed=1)
    with InProcessGrid(app_of(client_class, lambda: build("lora")), 3) as grid:
        strategy.start(grid, trained, 2)
    state = strategy.global_arrays.to_torch_state_dict()
    missing = build("lora").load_state_dict(state, strict=False)
    assert missing.missing_keys == ["body.base.weight", "body.base.bias"]
    full, _ = run("Ditto", "lora")
    for name, array in strategy.global_arrays.items():
        np.testing.assert_array_equal(array.numpy(), full.global_arrays[name].numpy())


def test_one_client_of_three_that_is_wrong_is_outvoted(warned: Warned) -> None:
    make, client_class = METHODS["FedADMM"]

    def client_fn(context: Context) -> Any:
        net = build("plain")
        if context.node_config["partition-id"] == 0:
            net.body.requires_grad_(False)  # type: ignore[union-attr]
        return make_client(client_class, context, net)

    strategy = make(seed=1)
    with InProcessGrid(client_app(client_fn), 3) as grid:
        strategy.start(grid, initial_arrays(build("plain")), 1)
    assert strategy.trained == list(build("plain").state_dict())
    assert sorted(strategy.train_metrics[1]) == [1, 2]
    assert warned("client 0 refused")


# --- Half precision -------------------------------------------------------------------------------


def test_half_precision_travels_as_float32_and_is_given_back_as_it_was() -> None:
    strategy, grid = run("FPFC", "float16")
    assert {a.dtype for arrays in uploads(grid, 2).values() for a in arrays.values()} == {
        np.dtype(np.float32)
    }
    halves = ArrayRecord(build("float16").state_dict())
    make, client_class = METHODS["FPFC"]
    again = make(seed=1)
    with InProcessGrid(app_of(client_class, lambda: build("float16")), 3) as own:
        again.start(own, halves, 2)
    assert {a.numpy().dtype for a in again.global_arrays.values()} == {np.dtype(np.float16)}
    assert_same_bits(again.state_dict(), strategy.state_dict())


# --- What the user chooses to average -------------------------------------------------------------


@pytest.mark.parametrize("method", ["FedADMM", "FLAME"])
def test_parameters_that_are_averaged_by_choice_are_trained(method: str) -> None:
    make, client_class = METHODS[method]
    strategy = make(seed=1, averaged="^head")
    with InProcessGrid(app_of(client_class, lambda: build("plain")), 3) as grid:
        strategy.start(grid, initial_arrays(build("plain")), 2)
    before = build("plain").state_dict()["head.weight"].numpy()
    assert not np.array_equal(strategy.global_arrays["head.weight"].numpy(), before)


# --- What clients keep ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "model"),
    pairs(["FedADMM", "FedAPM", "LpProjADMM", "Ditto"], ["batch-norm", "tied", "lora", "bfloat16"]),
)
def test_a_clients_own_model_is_a_whole_state_dict(method: str, model: str) -> None:
    _, client_class = METHODS[method]
    contexts: list[Context] = []

    def client_fn(context: Context) -> Any:
        contexts.append(context)
        return make_client(client_class, context, build(model))

    strategy = METHODS[method][0](seed=1)
    with InProcessGrid(client_app(client_fn), 3) as grid:
        strategy.start(grid, initial_arrays(build(model)), 1)
    net = build(model)
    client = make_client(client_class, contexts[-1], net).numpy_client
    own = {name: torch.from_numpy(array) for name, array in client.personal_arrays().items()}
    net.load_state_dict(own)  # strict
    if model == "batch-norm":
        assert own["body.1.num_batches_tracked"] > 0  # of the training, not of the new model
    for name, array in own.items():
        assert torch.equal(net.state_dict()[name].to(array.dtype), array), name


# --- The real thing -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_resnet_18(method: str) -> None:
    torchvision = pytest.importorskip("torchvision")

    def resnet() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net: nn.Module = torchvision.models.resnet18(num_classes=NUM_CLASSES)
        return net

    make, client_class = METHODS[method]

    def client_fn(context: Context) -> Any:
        generator = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
        inputs = torch.randn(4, 3, 32, 32, generator=generator)
        batch = (inputs, torch.arange(4) % NUM_CLASSES)
        net = resnet()
        return client_class(
            context, net, [batch], nn.CrossEntropyLoss(), test_loader=[batch]
        ).to_client()

    strategy = make()
    with InProcessGrid(client_app(client_fn), 2) as grid:
        strategy.start(grid, ArrayRecord(resnet().state_dict()), 1)
    assert sorted(strategy.train_metrics[1]) == [0, 1]
    for kind in strategy.kinds:
        for arrays in load_all(strategy, kind):
            resnet().load_state_dict(arrays, strict=method != "FedAPM")
