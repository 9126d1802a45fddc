"""FPFCClient and what all PyTorch clients share: messages, state, evaluation, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from numpy.testing import assert_allclose, assert_array_equal
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clients import FPFCClient, TorchClient, accuracy, rmse
from tests.support.federation import dataset, make_client, make_model

NAMES = ["body.weight", "body.bias", "head.weight", "head.bias"]


def new_context(**node_config: Any) -> Context:
    return Context(run_id=1, node_id=2, node_config=node_config, state=RecordDict(), run_config={})


def arrays_of(model: nn.Module) -> list[np.ndarray]:
    return [tensor.numpy().copy() for tensor in model.state_dict().values()]


def fit_config(**changes: Any) -> dict[str, Any]:
    return {
        "rho": 1.0,
        "lr": 0.1,
        "local-epochs": 1,
        "clustered": ",".join(NAMES),
        "version": 0,
        "server-round": 1,
        "seed": 5,
        "groups": "anchor:4,start:4",
    } | changes


def client(model: nn.Module | None = None, context: Context | None = None, **kwargs: Any) -> Any:
    data = dataset(2)
    settings = {
        "train_loader": DataLoader(data, batch_size=4, shuffle=True),
        "loss_fn": nn.CrossEntropyLoss(),
        "test_loader": DataLoader(data, batch_size=64),
    } | kwargs
    return FPFCClient(context or new_context(), model or make_model(), **settings)


# --- Equation (5) -------------------------------------------------------------------------------


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


def line_client(context: Context | None = None, x: float = 1.0, y: float = 4.0) -> FPFCClient:
    batch = (torch.tensor([x], dtype=torch.float64), torch.tensor([y], dtype=torch.float64))
    return FPFCClient(
        context or new_context(), Line(), [batch], half_square, test_loader=[batch], full_batch=True
    )


def column(*values: float) -> list[np.ndarray]:
    return [np.array([value]) for value in values]


def line_config(**changes: Any) -> dict[str, Any]:
    return fit_config(clustered="w", rho=2.0, groups="anchor:2,start:1") | changes


def test_the_clustered_block_starts_at_omega_and_is_pulled_to_zeta() -> None:
    # Clustered w: from omega = 1 with zeta = 3, rho = 2, alpha = 0.1. Shared b: from the server's
    # 0.5, no pull. One sample x = 1, y = 4, f = (w + b - 4)^2 / 2.
    # t=0: residual 1.5 - 4 = -2.5; w = 1 - .1 (-2.5 + 2 (1 - 3)) = 1.65; b = .5 + .25 = .75.
    # t=1: residual -1.6; w = 1.65 - .1 (-1.6 + 2 (-1.35)) = 2.08; b = .75 + .16 = .91.
    # The loss before the last step is 1.6^2 / 2 = 1.28.
    arrays, num_examples, metrics = line_client().fit(
        column(3.0, 0.5, 1.0), line_config(**{"local-epochs": 2})
    )
    assert_allclose(np.concatenate(arrays), [2.08, 0.91], rtol=1e-14)
    assert num_examples == 1
    assert metrics == {"loss": pytest.approx(1.28, rel=1e-14)}


def test_it_starts_from_its_own_last_iterate_when_the_server_sends_none() -> None:
    # From w = 1.65 (above, T = 1), zeta = 1.65, b = 0.35: residual -2, so w = 1.85 and b = 0.55.
    context = new_context()
    line_client(context).fit(column(3.0, 0.5, 1.0), line_config())
    config = line_config(groups="anchor:2", **{"version": 1, "server-round": 4})
    arrays, _, _ = line_client(context).fit(column(1.65, 0.35), config)
    assert_allclose(np.concatenate(arrays), [1.85, 0.55], rtol=1e-14)
    # Now it holds the iterate of round 4.
    config = line_config(groups="anchor:2", **{"version": 4, "server-round": 5})
    arrays, _, _ = line_client(context).fit(column(1.85, 2.15), config)
    assert_allclose(np.concatenate(arrays), [1.85, 2.15], rtol=1e-14)


def test_a_client_without_its_iterate_refuses() -> None:
    config = line_config(groups="anchor:2", **{"version": 3})
    with pytest.raises(
        ValueError, match=r"variables of round 3, but it holds those of rounds \[\]"
    ):
        line_client().fit(column(3.0, 0.5), config)
    context = new_context()
    line_client(context).fit(column(3.0, 0.5, 1.0), line_config(**{"server-round": 2}))
    with pytest.raises(ValueError, match=r"of round 3, .*of rounds \[2\]"):
        line_client(context).fit(column(3.0, 0.5), config)


# --- Randomness ---------------------------------------------------------------------------------


class Noisy(nn.Module):
    """The small network with dropout, whose masks come from torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()
        self.drop = nn.Dropout(0.5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(self.drop(inputs))


def noisy_config(**changes: Any) -> dict[str, Any]:
    return fit_config(clustered=",".join(f"net.{name}" for name in NAMES), **changes)


def test_the_seed_decides_and_torchs_own_state_stays() -> None:
    start = 2 * arrays_of(make_model())

    def fit(outer_seed: int, seed: int) -> list[np.ndarray]:
        torch.manual_seed(outer_seed)
        before = torch.random.get_rng_state()
        arrays, _, _ = client(Noisy()).fit(start, noisy_config(seed=seed))
        assert torch.equal(torch.random.get_rng_state(), before)
        return arrays

    first, same, other = fit(1, seed=5), fit(2, seed=5), fit(1, seed=6)
    for a, b in zip(first, same, strict=True):
        assert_array_equal(a, b)
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_loader_with_a_generator_of_its_own_is_seeded_too() -> None:
    start = 2 * arrays_of(make_model())

    def fit(own_seed: int) -> list[np.ndarray]:
        generator = torch.Generator().manual_seed(own_seed)
        loader = DataLoader(dataset(2), batch_size=4, shuffle=True, generator=generator)
        return client(train_loader=loader).fit(start, fit_config())[0]

    for a, b in zip(fit(1), fit(2), strict=True):
        assert_array_equal(a, b)


@pytest.mark.parametrize("client_class", [FPFCClient, TorchClient])
def test_an_evaluation_leaves_torchs_state_and_does_not_depend_on_it(client_class: Any) -> None:
    reports = []
    for outer_seed in (1, 2):
        torch.manual_seed(outer_seed)
        before = torch.random.get_rng_state()
        own = make_client(client_class, new_context(**{"partition-id": 2}))
        config = {"groups": "personal:4,cluster:4,mean-dual:4", "clustered": ",".join(NAMES)}
        if client_class is TorchClient:
            config = {"groups": "personal:4,cluster:4,other:4"}
        reports.append(own.evaluate(3 * arrays_of(make_model()), config))
        assert torch.equal(torch.random.get_rng_state(), before)
    assert reports[0] == reports[1]


# --- Evaluation ---------------------------------------------------------------------------------


def test_the_kinds_of_models_and_the_diagnostics() -> None:
    # One sample x = 1, y = 4. personal (w, b) = (1, 1): residual -2, f = 2. cluster (2, 3): 1,
    # f = 1/2. The gradient over the clustered w is the residual: |-2 + 0.5| = 1.5 with the mean
    # dual 0.5, and 1 at the cluster's model.
    config = {"groups": "personal:2,cluster:2,mean-dual:1", "clustered": "w"}
    loss, num_examples, metrics = line_client().evaluate(column(1, 1, 2, 3, 0.5), config)
    assert (loss, num_examples) == (2.0, 1)
    assert metrics == {
        "personal-loss": 2.0,
        "cluster-loss": 0.5,
        "stationarity": 1.5,
        "cluster-gradient-norm": 1.0,
    }
    _, _, metrics = line_client().evaluate(column(1, 1), {"groups": "personal:2"})
    assert metrics == {"personal-loss": 2.0}  # no dual, no diagnostics


def test_the_gradient_is_over_the_training_data() -> None:
    batch = (torch.ones(1, dtype=torch.float64), torch.full((1,), 4.0, dtype=torch.float64))
    test = (torch.ones(1, dtype=torch.float64), torch.full((1,), 9.0, dtype=torch.float64))
    own = FPFCClient(new_context(), Line(), [batch], half_square, test_loader=[test])
    config = {"groups": "personal:2,cluster:2,mean-dual:1", "clustered": "w"}
    loss, _, metrics = own.evaluate(column(1, 1, 1, 1, 0.0), config)
    assert loss == 24.5  # (2 - 9)^2 / 2, on the test data
    assert metrics["stationarity"] == 2.0  # |2 - 4|, on the training data


def test_dropout_is_off_in_evaluation_and_in_the_gradient() -> None:
    config = {
        "groups": "personal:4,cluster:4,mean-dual:4",
        "clustered": ",".join(f"net.{name}" for name in NAMES),
    }
    models = 2 * arrays_of(make_model()) + [np.zeros_like(a) for a in arrays_of(make_model())]
    assert client(Noisy()).evaluate(models, config | {"seed": 1})[2] == pytest.approx(
        client(Noisy()).evaluate(models, config | {"seed": 2})[2], rel=1e-5
    )


def test_metrics_by_hand() -> None:
    outputs = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    assert float(accuracy(outputs, torch.tensor([1, 1, 1, 0]))) == 0.75
    assert float(rmse(torch.tensor([1.0, 5.0]), torch.tensor([1.0, 1.0]))) == pytest.approx(8**0.5)


def test_a_metric_is_taken_over_all_samples_at_once() -> None:
    # RMSE over batches of errors (0, 4) and (4): sqrt(32/3); the mean of batches would differ.
    one = torch.ones(2, dtype=torch.float64)
    loader = [
        (one, torch.tensor([2.0, 6.0], dtype=torch.float64)),
        (one[:1], torch.tensor([6.0], dtype=torch.float64)),
    ]
    own = FPFCClient(
        new_context(), Line(), loader, half_square, test_loader=loader, metrics={"rmse": rmse}
    )
    _, num_examples, metrics = own.evaluate(column(1, 1), {"groups": "personal:2"})
    assert num_examples == 3
    assert metrics["personal-rmse"] == pytest.approx((32 / 3) ** 0.5, rel=1e-14)
    assert metrics["personal-loss"] == pytest.approx(16 / 3, rel=1e-14)


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

START = 2 * arrays_of(make_model())


def test_a_model_of_another_number_of_arrays() -> None:
    other = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"of 4 arrays, the client's has 2 \(0.weight, 0.bias\)"):
        client(other).fit(START, fit_config())


