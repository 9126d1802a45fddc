"""Ordinary models in every method: what has a gradient is optimised, what has none is a buffer.

Each model is one that broke some method when arrays were told apart by their names on the server.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from clients import accuracy, client_app, initial_arrays
from fl_admm_strategies import StatefulStrategy
from tests.support.cases import CASES, Case, case_of
from tests.support.federation import (
    NUM_CLASSES,
    Federation,
    assert_same_bits,
    dataset,
    node_of,
)
from tests.support.refusals import Warned, refused

ANY_MODEL = [case for case in CASES if case.takes_any_model]


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

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.second(torch.tanh(self.first(inputs)))
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


class Odd(nn.Module):
    """A layer whose name has characters that a format could trip over."""

    NAME = ',"\n/'

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({self.NAME: nn.Linear(3, 4)})

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers[self.NAME](inputs)
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
    "tied": Model(lambda: Net(Tied(), nn.Linear(3, NUM_CLASSES)), stays="second.weight"),
    "frozen": Model(
        lambda: _frozen(Net(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)))), "body.0"
    ),
    "lora": Model(lambda: Net(LoRA()), stays="body.base"),
    "buffers": Model(lambda: Net(Counting())),
    "dropout": Model(lambda: Net(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)))),
    "bfloat16": Model(lambda: batch_norm().bfloat16()),
    "float16": Model(lambda: Net(nn.Linear(3, 4)).half()),
    "odd-names": Model(lambda: Net(Odd())),
}


def _frozen(net: nn.Module) -> nn.Module:
    net.body[0].requires_grad_(False)  # type: ignore[index, union-attr]
    return net


def build(model: str) -> nn.Module:
    """Return the same model at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return MODELS[model].make()


def make_client(case: Case, context: Context, net: nn.Module) -> Any:
    inputs, labels = dataset(int(context.node_config["partition-id"])).tensors
    data = TensorDataset(inputs[:8], labels[:8])
    return case.client_class(
        context,
        net,
        DataLoader(data, batch_size=4, shuffle=True),
        nn.CrossEntropyLoss(),
        test_loader=DataLoader(data, batch_size=8),
        metrics={"accuracy": accuracy},
    )


def start(
    case: Case,
    arrays: ArrayRecord,
    make: Callable[[Context], nn.Module],
    num_rounds: int = 2,
    **settings: Any,
) -> tuple[StatefulStrategy, Federation]:
    strategy = case.strategy(seed=1, **settings)
    app = client_app(lambda context: make_client(case, context, make(context)).to_client())
    grid = Federation(app, 3)
    strategy.start(grid, arrays, num_rounds)
    return strategy, grid


def run(case: Case, model: str) -> tuple[StatefulStrategy, Federation]:
    first = case.prepared(build(model))
    return start(case, initial_arrays(first), lambda _: build(model))


def pairs(cases: Sequence[Case], models: Sequence[str]) -> list[Any]:
    """Return each case with each model; not slow are batch norm and one or two more of each.

    What a method makes of an array follows from the array's role, which is found in one place.
    """
    return [
        pytest.param(
            case,
            model,
            id=f"{case.name}-{model}",
            marks=[pytest.mark.slow] * (model != "batch-norm" and (k - n) % len(models) > 1),
        )
        for k, case in enumerate(cases)
        for n, model in enumerate(models)
    ]


def models_of(strategy: StatefulStrategy, kind: str) -> list[Mapping[str, Tensor]]:
    """Return every client's model of a kind, if the server has them."""
    try:
        records = [strategy.model_arrays(kind, client) for client in strategy.client_ids]
    except RuntimeError:  # they stay with their clients
        return []
    return [record.to_torch_state_dict() for record in records]


@pytest.mark.parametrize(("case", "model"), pairs(ANY_MODEL, [*MODELS]))
def test_a_model_is_trained(case: Case, model: str, warned: Warned) -> None:
    strategy, grid = run(case, model)
    assert not warned()
    for server_round in (1, 2):
        assert sorted(strategy.train_metrics[server_round]) == [0, 1, 2]
    assert sorted(strategy.evaluate_metrics[2]) == [0, 1, 2]
    net = case.prepared(build(model))
    first = copy.deepcopy(net.state_dict())
    is_frozen = {name: not p.requires_grad for name, p in net.named_parameters()}
    whole = {*first} <= {*strategy.model_spec} & {*strategy.upload_spec()}
    for kind in strategy.kinds:
        for arrays in models_of(strategy, kind):
            net.load_state_dict(arrays, strict=whole)
            for name, frozen in is_frozen.items():
                if frozen or name not in arrays:
                    assert torch.equal(net.state_dict()[name], first[name]), name
            trained = [name for name, frozen in is_frozen.items() if not frozen and name in arrays]
            assert any(not torch.equal(net.state_dict()[name], first[name]) for name in trained)
    check_buffers(strategy, uploads(grid, 2), {name for name, _ in net.named_buffers()})


