"""Flower's FedAvg as a method of the app, against descent steps written out here."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from torch import Tensor, nn

from clients import SGDClient
from fl_admm_strategies.runtime.record import Traffic
from simulations.experiments.experiment import load_experiment
from simulations.experiments.run_config import RunConfig
from simulations.methods import FedAvg, Federation, grid_of
from simulations.methods.federation import Method
from tests.simulations.quick_runs import result_of, run
from tests.support.federation import assert_same_bits

ALL = ("training.fraction-train=1.0", "algorithm={ name = 'fedavg', lr = 0.3, local-epochs = 3 }")
HALF = ("training.fraction-train=0.5", ALL[1])


def federation_of(*changes: str, seed: int = 0) -> Federation:
    config = RunConfig("digits-fpfc", changes=("data.options.clients=6", *changes), seed=seed)
    return load_experiment(config).federation


def trained(federation: Federation, rounds: int = 3, **options: Any) -> FedAvg:
    """Return the strategy after a run, a node for each of the 6 clients."""
    strategy: FedAvg = federation.strategy()
    with grid_of(federation, 6) as grid:
        arrays = federation.problem.initial_arrays(strategy)
        strategy.start(grid, arrays, rounds, **{"evaluate_every": 2, "progress": False} | options)
    return strategy


def descend(weights: list[Tensor], data: tuple[Tensor, Tensor], lr: float, epochs: int) -> Any:
    """Return softmax regression's weight and bias after full-gradient steps."""
    weight, bias = (w.clone().requires_grad_() for w in weights)
    for _ in range(epochs):
        loss = nn.functional.cross_entropy(data[0] @ weight.T + bias, data[1])
        steps = torch.autograd.grad(loss, (weight, bias))
        weight, bias = (
            (w - lr * step).detach().requires_grad_()
            for w, step in zip((weight, bias), steps, strict=True)
        )
    return [weight.detach(), bias.detach()]


def accuracy_of(weights: list[Tensor], data: tuple[Tensor, Tensor]) -> float:
    outputs = data[0] @ weights[0].T + weights[1]
    return float((outputs.argmax(dim=1) == data[1]).float().mean())


def test_it_is_the_weighted_mean_of_local_descents() -> None:
    federation = federation_of(*ALL)
    strategy = trained(federation)
    assert isinstance(strategy, FlowersFedAvg)
    clients = federation.problem.data.clients
    arrays = federation.problem.initial_arrays(strategy)
    weights = [torch.from_numpy(np.array(array.numpy())) for array in arrays.values()]
    sizes = [len(own.train[1]) for own in clients]
    expected = {}
    for server_round in range(1, 4):
        own = [descend(weights, client.train, lr=0.3, epochs=3) for client in clients]
        weights = [
            sum(n * w[k] for n, w in zip(sizes, own, strict=True)) / sum(sizes) for k in (0, 1)
        ]
        expected[server_round] = [accuracy_of(weights, client.test) for client in clients]
    # Every second round and the last. One of 60 test samples may tip by rounding.
    assert list(strategy.evaluate_metrics) == [2, 3]
    for server_round, metrics in strategy.evaluate_metrics.items():
        assert list(metrics) == list(range(6))  # by client
        for client, own in metrics.items():
            assert own["global-accuracy"] == pytest.approx(expected[server_round][client], abs=0.02)
    for name, array, mine in zip(
        ("weight", "bias"), strategy.state_dict().values(), weights, strict=True
    ):
        np.testing.assert_allclose(array, mine.numpy(), atol=1e-5, err_msg=name)


def test_the_traffic_is_one_model_each_way() -> None:
    strategy = trained(federation_of(*HALF), rounds=2)
    assert strategy.traffic == {k: Traffic(3 * 650 * 4, 3 * 650 * 4) for k in (1, 2)}
    assert [len(own) for own in strategy.train_metrics.values()] == [3, 3]


@pytest.mark.parametrize("batches", [(), ("training.batch-size=20",)])
def test_a_seed_gives_the_same_bits_and_leaves_the_process_as_it_was(
    batches: tuple[str, ...],
) -> None:
    random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), torch.random.get_rng_state()
    first = trained(federation_of(*HALF, *batches), rounds=3)
    assert random.getstate() == before[0]
    assert torch.equal(torch.random.get_rng_state(), before[1])
    random.seed(2)
    torch.manual_seed(2)
    again = trained(federation_of(*HALF, *batches), rounds=3)
    assert_same_bits(again.state_dict(), first.state_dict())
    assert again.train_metrics == first.train_metrics
    assert again.evaluate_metrics == first.evaluate_metrics
    sampled = [tuple(own) for own in first.train_metrics.values()]
    assert [len(set(own)) for own in sampled] == [3, 3, 3]
    assert len(set(sampled)) > 1
    other = trained(federation_of(*HALF, *batches, seed=1), rounds=3)
    assert [tuple(own) for own in other.train_metrics.values()] != sampled


