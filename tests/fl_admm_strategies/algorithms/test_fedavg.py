"""FedAvg by hand, and to the bit Flower's own.

The clients by hand are the three of the pages' worked examples: see `quadratics`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import flwr.serverapp.strategy as flowers
import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from numpy.testing import assert_allclose
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clients import (
    FedADMMClient,
    FedAvgFTClient,
    FedDynClient,
    FedProxClient,
    SGDClient,
    client_app,
    personalise,
)
from fl_admm_strategies import (
    FedADMM,
    FedAvg,
    FedAvgFT,
    FedDyn,
    FedProx,
    InProcessGrid,
    StatefulStrategy,
    StepDecay,
)
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.maths.checks import Count
from tests.fl_admm_strategies.algorithms.quadratics import (
    ALL,
    A,
    B,
    Counting,
    Grid,
    N,
    Scalar,
    follow,
    run,
)
from tests.support.federation import (
    assert_close,
    assert_same_bits,
    dataset,
    make_client,
    make_model,
    node_of,
)
from tests.support.pace import fast
from tests.support.refusals import refused

NUM_CLIENTS = 6


def fedavg(**settings: Any) -> FedAvg:
    return FedAvg(**{"lr": 0.1, "local_epochs": 2, "fraction_evaluate": 0.0} | settings)


# --- By hand --------------------------------------------------------------------------------------


def test_the_worked_example() -> None:
    # x - b_i shrinks by 1 - .1 a_i a step, so by .81, .64, .36 a round. From 0: 1 - .81 = .19,
    # -(1 - .64) = -.36, 3 (1 - .36) = 1.92, and w = (10 * .19 - 20 * .36 + 30 * 1.92)/60
    # = 52.3/60 = .8716666667. Then 1 - .81 (1 - w) = .89605, -1 + .64 (1 + w) = .1978666667,
    # 3 - .36 (3 - w) = 2.2338, and w = (8.9605 + 3.9573333333 + 67.014)/60 = 1.3321972222.
    assert_allclose(
        run(fedavg(), Grid(SGDClient), ALL, ALL).w, [0.8716666667, 1.3321972222], atol=1e-8
    )


def test_the_mean_is_over_those_who_take_part() -> None:
    # Clients 1 and 2, then 2 and 3: w = (10 * .19 - 20 * .36)/30 = -.1766666667;
    # w_2 = -1 + .64 (1 + w) = -.4730666667, w_3 = 3 - .36 (3 - w) = 1.8564, and
    # w = (-20 * .4730666667 + 30 * 1.8564)/50 = .9246133333.
    w, _, _ = run(fedavg(), Grid(SGDClient), (0, 1), (1, 2))
    assert_allclose(w, [-0.1766666667, 0.9246133333], atol=1e-8)


def test_buffers_are_averaged_as_the_parameters_are() -> None:
    # Two passes over n_i samples: seen = 2 n_i = 20, 40, 60 and the mean, weighted by n_i,
    # (10 * 20 + 20 * 40 + 30 * 60)/60 = 46.6667; as much again in round 2. An integer stays one.
    strategy = fedavg()
    follow(strategy, Grid(SGDClient, Counting), ALL, ALL)
    model = strategy.global_model()
    assert_allclose(model["seen"], [93.3333333333], atol=1e-8)
    assert (model["steps"].dtype, model["steps"]) == ("int64", 4)


# --- Fine-tuned -----------------------------------------------------------------------------------


def finetuned(strategy: StatefulStrategy, server_round: int) -> list[float]:
    """Return the losses of the fine-tuned models, as the headline's mean is made of them."""
    metrics = strategy.evaluate_metrics[server_round]
    losses = [metrics[i]["finetuned-loss"] for i in ALL]
    means = strategy.run.record.result.evaluate_metrics_clientapp[server_round]
    assert means["loss"] == pytest.approx(np.average(losses, weights=N))
    return losses


def test_a_client_uses_the_global_model_after_epochs_of_its_own() -> None:
    # From w of the worked example k steps of .1 leave (1 - .1 a_i)^k of w - b_i, and the loss is
    # a_i/2 times the square. The second round's step is half as long.
    strategy = FedAvgFT(lr=StepDecay(0.1, 0.5, 1), local_epochs=2, finetune_epochs=3)
    w, _, _ = run(strategy, Grid(FedAvgFTClient), ALL, ALL)
    for server_round, rate in ((1, 0.1), (2, 0.05)):
        expected = [
            a / 2 * ((1 - rate * a) ** 3 * (w[server_round - 1] - b)) ** 2
            for a, b in zip(A, B, strict=True)
        ]
        assert_allclose(finetuned(strategy, server_round), expected, rtol=1e-12)
    plain = strategy.evaluate_metrics[2][1]["global-loss"]
    assert plain == pytest.approx((w[1] + 1) ** 2)  # a = 2, b = -1