def test_a_model_of_another_shape() -> None:
    wrong = [array.copy() for array in START]
    wrong[2] = wrong[2][:, :3]
    with pytest.raises(ValueError, match=r"'head.weight' of shape \(3, 3\).*\(3, 4\).*one model"):
        client().fit(wrong, fit_config())


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(inputs))


def test_buffers_in_the_clustered_block_are_refused_with_advice() -> None:
    model = Normed()
    names = [name for name, t in model.state_dict().items() if t.is_floating_point()]
    start = arrays_of(model) + [model.state_dict()[name].numpy() for name in names]
    config = fit_config(clustered=",".join(names), groups=f"anchor:7,start:{len(names)}")
    with pytest.raises(ValueError, match=r"norm.running_mean, norm.running_var.*clustered=\.\.\."):
        client(model).fit(start, config)


def test_frozen_parameters_in_the_clustered_block_are_refused() -> None:
    model = make_model()
    model.get_submodule("body").requires_grad_(False)
    with pytest.raises(ValueError, match=r"body.weight, body.bias.*frozen parameter"):
        client(model).fit(START, fit_config())


def empty_loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)))


@pytest.mark.parametrize("loader", [[], empty_loader()], ids=["list", "DataLoader"])
def test_empty_loaders(loader: Any) -> None:
    with pytest.raises(ValueError, match="train_loader is empty"):
        client(train_loader=loader).fit(START, fit_config())
    with pytest.raises(ValueError, match="test_loader is empty"):
        client(test_loader=loader).evaluate(START[:4], {"groups": "personal:4"})


def test_a_missing_test_loader() -> None:
    with pytest.raises(ValueError, match=r"no test_loader.*fraction_evaluate=0"):
        client(test_loader=None).evaluate(START[:4], {"groups": "personal:4"})


def test_batches_of_another_form_need_split_batch() -> None:
    inputs, labels = dataset(2).tensors
    loader = [{"img": inputs, "label": labels}]
    with pytest.raises(TypeError, match=r"yields dict, expected pairs .*split_batch=lambda batch"):
        client(train_loader=loader).fit(START, fit_config())
    own = client(train_loader=loader, split_batch=lambda batch: (batch["img"], batch["label"]))
    assert own.fit(START, fit_config())[1] == len(labels)
    with pytest.raises(TypeError, match=r"expected pairs"):
        client(train_loader=[(inputs, labels, labels)]).fit(START, fit_config())