def test_it_runs_as_an_experiments_own_method(tmp_path: Path) -> None:
    changes = ("data.options.clients=6", *HALF, "training.num-rounds=2")
    config = RunConfig("digits-fpfc", changes=changes, out=tmp_path / "a")
    result = result_of(run(config, nodes=6))
    assert list(result["models"]) == ["one global model"]
    assert result["traffic"]["up_per_round"] == 3 * 650 * 4
    # The same as it is by itself, whatever has its nodes.
    strategy = trained(federation_of(*HALF), rounds=2)
    mean = np.mean([own["global-accuracy"] for own in strategy.evaluate_metrics[2].values()])
    assert result["models"]["one global model"]["mean"] == pytest.approx(mean, rel=1e-12)
    packed = RunConfig("digits-fpfc", changes=changes, out=tmp_path / "b")
    with pytest.raises(ValueError, match=r"6 clients are on 3 nodes, expected one on each"):
        run(packed, nodes=3)
    resumed = RunConfig("digits-fpfc", changes=changes, out=tmp_path / "c", resume=True)
    with pytest.raises(ValueError, match="saves no checkpoints: leave --resume out"):
        run(resumed, nodes=6)


def test_a_client_that_fails_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fit = SGDClient.fit

    def sometimes(self: SGDClient, *arguments: Any) -> Any:
        if self.context.node_config["partition-id"] == 3:
            raise OSError("the disk is full")
        return fit(self, *arguments)

    monkeypatch.setattr(SGDClient, "fit", sometimes)
    strategy = trained(federation_of(*ALL), rounds=1)
    assert list(strategy.train_metrics[1]) == [0, 1, 2, 4, 5]
    assert "Client 3 failed: OSError: the disk is full" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"lr": 0.0}, "lr is 0.0, expected"), ({"local_epochs": 0}, "local_epochs is 0, expected")],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedAvg(**settings)


# --- Robust rules in the place of the mean --------------------------------------------------------

ATTACKED = ("training.fraction-train=1.0", "attack.kind=gaussian", "attack.ratio=0.17")  # one of 6


def robust(name: str, *changes: str, **settings: float) -> FedAvg:
    table = ", ".join(
        [f"name = '{name}'", "lr = 0.3", *(f"{k} = {v}" for k, v in settings.items())]
    )
    return trained(federation_of(f"algorithm={{ {table} }}", *changes), rounds=1)


def largest(strategy: FedAvg) -> float:
    return max(float(np.abs(array).max()) for array in strategy.state_dict().values())


@pytest.mark.parametrize("name", ["krum", "multi-krum", "fedmedian", "fedtrimmedavg"])
def test_a_robust_rule_endures_what_the_mean_does_not(name: str) -> None:
    assert largest(robust("fedavg", *ATTACKED)) > 10
    strategy = robust(name, *ATTACKED)
    assert largest(strategy) < 1
    assert len(strategy.train_metrics[1]) == 6  # it is said of everybody what happened
    assert len(strategy.evaluate_metrics[1]) == 5  # but measured of the honest ones only
    assert strategy.models().method == strategy.title


def test_without_liars_multi_krum_and_the_trimmed_mean_are_the_mean() -> None:
    # FedAvg weights by examples, which a liar could make up; these clients have 239 or 240.
    mean = robust("fedavg", ATTACKED[0]).state_dict()
    for name in ("multi-krum", "fedtrimmedavg"):
        state = robust(name, ATTACKED[0], malicious=0.0).state_dict()
        for key, array in mean.items():
            np.testing.assert_allclose(state[key], array, atol=3e-4)


def test_a_rule_with_too_few_clients_is_refused_before_anything_runs() -> None:
    # Not after the experiment, for which a baseline is to be compared.
    for place in (
        "algorithm={ name = 'krum', malicious = 0.4 }",
        "baselines.krum.malicious=0.4",
        "baselines.ditto={ aggregation = 'krum', malicious = 0.4 }",
    ):
        with pytest.raises(ValueError, match="A round has 3 uploads for aggregation='krum'"):
            load_experiment(RunConfig("digits-fpfc", changes=(*TOO_FEW, place)))


TOO_FEW = ("data.options.clients=6", "training.fraction-train=0.5")


# --- The client -----------------------------------------------------------------------------------


def test_the_client_says_what_it_was_not_sent() -> None:
    federation = federation_of(*ALL)
    strategy = FlowersFedAvg()
    arrays: ArrayRecord = federation.problem.initial_arrays(strategy)
    with grid_of(federation, 6) as grid:
        (message, *_) = strategy.configure_train(1, arrays, ConfigRecord(), grid)
        (reply,) = grid.send_and_receive([message])
    (reason,) = reply.content.config_records["error"].values()
    assert "The message has no setting 'lr', the step size" in str(reason)


def test_every_strategy_has_what_the_app_asks_of_one() -> None:
    names = [name for name in vars(Method) if not name.startswith("_")]
    for made in (FedAvg(), federation_of().strategy()):
        for name in set(names) - {"train_metrics", "evaluate_metrics", "traffic"}:
            assert hasattr(made, name), name


def test_a_setting_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train_config has \['lr'\], which FedAvg\(...\) gives"):
        trained(federation_of(*ALL), 1, train_config=ConfigRecord({"lr": 0.1}))