class ProxFT(FedProx):
    finetune_epochs: Count = 3


@pytest.mark.parametrize(
    ("strategy", "client"),
    [
        (FedADMM(finetune_epochs=3), FedADMMClient),
        (FedDyn(finetune_epochs=3), FedDynClient),
        (ProxFT(), FedProxClient),
    ],
    ids=["FedADMM", "FedDyn", "a FedProx"],
)
def test_any_method_with_one_global_model_has_it_by_the_setting(
    strategy: StatefulStrategy, client: Any
) -> None:
    (w,) = follow(strategy, Grid(client), ALL, read=lambda: strategy.global_model()["w"].item())
    expected = [a / 2 * ((1 - 0.1 * a) ** 3 * (w - b)) ** 2 for a, b in zip(A, B, strict=True)]
    assert_allclose(finetuned(strategy, 1), expected, rtol=1e-12)


def test_the_fine_tuned_model_is_that_of_personalise() -> None:
    strategy = FedAvgFT(lr=0.1, finetune_epochs=2)
    run(strategy, Grid(FedAvgFTClient), ALL)
    models = strategy.models()
    assert "personalise" in models.absent
    assert models.global_ is not None
    batch = (torch.zeros(10), torch.ones(10, dtype=torch.float64))
    own = personalise(
        Scalar(), models.global_, [batch], lambda w, b: ((w - b) ** 2).mean() / 2, lr=0.1, epochs=2
    )
    found = strategy.evaluate_metrics[1][0]["finetuned-loss"]
    assert (float(own["w"].item()) - 1) ** 2 / 2 == pytest.approx(found)
    with pytest.raises(RuntimeError, match="personalise"):
        strategy.model_arrays("finetuned", 0)


# --- To the bit -----------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {"lr": 0.3, "local_epochs": 2, "seed": 2, "fraction_train": 0.5}


def final(strategy: Any, client_fn: Callable[[Context], Any], arrays: ArrayRecord) -> Arrays:
    """Return the model after four rounds of half of the clients."""
    strategy.start(InProcessGrid(client_app(client_fn), NUM_CLIENTS), arrays, 4)
    return {name: array.numpy() for name, array in strategy.global_arrays.items()}


class Flowers(flowers.FedAvg):
    """Flower's own, with given clients in each round, in the order of their ids."""

    def __init__(self, trained: dict[int, list[int]]) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.trained = trained

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any
    ) -> Iterable[Message]:
        messages = super().configure_train(server_round, arrays, config, grid)
        of = {message.metadata.dst_node_id: message for message in messages}
        return [of[node_of(client)] for client in self.trained[server_round]]


@pytest.mark.parametrize("dtype", fast([torch.float32], [torch.float64, torch.float32]))
def test_it_is_flowers_own_to_the_bit(dtype: torch.dtype) -> None:
    # Both sum n_i/n w_i in the order of the clients. Flower does it in the type of the arrays, so
    # in double precision the bits are the same. In single precision this library sums in double and
    # rounds once, where Flower rounds 3 products and 2 sums: up to 6 roundings of 2^-24 a round.
    def client_fn(context: Context) -> Any:
        inputs, labels = dataset(int(context.node_config["partition-id"])).tensors
        loader = DataLoader(TensorDataset(inputs.to(dtype), labels), batch_size=4, shuffle=True)
        return SGDClient(
            context, make_model().to(dtype), loader, nn.CrossEntropyLoss(), test_loader=loader
        ).to_client()

    arrays = ArrayRecord(make_model().to(dtype).state_dict())
    strategy = FedAvg(**SETTINGS)
    ours = final(strategy, client_fn, arrays)
    chosen = {r: sorted(clients) for r, clients in strategy.train_metrics.items()}
    assert len({tuple(clients) for clients in chosen.values()}) > 1
    config = ConfigRecord({"lr": 0.3, "local-epochs": 2, "seed": 2})
    with InProcessGrid(client_app(client_fn), NUM_CLIENTS) as grid:
        result = Flowers(chosen).start(grid, arrays, 4, train_config=config)
    theirs = {name: array.numpy() for name, array in result.arrays.items()}
    if dtype == torch.float64:
        assert_same_bits(ours, theirs)
    assert_close(ours, theirs, rtol=0, atol=4 * 6 * 2**-24)


# --- Settings -------------------------------------------------------------------------------------


def test_the_client_says_which_setting_flowers_strategy_did_not_send() -> None:
    client: Any = make_client(SGDClient, Context(1, 2, {}, RecordDict(), {}))
    with refused(ValueError, "'lr'"):
        client.fit([np.zeros(1)], {"server-round": 1})