def uploads(grid: Federation, server_round: int) -> dict[int, dict[str, Any]]:
    """Return what each client uploaded in a round."""
    replies = grid.replies("train", server_round)
    return {
        reply.metadata.src_node_id - node_of(0): {
            name: array.numpy() for name, array in reply.content["arrays"].items()
        }
        for reply in replies
    }


def check_buffers(
    strategy: StatefulStrategy, sent: Mapping[int, Mapping[str, Any]], buffers: Collection[str]
) -> None:
    """Check that a model has the mean of its clients' buffers: no dual variable is added to it."""
    clusters = strategy.clusters()
    for kind in strategy.kinds:
        for client, model in zip(sent, models_of(strategy, kind), strict=False):
            of = [client] if kind == "personal" else list(sent)  # all have 8 examples
            if kind == "cluster" and clusters is not None:
                of = [other for other in sent if clusters[other] == clusters[client]]
            for name in model.keys() & buffers & sent[client].keys():
                mean = np.mean([sent[other][name] for other in of], axis=0, dtype=np.float64)
                is_float = model[name].dtype == torch.float32
                rtol, atol = (1e-6, 1e-6) if is_float else (1e-2, 0.5)
                found = model[name].double().numpy()
                np.testing.assert_allclose(found, mean, rtol=rtol, atol=atol, err_msg=name)


# --- Frozen arrays --------------------------------------------------------------------------------


def test_the_comparison_of_buffers_can_say_no() -> None:
    strategy, grid = run(case_of("FedADMM"), "batch-norm")
    sent, buffers = uploads(grid, 2), {"body.1.running_mean"}
    check_buffers(strategy, sent, buffers)
    sent[0]["body.1.running_mean"] = sent[0]["body.1.running_mean"] + 1
    with pytest.raises(AssertionError):
        check_buffers(strategy, sent, buffers)


@pytest.mark.parametrize("model", ["tied", "frozen", "lora"])
def test_what_is_frozen_or_a_second_name_does_not_travel(model: str) -> None:
    _, grid = run(case_of("FedADMM"), model)
    names = {name for own in uploads(grid, 2).values() for name in own}
    assert names == {n for n in build(model).state_dict() if not re.search(MODELS[model].stays, n)}


def test_frozen_arrays_that_differ_are_refused_before_round_1() -> None:
    other = build("lora")
    nn.init.ones_(other.body.base.bias)  # type: ignore[union-attr, arg-type]
    with refused(ValueError, "body.base.bias", "client 0"):
        start(case_of("FedADMM"), initial_arrays(other), lambda _: build("lora"))


def test_an_adapter_alone_will_do_for_initial_arrays() -> None:
    whole = initial_arrays(build("lora"))
    adapter = ArrayRecord({n: a for n, a in whole.items() if "base" not in n})
    strategy, _ = start(case_of("Ditto"), adapter, lambda _: build("lora"))
    state = strategy.global_arrays.to_torch_state_dict()
    missing = build("lora").load_state_dict(state, strict=False)
    assert missing.missing_keys == ["body.base.weight", "body.base.bias"]
    full, _ = run(case_of("Ditto"), "lora")
    for name, array in strategy.global_arrays.items():
        np.testing.assert_array_equal(array.numpy(), full.global_arrays[name].numpy())


# --- Half precision -------------------------------------------------------------------------------


def test_half_precision_travels_as_float32_and_is_given_back_as_it_was() -> None:
    case = case_of("FPFC")
    strategy, grid = run(case, "float16")
    assert {a.dtype for arrays in uploads(grid, 2).values() for a in arrays.values()} == {
        np.dtype(np.float32)
    }
    halves = ArrayRecord(build("float16").state_dict())
    again, _ = start(case, halves, lambda _: build("float16"))
    assert {a.numpy().dtype for a in again.global_arrays.values()} == {np.dtype(np.float16)}
    assert_same_bits(again.state_dict(), strategy.state_dict())


# --- What clients keep ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "model"),
    pairs(
        [case_of(name) for name in ("FLAME", "FedAPM", "LpProjADMM", "Ditto")],
        ["batch-norm", "tied", "lora", "bfloat16"],
    ),
)
def test_a_clients_own_model_is_a_whole_state_dict(case: Case, model: str) -> None:
    _, grid = run(case, model)
    net = build(model)
    client = make_client(case, grid.context(node_of(0)), net)
    kept = {name: torch.from_numpy(array) for name, array in client.personal_arrays().items()}
    net.load_state_dict(kept)  # strict
    if model == "batch-norm":
        assert kept["body.1.num_batches_tracked"] > 0  # of the training, not of the new model
    for name, array in kept.items():
        assert torch.equal(net.state_dict()[name].to(array.dtype), array), name
