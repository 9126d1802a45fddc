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
from tests.clients.methods.messages import Received, received, scalars
from tests.support.federation import dataset, make_model


def new_context(**node_config: Any) -> Context:
    return Context(run_id=1, node_id=2, node_config=node_config, state=RecordDict(), run_config={})


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


class Noisy(nn.Module):
    """The small network with dropout, whose masks come from torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()
        self.drop = nn.Dropout(0.5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(self.drop(inputs))


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
    def fit(own_seed: int) -> list[np.ndarray]:
        generator = torch.Generator().manual_seed(own_seed)
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


def test_a_client_on_the_cpu_seeds_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch writes down the stack for each that is not there, and would seed those that are."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail(f"seeded: {seed}"))
    client().fit(*message(START))


# --- Evaluation ---------------------------------------------------------------------------------


def test_dropout_is_off_in_evaluation() -> None:
    model = arrays_of(Noisy())
    one, other = (client(Noisy()).evaluate(*evaluation(model, seed=seed))[2] for seed in (1, 2))
    assert one == pytest.approx(other, rel=1e-5)


def test_metrics_by_hand() -> None:
    outputs = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    assert float(accuracy(outputs, torch.tensor([1, 1, 1, 0]))) == 0.75
    assert float(rmse(torch.tensor([1.0, 5.0]), torch.tensor([1.0, 1.0]))) == pytest.approx(8**0.5)


class Line(nn.Module):
    """w x + b with a buffer; the body of a block model in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.w * inputs + self.b


def half_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 0.5 * ((outputs - targets) ** 2).mean()


def test_a_metric_is_taken_over_all_samples_at_once() -> None:
    # RMSE over batches of errors (0, 4) and (4): sqrt(32/3); the mean of batches would differ.
    one = torch.ones(2, dtype=torch.float64)
    loader = [
        (one, torch.tensor([2.0, 6.0], dtype=torch.float64)),
        (one[:1], torch.tensor([6.0], dtype=torch.float64)),
    ]
    own = FedProxClient(
        new_context(), Line(), loader, half_square, test_loader=loader, metrics={"rmse": rmse}
    )
    _, num_examples, metrics = own.evaluate(*evaluation(scalars(w=1, b=1)))
    assert num_examples == 3
    assert metrics["a-rmse"] == pytest.approx((32 / 3) ** 0.5, rel=1e-14)
    assert metrics["a-loss"] == pytest.approx(16 / 3, rel=1e-14)


def test_get_properties_says_who_the_client_is() -> None:
    own = client(context=new_context(**{"partition-id": 3, "num-partitions": 8}))
    assert own.get_properties({}) == {"client-id": 3, "num-clients": 8}
    assert client().get_properties({}) == {}


def test_uploads_do_not_change_with_the_model() -> None:
    model = make_model()
    uploaded = client(model).get_parameters({})
    before = [array.copy() for array in uploaded]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    for array, expected in zip(uploaded, before, strict=True):
        assert_array_equal(array, expected)


# --- Refusals -----------------------------------------------------------------------------------

START = arrays_of(make_model())


def test_a_model_of_another_number_of_arrays() -> None:
    other = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(
        ValueError, match=r"of 4 arrays .*, the client's has 2 \(0.weight, 0.bias\)"
    ):
        client(other).fit(*message(START))


def test_a_model_of_another_shape() -> None:
    wrong = START | {"head.weight": START["head.weight"][:, :3]}
    with pytest.raises(ValueError, match=r"'head.weight' of shape \(3, 3\).*\(3, 4\).*one model"):
        client().fit(*message(wrong))


def test_an_array_that_the_server_wants_and_the_client_lacks() -> None:
    with pytest.raises(ValueError, match=r"wants the arrays tail, which this client does not have"):
        client().fit(*message(START, upload=["body.bias", "tail"]))


def empty_loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)))


@pytest.mark.parametrize("loader", [[], empty_loader()], ids=["list", "DataLoader"])
def test_empty_loaders(loader: Any) -> None:
    with pytest.raises(ValueError, match="train_loader is empty"):
        client(train_loader=loader).fit(*message(START))
    with pytest.raises(ValueError, match="test_loader is empty"):
        client(test_loader=loader).evaluate(*evaluation(START))


def test_a_missing_test_loader() -> None:
    with pytest.raises(ValueError, match=r"no test_loader.*fraction_evaluate=0"):
        client(test_loader=None).evaluate(*evaluation(START))


def test_batches_of_another_form_need_split_batch() -> None:
    inputs, labels = dataset(2).tensors
    loader = [{"img": inputs, "class": labels}]
    with pytest.raises(TypeError, match=r"yields a dict of img, class, expected .*split_batch="):
        client(train_loader=loader).fit(*message(START))
    own = client(train_loader=loader, split_batch=lambda batch: (batch["img"], batch["class"]))
    assert own.fit(*message(START))[1] == len(labels)
    with pytest.raises(TypeError, match=r"expected pairs"):
        client(train_loader=[(inputs, labels, labels)]).fit(*message(START))


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


def test_a_client_on_auto_trains_where_it_can() -> None:
    auto, plain = client(device="auto"), client()
    assert auto.device == find_device("auto")
    if auto.device.type == "cpu":
        asked = message(arrays_of(make_model()), seed=5)
        for a, b in zip(auto.fit(*asked)[0], plain.fit(*asked)[0], strict=True):
            assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("gpu", "device is 'gpu', expected 'auto', 'cpu', 'cuda'"),
        ("cuda", "device is 'cuda', which PyTorch does not find in this process"),
        ("mps", "device is 'mps', which PyTorch does not find in this process"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: str, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match=said):
        client(device=device)
