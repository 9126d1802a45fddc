"""Batches that are dicts, and models that return their loss or an object with logits."""

from __future__ import annotations

from collections import UserDict
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from clients import FedProxClient, MeanMetric, accuracy
from clients.toolkit.data.batches import (
    answer_of,
    loss_of,
    split_batch,
    to_device,
    whole_batch,
)
from fl_admm_strategies.algorithms.fedprox import FedProxInstruction
from fl_admm_strategies.runtime.messages.records import ClientInstruction
from tests.clients.methods.lines import Line, new_context, sample
from tests.clients.methods.messages import received
from tests.support.federation import dataset, make_model
from tests.support.refusals import refused

INPUTS, LABELS = dataset(2).tensors


class Dicts(Dataset[dict[str, Tensor]]):
    """The samples of `dataset` as dicts, as flwr-datasets gives them."""

    def __init__(self, inputs: str, labels: str) -> None:
        self.names = inputs, labels

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        inputs, labels = self.names
        return {inputs: INPUTS[index], labels: LABELS[index]}


class Answering(nn.Module):
    """The small network behind the interface of Hugging Face's models."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> SimpleNamespace:
        logits = self.net(input_ids * attention_mask)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits)


class Scalar(Answering):
    """One that returns its loss alone."""

    def forward(self, **batch: Tensor) -> Any:
        return super().forward(**batch).loss


def tokens(batch_size: int = 4) -> list[Any]:
    """Return batches as a collator makes them, with masks of ones; they are no dict but act so."""
    return [
        UserDict(
            input_ids=INPUTS[i : i + batch_size],
            attention_mask=torch.ones(len(LABELS[i : i + batch_size]), 1),
            labels=LABELS[i : i + batch_size],
        )
        for i in range(0, len(LABELS), batch_size)
    ]


def pairs(batch_size: int = 4) -> list[Any]:
    return [(batch["input_ids"], batch["labels"]) for batch in tokens(batch_size)]


def trained(model: nn.Module, loader: Any, loss_fn: Any, **options: Any) -> Any:
    """Return the upload, the number of examples and the report of a client that trains."""
    start = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    message = received(FedProxInstruction(start, mu=1.0, lr=0.1, local_epochs=1))
    return FedProxClient(new_context(), model, loader, loss_fn, **options).fit(*message)


def same(one: Any, other: Any) -> None:
    for a, b in zip(one[0], other[0], strict=True):
        assert_array_equal(a, b)
    for _, _, metrics in (one, other):
        metrics.pop("constant-loss", None)  # a model that returns its loss has none
    assert one[1:] == other[1:]


CE = nn.CrossEntropyLoss()


@pytest.mark.parametrize("names", [("img", "label"), ("image", "labels"), ("x", "y")])
def test_a_dict_is_a_pair(names: tuple[str, str]) -> None:
    loader = DataLoader(Dicts(*names), batch_size=4)
    same(trained(make_model(), loader, CE), trained(make_model(), pairs(), CE))


@pytest.mark.parametrize(
    ("model", "loss_fn"), [(Answering, None), (Answering, CE), (Scalar, None)], ids=str
)
def test_several_inputs_are_arguments_and_the_model_may_return_its_loss(
    model: Any, loss_fn: Any
) -> None:
    same(trained(model(), tokens(), loss_fn), trained(make_model(), pairs(), CE))


def evaluated(model: nn.Module, loader: Any, loss_fn: Any, **metrics: Any) -> Any:
    arrays = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    message = ClientInstruction({"global": arrays})
    client = FedProxClient(
        new_context(), model, loader, loss_fn, test_loader=loader, metrics=metrics
    )
    return client.evaluate(message.flat(), message.full_config())


@pytest.mark.parametrize("loss_fn", [CE, None], ids=["loss_fn", "own"])
def test_metrics_of_an_answer_are_those_of_its_logits(loss_fn: Any) -> None:
    expected = evaluated(make_model(), pairs(), CE, accuracy=accuracy)[2]
    running = MeanMetric(accuracy)
    evaluated(Answering(), tokens()[:1], loss_fn, accuracy=running)  # another one begins anew
    for metric in (accuracy, running):
        _, num_examples, report = evaluated(Answering(), tokens(), loss_fn, accuracy=metric)
        assert num_examples == len(LABELS)
        assert report["global-loss"] == pytest.approx(expected["global-loss"], rel=1e-6)
        assert report["global-accuracy"] == pytest.approx(expected["global-accuracy"], rel=1e-6)


def test_a_model_that_returns_no_loss_is_named() -> None:
    with refused(TypeError, "(12, 3)", "loss_fn"):
        trained(make_model(), [INPUTS], None)


def test_forms_by_hand() -> None:
    one, two = torch.zeros(2), torch.ones(2)
    inputs, targets = split_batch({"a": one, "b": two, "labels": two, "text": ["x", "y"]})
    assert inputs == {"a": one, "b": two}
    assert targets is two
    assert whole_batch({"a": one, "text": ["x", "y"]}) == ({"a": one}, None)
    assert whole_batch([one, two]) == ((one, two), two)
    assert whole_batch(one) == (one, None)
    assert answer_of(nn.Bilinear(2, 2, 1), (one, two)).shape == (1,)
    loss = torch.tensor(2.0)
    for answer in (loss, {"loss": loss}, (loss, one), SimpleNamespace(loss=loss)):
        assert loss_of(answer) is loss
    moved = to_device({"a": [one], "b": (two, "text")}, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["b"][0].is_meta
    assert moved["b"][1] == "text"


@pytest.mark.slow
def test_clipping_and_a_schedule_by_hand() -> None:
    # f = -(w + b) x y on one sample with gradient (-3, -4) always: loss_fn gives -(3 w + 4 b).
    # Clipped to norm 1 the steps are lr (.6, .8); lr is 1, then 1/2 by the schedule: (.9, 1.2).
    model = Line()

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return -(3 * model.w + 4 * model.b).sum()

    start = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    message = received(FedProxInstruction(start, mu=0.0, lr=1.0, local_epochs=2))
    halved = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    options: Any = {"scheduler_fn": halved, "max_grad_norm": 1.0}
    for full_batch in (True, False):
        client = FedProxClient(
            new_context(), model, [sample(1.0, 1.0)], loss_fn, full_batch=full_batch, **options
        )
        (w, b, _), _, _ = client.fit(*message)
        assert np.concatenate([w, b]) == pytest.approx([0.9, 1.2], rel=1e-5)


class Picky(nn.Module):
    """Takes x, and fails by an error of its own where that has one feature."""

    def forward(self, x: Tensor) -> Tensor:
        return x if len(x) > 1 else len(3)  # type: ignore[arg-type]


def test_a_model_that_does_not_take_a_batch_is_said_to() -> None:
    batch = {"img": INPUTS, "label": LABELS}
    with refused(TypeError, "img, label", "split_batch"):
        answer_of(Picky(), batch)
    with pytest.raises(TypeError, match="has no len"):  # its own error stays
        answer_of(Picky(), {"x": INPUTS[:1]})
    assert answer_of(Picky(), {"x": INPUTS}) is INPUTS
