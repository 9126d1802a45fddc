"""Per-FedAvg by hand; docs/methods/perfedavg.md.

The clients are those of `quadratics`, and two with f_i = a_i/2 (w - b_i)^2 + c_i/4 w^4, a = (1, 2),
b = (1, -1), c = (.5, 1), from w = .8.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from numpy.testing import assert_allclose
from torch import nn

from clients import PerFedAvgClient, client_app
from fl_admm_strategies import PerFedAvg
from fl_admm_strategies.algorithms.perfedavg import PerFedAvgEvaluation, PerFedAvgInstruction
from tests.clients.methods.lines import line_client, sample
from tests.clients.methods.messages import received, scalars
from tests.fl_admm_strategies.algorithms.quadratics import (
    ALL,
    A,
    B,
    Counting,
    Grid,
    Scalar,
    follow,
    make_client,
    run,
)
from tests.support.federation import Federation
from tests.support.refusals import refused


def perfedavg(**settings: Any) -> PerFedAvg:
    usual = {"alpha": 0.1, "lr": 0.05, "local_steps": 2}
    return PerFedAvg(**usual | settings)


def adapted(strategy: PerFedAvg, server_round: int) -> list[float]:
    """Return the losses of the models adapted to each client."""
    metrics = strategy.evaluate_metrics[server_round]
    return [metrics[i]["adapted-loss"] for i in ALL]


def losses(*at: float) -> list[float]:
    return [a / 2 * (w - b) ** 2 for a, b, w in zip(A, B, at, strict=True)]


# --- The worked examples (E1, E2) ---------------------------------------------------------------


def test_first_order() -> None:
    # Client 1: w~ = .1, g = -.9, w = .045; w~ = .1405, g = -.8595, w = .087975.
    w, uploads, _ = run(strategy := perfedavg(mode="fo"), Grid(PerFedAvgClient), ALL, ALL)
    assert_allclose(uploads[0], [0.087975, -0.1536, 0.6768], atol=1e-8)
    assert strategy.train_metrics[1][0]["loss"] == pytest.approx(0.955**2 / 2)  # before the last
    assert_allclose(w, [0.203725, 0.3757249244], atol=1e-8)
    assert_allclose(adapted(strategy, 1), losses(0.2833525, -0.03702, 1.322235), atol=1e-8)
    assert_allclose(
        adapted(strategy, 2), losses(0.4381524319, 0.1005799395, 1.4254349546), atol=1e-8
    )


def test_with_the_hessian_which_is_exact_for_quadratics() -> None:
    w, uploads, _ = run(strategy := perfedavg(), Grid(PerFedAvgClient), ALL, ALL)
    assert_allclose(uploads[0], [0.07935975, -0.123904, 0.416448], atol=1e-8)
    assert_allclose(w, [0.1239679167, 0.2338001954], atol=1e-8)
    assert_allclose(
        adapted(strategy, 2), losses(0.3104201758, -0.0129598437, 1.3402801172), atol=1e-8
    )


class Quartic(Scalar):
    """w, from .8."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.w.fill_(0.8)


def quartic_client(context: Context) -> Any:
    i = int(context.node_config["partition-id"])
    a, b, c = ((1.0, 1.0, 0.5), (2.0, -1.0, 1.0))[i]
    batch = (torch.zeros(1), torch.full((1,), b, dtype=torch.float64))
    return PerFedAvgClient(
        context,
        Quartic(),
        [batch],
        lambda w, b: (a / 2 * (w - b) ** 2 + c / 4 * w**4).mean(),
        test_loader=[batch],
        metrics={"w": lambda w, b: w.mean()},
        full_batch=True,
    ).to_client()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"mode": "hf", "delta": 0.5}, [0.7387566706, 0.6776964626]),
        ({"mode": "hf"}, [0.7113391631, 0.6272034651]),  # with the Hessian itself
        ({"mode": "fo"}, [0.661362252, 0.542782318]),
    ],
)
def test_on_losses_that_are_not_quadratic(settings: Any, expected: list[float]) -> None:
    strategy = perfedavg(**settings)
    watched = Federation(client_app(quartic_client), 2)
    w: list[float] = []
    first = ArrayRecord(Quartic().state_dict())
    strategy.start(
        watched, first, 2, on_round=lambda *_: w.append(strategy.state.model["w"].item())
    )
    # By default delta = .001/max(1, ||g||): an error of the order of .001^2.
    assert_allclose(w, expected, atol=1e-6 if settings == {"mode": "hf"} else 1e-8)
    if "delta" in settings:
        uploads = [m.content["arrays"]["w"].numpy().item() for m in watched.replies("train", 1)]
        assert_allclose(sorted(uploads), [0.6810232059, 0.7964901353], atol=1e-8)
        metrics = strategy.evaluate_metrics[2]
        ends = [metrics[i]["adapted-w"] for i in (0, 1)]
        assert_allclose(ends, [0.6943644491, 0.3110324355], atol=1e-8)


