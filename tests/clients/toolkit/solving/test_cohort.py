"""Clients that train together: each gets what it gets alone, to rounding, and fails alone."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

from clients import MeanMetric, Minibatches, PFedMeClient, SGDClient, TorchClient, accuracy
from clients.toolkit.solving import cohort
from clients.toolkit.solving.cohort import train_together
from fl_admm_strategies.algorithms.pfedme import PFedMeInstruction
from fl_admm_strategies.runtime.messages.records import groups_setting
from tests.clients.methods.messages import received

CONFIG: dict[str, Any] = {"version": 0, "lr": 0.2, "local-epochs": 2, "seed": 3, "server-round": 1}
SIZES = (21, 10, 40, 16, 34)
FEATURES, CLASSES = 5, 3


def linear() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES)


def network(activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 7), activation(), nn.Linear(7, CLASSES))


class Net(nn.Module):
    """A class of a user's own."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.inner, self.outer, self.scale = linear(), nn.Linear(CLASSES, CLASSES), scale

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = F.relu(self.inner(x.view(len(x), -1))) * self.scale
        return self.outer(hidden)


def samples(client: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(client)
    size = SIZES[client % len(SIZES)]
    x = torch.randn(size, FEATURES, generator=generator, dtype=dtype)
    return x, (x.sum(1) > 0).long() + (torch.rand(size, generator=generator) > 0.5)


def make(
    client: int,
    model: Callable[[], nn.Module] = linear,
    loss: Any = None,
    loader: Any = None,
    client_class: type[SGDClient] = SGDClient,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> SGDClient:
    node_config = {"partition-id": client, "num-partitions": 20}
    context = Context(1, client + 2, node_config, RecordDict(), {})
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(1)
        net = model().to(dtype)
    if loader is None:
        loader = DataLoader(TensorDataset(*samples(client, dtype)), batch_size=8, shuffle=True)
    return client_class(context, net, loader, loss or nn.CrossEntropyLoss(), **options)


def evaluate_together(jobs: Any, choice: Any) -> list[Any]:
    return train_together(jobs, choice, evaluating=True)


def job(client: SGDClient) -> Any:
    return client, list(client.arrays().values()), dict(CONFIG)


def alone(client: SGDClient) -> Any:
    return client.fit(list(client.arrays().values()), dict(CONFIG))


def arrays_of(result: Any) -> list[bytes]:
    assert not isinstance(result, BaseException), result
    return [array.tobytes() for array in result[0]]


@pytest.fixture
def stacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of all stacks that are trained or measured."""
    sizes: list[int] = []

    class Counted(cohort.Samples):
        def __init__(self, epochs: Any, *options: Any) -> None:
            sizes.append(len(epochs))
            super().__init__(epochs, *options)

    monkeypatch.setattr(cohort, "Samples", Counted)
    return sizes


def assert_as_alone(result: Any, expected: Any) -> None:
    assert not isinstance(result, BaseException), result
    arrays, size, metrics = expected
    assert result[1] == size
    assert result[2] == pytest.approx(metrics, rel=1e-4)
    for ours, theirs in zip(result[0], arrays, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


# --- The same as one by one -----------------------------------------------------------------------

momentum = partial(torch.optim.SGD, momentum=0.9, weight_decay=0.01, nesterov=True)


class HalfError(nn.MSELoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002
        return 0.5 * super().forward(input, target)


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a loss that has no form for single samples."""
    return F.cross_entropy(outputs, targets) + 0.1 * outputs.square().mean()


class Scalar(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze(-1)


class Recurrent(nn.Module):
    """A GRU over the features, one after another."""

    def __init__(self, kind: type[nn.RNNBase] = nn.GRU) -> None:
        super().__init__()
        self.layer, self.head = kind(1, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(x[:, :, None])[0][:, -1])
        return logits


class Noisy(nn.Linear):
    """Drops in a function of its own, and nothing in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


def of_layers(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(FEATURES, 4), *copy.deepcopy(layers))


def convolution() -> nn.Module:
    return nn.Sequential(
        *(nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 4, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool1d(2), nn.Dropout1d(0.2), nn.Flatten(), nn.Linear(8, CLASSES)),
    )


def tied() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(3)))
    model[1].weight = model[0].weight
    return model


def half_frozen() -> nn.Module:
    model = network()
    next(iter(model.parameters())).requires_grad_(False)
    return model


def regression(client: int) -> list[tuple[Tensor, Tensor]]:
    x, y = samples(client)
    return [(x[:8], y[:8].float()), (x[8:], y[8:].float())]


def in_memory(client: int, size: int = 8) -> Minibatches:
    return Minibatches(*samples(client), size)


TOGETHER: dict[str, Callable[[int], SGDClient]] = {
    "a DataLoader": make,
    "mini-batches": lambda i: make(i, loader=in_memory(i)),
    "all at once": lambda i: make(i, loader=[samples(i)], full_batch=True),
    "momentum": lambda i: make(i, network, optimizer_fn=momentum),
    "clipping": lambda i: make(i, network, max_grad_norm=0.05, optimizer_fn=momentum),
    "a function as loss": lambda i: make(i, network, F.cross_entropy),
    "hinge": lambda i: make(i, network, nn.MultiMarginLoss()),
    "a loss of one's own": lambda i: make(i, network, own_loss),
    "regression": lambda i: make(i, lambda: Scalar(FEATURES, 1), HalfError(), regression(i)),
    "a class of one's own": lambda i: make(i, Net),
    "a CNN with dropout": lambda i: make(i, convolution, loader=in_memory(i)),
    "a GRU": lambda i: make(i, Recurrent),
    "an LSTM": lambda i: make(i, partial(Recurrent, nn.LSTM)),
    "dropout": lambda i: make(i, lambda: Noisy(FEATURES, CLASSES), loader=in_memory(i, 4)),
    "tied parameters": lambda i: make(i, tied),
    "frozen parameters": lambda i: make(i, half_frozen),
}


@pytest.mark.parametrize("kind", TOGETHER)
def test_in_a_stack_a_client_gets_what_it_gets_alone(kind: str, stacked: list[int]) -> None:
    before = torch.get_rng_state()
    results = train_together([job(TOGETHER[kind](i)) for i in range(5)], True)
    assert max(stacked) > 1
    assert torch.equal(torch.get_rng_state(), before)
    for i, result in enumerate(results):
        assert_as_alone(result, alone(TOGETHER[kind](i)))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=6),
    batch=st.integers(1, 24),
    model=st.sampled_from([linear, network, Recurrent, convolution, tied, half_frozen]),
    options=st.sampled_from(
        [{}, {"full_batch": True}, {"optimizer_fn": momentum}, {"max_grad_norm": 0.1}]
    ),
    epochs=st.integers(1, 3),
)
def test_whatever_sizes_clients_have(
    sizes: list[int], batch: int, model: Any, options: dict[str, Any], epochs: int
) -> None:
    def client(i: int) -> SGDClient:
        x, y = samples(2, torch.float64)
        loader = Minibatches(x[: sizes[i]], y[: sizes[i]], batch)
        return make(i, model, loader=loader, dtype=torch.float64, **options)

    def message(i: int) -> Any:
        made = client(i)
        config = CONFIG | {"lr": 0.02, "local-epochs": epochs, "seed": i}
        return made, list(made.arrays().values()), config

    for i, result in enumerate(train_together([message(i) for i in range(len(sizes))], True)):
        made, arrays, config = message(i)
        assert_as_alone(result, made.fit(arrays, config))


@pytest.mark.parametrize("batches", ["in memory", "a DataLoader"])
def test_batches_that_a_method_draws_itself_are_those_that_it_draws_alone(batches: str) -> None:
    def client(i: int) -> PFedMeClient:
        loader = in_memory(i, 4) if batches == "in memory" else None
        return make(i, loader=loader, client_class=PFedMeClient)  # type: ignore[arg-type,return-value]

    def message(made: PFedMeClient, i: int) -> Any:
        asked = PFedMeInstruction(made.arrays(), 1.0, 0.1, 0.5, 9, 2, None)
        return received(asked, seed=i)

    clients = [client(i) for i in range(3)]
    results = train_together([(made, *message(made, i)) for i, made in enumerate(clients)], True)
    for i, result in enumerate(results):
        made = client(i)
        assert_as_alone(result, made.fit(*message(made, i)))


def test_a_fixed_layout_repeats_its_bits_and_seeds_tell_clients_apart() -> None:
    kind = TOGETHER["dropout"]
    first, again = (train_together([job(kind(i)) for i in (0, 1)], True) for _ in range(2))
    assert list(map(arrays_of, first)) == list(map(arrays_of, again))
    same = [(c, a, {**config, "seed": seed}) for seed in (3, 4) for c, a, config in [job(kind(0))]]
    one, other = train_together(same, True)
    assert arrays_of(one) == arrays_of(first[0])
    assert arrays_of(one) != arrays_of(other)


def test_many_samples_fit_in_little_memory(
    stacked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train_together([job(make(i)) for i in range(5)], True)
    before = len(stacked)
    monkeypatch.setattr(cohort, "STACK_BYTES", 6000)
    parts = train_together([job(make(i)) for i in range(5)], True)
    assert max(stacked[before:]) < max(stacked[:before])
    for one, other in zip(parts, whole, strict=True):
        assert_as_alone(one, other)


# --- Evaluation -----------------------------------------------------------------------------------


def top_two(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.topk(2, dim=1).indices == targets[:, None]).any(1).float().mean()


def job_of_test(client: SGDClient) -> Any:
    """Return the job of an evaluation of three models: its own, that of a group, one of all."""
    number = int(client.context.node_config["partition-id"])
    own = client.arrays()
    models = {"own": number, "group": 10 + number % 2, "all": 20}
    groups = {
        kind: {n: a + np.float32(0.1 * k) for n, a in own.items()} for kind, k in models.items()
    }
    config = {"groups": groups_setting(groups), "seed": 3}
    return client, [array for arrays in groups.values() for array in arrays.values()], config


METRICS = {"accuracy": accuracy, "top-two": top_two}
TESTED: dict[str, Callable[[int], SGDClient]] = {
    "a network": lambda i: with_test(i, network, metrics=METRICS),
    "dropout": lambda i: with_test(i, convolution, metrics=METRICS),
    "any model": lambda i: with_test(i, Net, metrics=METRICS),
    "regression": lambda i: with_test(
        i, lambda: Scalar(FEATURES, 1), loss=HalfError(), loader=regression(i)
    ),
    "frozen": lambda i: with_test(i, half_frozen, metrics=METRICS),
}


class Evaluating(SGDClient):
    """Evaluates every model of a message."""

    models = TorchClient.models  # type: ignore[assignment]


def with_test(client: int, model: Any, *, loader: Any = None, **options: Any) -> SGDClient:
    test_loader = loader or [samples(client, options.get("dtype", torch.float32))]
    options = {"client_class": Evaluating, **options}
    return make(client, model, test_loader=test_loader, **options)


@pytest.mark.parametrize("kind", TESTED)
def test_an_evaluation_together_says_what_each_client_says_alone(
    kind: str, stacked: list[int]
) -> None:
    before = torch.get_rng_state()
    results = evaluate_together([job_of_test(TESTED[kind](i)) for i in range(5)], True)
    assert max(stacked) > 1
    assert torch.equal(torch.get_rng_state(), before)
    for i, result in enumerate(results):
        client, arrays, config = job_of_test(TESTED[kind](i))
        loss, size, metrics = client.evaluate(arrays, config)
        assert not isinstance(result, BaseException), result
        assert result[:2] == (pytest.approx(loss, rel=1e-5), size)
        assert result[2] == pytest.approx(metrics, rel=1e-5)


class OwnMeasure(Evaluating):
    def measure(self, problem: Any) -> Any:
        return {"loss": 7.0}


MEASURED_ALONE: dict[str, Callable[[int], SGDClient]] = {
    "a running metric": lambda i: with_test(i, network, metrics={"m": MeanMetric(accuracy)}),
    "a measure of its own": lambda i: with_test(i, network, client_class=OwnMeasure),
    "labels that are not there": lambda i: with_test(i, network, loader=mislabelled(i)),
}


@pytest.mark.parametrize("kind", MEASURED_ALONE)
def test_what_cannot_be_measured_in_a_stack_is_alone_with_the_same_bits(kind: str) -> None:
    results = evaluate_together([job_of_test(MEASURED_ALONE[kind](i)) for i in range(3)], True)
    for i, result in enumerate(results):
        client, arrays, config = job_of_test(MEASURED_ALONE[kind](i))
        if isinstance(result, BaseException):
            with pytest.raises(type(result), match=re.escape(str(result))):
                client.evaluate(arrays, config)
        else:
            assert result == client.evaluate(arrays, config)


def test_who_fails_in_an_evaluation_fails_alone() -> None:
    def client(i: int) -> SGDClient:
        return with_test(i, network, loader=mislabelled(1) if i == 1 else None)

    first, failed, last = evaluate_together([job_of_test(client(i)) for i in range(3)], True)
    assert isinstance(failed, IndexError)
    for i, result in ((0, first), (2, last)):
        assert result == evaluate_together([job_of_test(client(i))], True)[0]


# --- Who cannot -----------------------------------------------------------------------------------


class OwnLoop(SGDClient):
    def minimise(self, objective: Any, *, lr: float, epochs: int) -> Any:
        return {"loss": 1.0}


class Coupled(nn.Linear):
    """What a sample gives depends on the others of its batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


def hooked(client: int) -> nn.Module:
    model = linear()
    model.register_forward_hook(lambda module, inputs, outputs: outputs * (1.0 + client))
    return model


def but_one(i: int) -> tuple[Tensor, Tensor]:
    x, y = samples(i)
    y[i] = -100
    return x[:10], y[:10]


ALONE: dict[str, Callable[[int], SGDClient]] = {
    "batch norm": lambda i: make(i, of_layers(nn.BatchNorm1d(4))),
    "half precision": lambda i: make(i, dtype=torch.bfloat16),
    "Adam": lambda i: make(i, optimizer_fn=torch.optim.Adam),
    "a schedule": lambda i: make(
        i, scheduler_fn=partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    ),
    "weights of classes": lambda i: make(i, loss=nn.CrossEntropyLoss(torch.ones(CLASSES))),
    "an ignored target": lambda i: make(i, loader=[but_one(i)]),
    "a loss of its own": lambda i: make(i, loss=lambda out, y: F.cross_entropy(out, y)),
    "a minimise of its own": lambda i: make(i, client_class=OwnLoop),
    "hooks": lambda i: make(i, lambda: hooked(i)),
    "coupled samples": lambda i: make(i, lambda: Coupled(FEATURES, CLASSES)),
}


@pytest.mark.parametrize("kind", ALONE)
def test_what_cannot_be_stacked_is_trained_one_by_one_to_the_same_bits(kind: str) -> None:
    results = train_together([job(ALONE[kind](i)) for i in range(3)], True)
    for i, result in enumerate(results):
        assert arrays_of(result) == arrays_of(alone(ALONE[kind](i)))


def test_a_client_with_a_fit_of_its_own_is_left_to_it() -> None:
    class OwnFit(SGDClient):
        def fit(self, *args: Any) -> Any:
            return super().fit(*args)

    assert make(0).driver(True) is not None
    assert make(0, client_class=OwnFit).driver(True) is None
    assert make(0, client_class=OwnFit).driver(False) is not None


def test_models_that_differ_in_a_number_share_no_stack(stacked: list[int]) -> None:
    def client(i: int) -> SGDClient:
        return make(i, lambda: Net(scale=1.0 + i % 2))

    results = train_together([job(client(i)) for i in range(4)], True)
    assert set(stacked) == {2}
    for i, (arrays, *_) in enumerate(results):  # type: ignore[misc]
        np.testing.assert_allclose(arrays[0], alone(client(i))[0][0], rtol=1e-4, atol=1e-6)


def test_auto_leaves_out_convolutions_of_large_batches(stacked: list[int]) -> None:
    convolutions = nn.Unflatten(1, (1, 1_000)), nn.Conv1d(1, 1, 1), nn.Flatten()

    def client(i: int, batch_size: int, *layers: nn.Module) -> SGDClient:
        net = nn.Sequential(*copy.deepcopy(layers), nn.Linear(1_000, 3))
        data = TensorDataset(torch.ones(20, 1_000), torch.zeros(20, dtype=torch.int64))
        return make(i, lambda: net, loader=DataLoader(data, batch_size))

    cases: Any = [("auto", 10, (), 1), ("auto", 10, convolutions, 0), (True, 10, convolutions, 1)]
    for choice, batch_size, layers, count in [*cases, ("auto", 5, convolutions, 1)]:
        stacked.clear()
        train_together([job(client(i, batch_size, *layers)) for i in (0, 5)], choice)
        assert (len(stacked) > 0) == count


def test_a_client_that_auto_leaves_out_draws_one_batch_more_than_alone() -> None:
    drawn = []

    class Counted:
        dataset = TensorDataset(torch.ones(20, 1_000), torch.zeros(20, dtype=torch.int64))

        def __iter__(self) -> Iterator[Any]:
            for batch in DataLoader(self.dataset, 10):
                drawn.append(1)
                yield batch

    def client(i: int) -> SGDClient:
        layers = nn.Unflatten(1, (1, 1_000)), nn.Conv1d(1, 1, 1), nn.Flatten(), nn.Linear(1_000, 3)
        return make(i, lambda: nn.Sequential(*layers), loader=Counted())

    alone(client(0))
    of_one = len(drawn)
    drawn.clear()
    train_together([job(client(i)) for i in (0, 5)], "auto")
    assert len(drawn) == 2 * (of_one + 1)


# --- Who fails, fails alone -----------------------------------------------------------------------


class Breaking:
    """A loader that raises in the second epoch."""

    def __init__(self, client: int) -> None:
        self.dataset, self.epochs = TensorDataset(*samples(client)), 0

    def __iter__(self) -> Iterator[Any]:
        self.epochs += 1
        for number in range(3):
            if self.epochs == 2 and number == 1:
                raise OSError("the disk is gone")
            yield self.dataset[8 * number : 8 * number + 8]


def mislabelled(client: int) -> list[tuple[Tensor, Tensor]]:
    x, y = samples(client)
    return [(x[:8], y[:8]), (x[8:], y[8:] + 2)]


FAILING: dict[str, tuple[Any, type[BaseException] | None]] = {
    "a loader": (Breaking(1), OSError),
    "a label": (mislabelled(1), IndexError),
    "a number": ([(torch.full((8, FEATURES), torch.nan), torch.ones(8).long())], None),
}


@pytest.mark.parametrize("kind", FAILING)
def test_who_fails_fails_alone(kind: str) -> None:
    loader, error = FAILING[kind]
    expected = train_together([job(make(i, network)) for i in (0, 2)], True)
    clients = [make(0, network), make(1, network, loader=loader), make(2, network)]
    first, failed, last = train_together([job(client) for client in clients], True)
    if error is None:
        assert not isinstance(failed, BaseException)
        assert np.isnan(failed[2]["loss"])
    else:
        assert type(failed) is error
    assert [arrays_of(first), arrays_of(last)] == list(map(arrays_of, expected))
