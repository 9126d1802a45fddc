"""What all PyTorch clients share: randomness, evaluation, refusals; by the example of FedProx's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from numpy.testing import assert_array_equal
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clients import FedProxClient, accuracy, rmse
from clients.toolkit.round.torch_client import find_device
from fl_admm_strategies.algorithms.fedprox import FedProxInstruction
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.runtime.messages.records import ClientInstruction
from tests.clients.methods.lines import Noisy, line_client, new_context, sample
from tests.clients.methods.messages import Received, received, scalars
from tests.support.federation import dataset, make_model
from tests.support.refusals import refused


def arrays_of(model: nn.Module) -> Arrays:
    return {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}


def message(model: Arrays, **config: Any) -> Received:
    return received(FedProxInstruction(model, mu=1.0, lr=0.1, local_epochs=1), **config)


def evaluation(*models: Arrays, **config: Any) -> Received:
    """Return a message with the models of kinds a, b, ... to evaluate."""
    asked = ClientInstruction(dict(zip("abc", models, strict=False)), config)
    return asked.flat(), asked.full_config()


def client(model: nn.Module | None = None, context: Context | None = None, **kwargs: Any) -> Any:
    data = dataset(2)
    settings = {
        "train_loader": DataLoader(data, batch_size=4, shuffle=True),
        "loss_fn": nn.CrossEntropyLoss(),
        "test_loader": DataLoader(data, batch_size=64),
    } | kwargs
    return FedProxClient(context or new_context(), model or make_model(), **settings)


# --- Randomness ---------------------------------------------------------------------------------


def test_the_seed_decides_and_torchs_own_state_stays() -> None:
    start = arrays_of(Noisy())

    def fit(outer_seed: int, seed: int) -> list[np.ndarray]:
        torch.manual_seed(outer_seed)
        before = torch.random.get_rng_state()
        arrays, _, _ = client(Noisy()).fit(*message(start, seed=seed))
        assert torch.equal(torch.random.get_rng_state(), before)
        return arrays

    first, same, other = fit(1, seed=5), fit(2, seed=5), fit(1, seed=6)
    for a, b in zip(first, same, strict=True):
        assert_array_equal(a, b)
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_loader_with_a_generator_of_its_own_is_seeded_too() -> None:
    def fit(seed: int) -> list[np.ndarray]:
        generator = torch.Generator().manual_seed(seed)
        loader = DataLoader(dataset(2), batch_size=4, shuffle=True, generator=generator)
        return client(train_loader=loader).fit(*message(arrays_of(make_model())))[0]

    for a, b in zip(fit(1), fit(2), strict=True):
        assert_array_equal(a, b)


def test_an_evaluation_leaves_torchs_state_and_does_not_depend_on_it() -> None:
    shuffled = DataLoader(dataset(2), batch_size=4, shuffle=True)
    reports = []
    for outer_seed in (1, 2):
        torch.manual_seed(outer_seed)
        before = torch.random.get_rng_state()
        models = 3 * [arrays_of(make_model())]
        reports.append(client(test_loader=shuffled).evaluate(*evaluation(*models)))
        assert torch.equal(torch.random.get_rng_state(), before)
    assert reports[0] == reports[1]


# --- Evaluation ---------------------------------------------------------------------------------


def test_metrics_by_hand() -> None:
    outputs = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    assert float(accuracy(outputs, torch.tensor([1, 1, 1, 0]))) == 0.75
    assert float(rmse(torch.tensor([1.0, 5.0]), torch.tensor([1.0, 1.0]))) == pytest.approx(8**0.5)


def test_a_metric_is_taken_over_all_samples_at_once() -> None:
    # RMSE over batches of errors (0, 4) and (4): sqrt(32/3); the mean of batches would differ.
    one = torch.ones(2, dtype=torch.float64)
    loader = [(one, one * torch.tensor([2, 6])), sample(1, 6)]
    line = line_client(FedProxClient, test_loader=loader, metrics={"rmse": rmse})
    _, num_examples, metrics = line.evaluate(*evaluation(scalars(w=1, b=1, seen=0)))
    assert num_examples == 3
    assert metrics["a-rmse"] == pytest.approx((32 / 3) ** 0.5, rel=1e-14)
    assert metrics["a-loss"] == pytest.approx(16 / 3, rel=1e-14)


def test_get_properties_says_who_the_client_is() -> None:
    context = Context(1, 2, {"partition-id": 3, "num-partitions": 8}, RecordDict(), {})
    assert client(context=context).get_properties({}) == {"client-id": 3, "num-clients": 8}
    assert client().get_properties({}) == {}


# --- Refusals -----------------------------------------------------------------------------------

START = arrays_of(make_model())


def test_what_does_not_fit_is_refused_by_name() -> None:
    with refused(ValueError, "tail"):
        client().fit(*message(START, upload=["body.bias", "tail"]))
    with refused(ValueError, "test_loader"):
        client(test_loader=None).evaluate(*evaluation(START))
    empty = DataLoader(TensorDataset(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)))
    for loader in ([], empty):
        with refused(ValueError, "train_loader"):
            client(train_loader=loader).fit(*message(START))
        with refused(ValueError, "test_loader"):
            client(test_loader=loader).evaluate(*evaluation(START))


def test_batches_of_another_form_need_split_batch() -> None:
    inputs, labels = dataset(2).tensors
    loader = [{"img": inputs, "class": labels}]
    for wrong in (loader, [(inputs, labels, labels)]):
        with refused(TypeError, "split_batch"):
            client(train_loader=wrong).fit(*message(START))
    split = client(train_loader=loader, split_batch=lambda batch: (batch["img"], batch["class"]))
    assert split.fit(*message(START))[1] == len(labels)


# --- The device ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"),
    [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")],
)
def test_auto_takes_the_best_device_there_is(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert find_device("auto") == torch.device(expected)
    assert client(device="auto" if expected == "cpu" else "cpu").device == torch.device("cpu")
    missing = [kind for kind, there in (("cuda", cuda), ("mps", mps)) if not there]
    for device in missing:
        with refused(ValueError, device):
            find_device(device)