# --- Special cases ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fo", "hf"])
def test_without_adaptation_it_is_fedavg_with_the_plain_mean(mode: str) -> None:
    # alpha = 0: two steps of .1, w = .5833333333, .9352777778.
    w, _, _ = run(perfedavg(mode=mode, alpha=0.0, lr=0.1), Grid(PerFedAvgClient), ALL, ALL)
    assert_allclose(w, [0.5833333333, 0.9352777778], atol=1e-8)


# --- Batches, buffers ---------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "per_step"), [("fo", 2), ("hf", 3)])
def test_a_step_has_batches_of_its_own(mode: str, per_step: int) -> None:
    drawn: list[int] = []

    class Loader(list[Any]):
        def __iter__(self) -> Any:
            for place, batch in enumerate(super().__iter__()):
                drawn.append(place)
                yield batch

    batches = Loader(sample(x, y) for x, y in ((1.0, 4.0), (0.0, 1.0), (2.0, 1.0), (1.0, 0.0)))
    client = line_client(PerFedAvgClient, train_loader=batches, full_batch=False)
    model = scalars(w=3, b=0.5, seen=7)
    asked = PerFedAvgInstruction(model, mode, 0.1, 0.1, 2, None)
    drawn.clear()
    client.fit(*received(asked))
    # To count its examples a list is read once; then they go on from step to step.
    size = len(batches)
    assert drawn[size:] == [place % size for place in range(2 * per_step)]


def test_it_is_adapted_along_the_gradient_on_all_data() -> None:
    # Of the samples (1, 4) and (0, 1) at (3, .5): (-.5, -.5) and (0, -.5), of mean (-.25, -.5). A
    # step of .1 ends at (3.025, .55), where the error of the first is -.425.
    batches = [sample(1.0, 4.0), sample(0.0, 1.0)]
    client = line_client(PerFedAvgClient, train_loader=batches, full_batch=False)
    evaluation = PerFedAvgEvaluation(scalars(w=3, b=0.5, seen=7), 0.1)
    _, _, metrics = client.evaluate(*received(evaluation))
    assert metrics["adapted-loss"] == pytest.approx(0.425**2 / 2)


@pytest.mark.parametrize("mode", ["fo", "hf"])
def test_of_a_steps_forward_passes_the_last_one_counts_for_the_buffers(mode: str) -> None:
    strategy = perfedavg(mode=mode, fraction_evaluate=0.0)
    follow(strategy, Grid(PerFedAvgClient, Counting), ALL)
    # Two steps of n_i samples each; the plain mean of 20, 40, 60.
    assert_allclose(strategy.global_model()["seen"], [40])
    assert strategy.global_model()["steps"] == 2


class Noisy(Scalar):
    """w times 0 or 2."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(inputs), training=self.training)


def test_both_gradients_of_hf_are_of_one_function() -> None:
    # (2 z w - 1)^2/2 has a curvature of at most 4: two steps of .05 are short, whatever z is. With
    # another draw for the second gradient their difference would be divided by 2e-6.
    context = Context(1, 2, {"partition-id": 0}, RecordDict(), {})
    client = make_client(PerFedAvgClient, context, Noisy)
    model = {"w": np.array([0.3])}
    (w,), _, _ = client.fit(*received(PerFedAvgInstruction(model, "hf", 0.1, 0.05, 2, 1e-6)))
    assert abs(float(w.item()) - 0.3) < 1


def test_an_optimizer_of_ones_own_is_refused() -> None:
    model = scalars(w=3, b=0.5, seen=7)
    client = line_client(PerFedAvgClient, optimizer_fn=partial(torch.optim.SGD, momentum=0.5))
    with refused(ValueError, "PerFedAvg", "optimizer_fn", "FedAvgFT"):
        client.fit(*received(PerFedAvgInstruction(model, "hf", 0.1, 0.1, 1, None)))
