"""FedAPMClient by hand: v, then u; what it keeps, evaluates and refuses.

See docs/methods/fedapm.md.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context
from numpy.testing import assert_allclose
from torch import Tensor, nn

from clients import FedAPMClient
from fl_admm_strategies.algorithms.fedapm import FedAPMEvaluation, FedAPMInstruction, FedAPMRule
from fl_admm_strategies.runtime.messages.stamp import made_by
from tests.clients.methods.lines import line_client, new_context
from tests.clients.methods.messages import Received, changed, received, scalars
from tests.support.refusals import refused


class Pair(nn.Module):
    """u + sum(v), in float64."""

    def __init__(self, v: tuple[float, ...] = (0.0,)) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.tensor(v, dtype=torch.float64))
        self.u = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.u + self.v.sum()) * inputs


def client(context: Context | None = None, model: nn.Module | None = None) -> Any:
    """Return a client with one sample, x = 1 and y = 4: f = (u + v - 4)^2 / 2."""
    return line_client(FedAPMClient, context, model or Pair((1.0,)))


RULE = FedAPMRule(published=True, rho=2.0, share=0.5)
ROUND = FedAPMInstruction(
    model=scalars(u=3),
    start={"u": np.array([2.0]), "dual": np.zeros(1)},
    rule=RULE.text(),
    duals="strategy",
    optimised=["u"],
    lr=0.05,  # .1 for half the loss
    local_epochs=1,
    wants_step_sum=False,
    personal="^v",
    sigma=1.0,
    personal_epochs=2,
    share=0.5,
)
message = partial(changed, ROUND)
LATER = {"start": None, "version": 1, "model": scalars(u=2.245375)}
"""After the round above pi/rho = u - w = -.754625; at w = u the pull is to 3 again."""


def evaluation(
    w: float, u: float | None = None, *, version: int = 0, server_round: int = 1
) -> Received:
    start = None if u is None else {"begin": np.array([u])}
    asked = FedAPMEvaluation(scalars(u=w), start, RULE.text(), ["u"], "^v")
    return received(asked, version=version, server_round=server_round)


def kept(context: Context) -> dict[str, float]:
    return {name: float(a.sum()) for name, a in client(context).personal_arrays().items()}


@pytest.mark.parametrize("begins", [False, True])
def test_v_moves_at_the_old_u_and_u_at_the_new_v(begins: bool) -> None:
    # In a first turn u_i is where the row begins: u_i^0 of Algorithm 1, not the w of the message.
    # v = 1 is the model's own, u = 2, anchor 3, alpha = 1/2, sigma = 1, rho = 2, eta = .1.
    # v: 1 - .1 [.5 (-1)] = 1.05; 1.05 - .1 [.5 (-.95) + (1.05 - 1)] = 1.0925.
    # u: 2 - .1 [.5 (3.0925 - 4) + 2 (2 - 3)] = 2.245375, loss .9075^2/2 before it.
    context = new_context()
    start = {"begin": np.array([2.0])} if begins else ROUND.start
    arrays, num_examples, metrics = client(context).fit(*message(start=start))
    assert_allclose(np.ravel(arrays), [2.245375], rtol=1e-14)
    assert num_examples == 1
    assert metrics.pop("initial-loss") == 0.5  # before the v-step
    assert metrics == {"loss": pytest.approx(0.9075**2 / 2, rel=1e-13), **made_by("FedAPM")}
    assert kept(context) == pytest.approx({"v": 1.0925, "u": 2.245375}, rel=1e-14)


def test_it_goes_on_from_its_own_v_whatever_the_model_it_is_built_with() -> None:
    # v: 1.0925 - .1 [.5 (1.0925 + 2.245375 - 4)] = 1.12560625, sigma's term is 0 in the first step.
    # u: 2.245375 - .1 [.5 (3.37098125 - 4) + 2 (2.245375 - 3)] = 2.4277509375.
    context = new_context()
    client(context).fit(*message())
    later = message(**LATER, server_round=2, personal_epochs=1)
    arrays, _, _ = client(context, Pair((50.0,))).fit(*later)
    assert_allclose(np.ravel(arrays), [2.4277509375], rtol=1e-14)
    assert kept(context)["v"] == pytest.approx(1.12560625, rel=1e-14)
    # The server took in round 1 only: the same again, not a third round.
    again = message(**LATER, server_round=3, personal_epochs=1)
    arrays, _, _ = client(context).fit(*again)
    assert_allclose(np.ravel(arrays), [2.4277509375], rtol=1e-14)


def test_the_accuracy_test_ends_the_u_step() -> None:
    # At v = 1.0925 the u-step's gradient is .5 (u - 2.9075) + 2 (u - 3) = 2.5 (u - 2.9815); a step
    # of .1 leaves 3/4 of it. From u = 2 its square is 6.02, then 3.39 = .5625 * 6.02, 1.90, 1.07,
    # .603: the first at most .9 after 4 steps, u = 2.9815 - .9815 (3/4)^4.
    level = {"tolerance": 0.9, "loss_weight": 0.5, "max_steps": 100}
    arrays, _, metrics = client().fit(*message(**level))
    assert metrics["steps"] == 4
    assert_allclose(np.ravel(arrays), [2.9815 - 0.9815 * 0.75**4], rtol=1e-13)
    assert metrics["residual"] == pytest.approx((2.5 * 0.9815 * 0.75**4) ** 2, rel=1e-12)


def test_evaluation_is_of_its_own_pair_first_and_of_the_shared_u_with_its_own_v() -> None:
    # v^0 = 1 of the model, u^0 = 2 that goes along, w = 3.5: f(v, u) = (3 - 4)^2 / 2 and
    # f(v, w) = (4.5 - 4)^2 / 2.
    context = new_context()
    loss, num_examples, metrics = client(context).evaluate(*evaluation(3.5, 2))
    assert (loss, num_examples) == (0.5, 1)
    assert metrics == {"personal-loss": 0.5, "global-loss": 0.125, **made_by("FedAPM")}
    client(context).fit(*message())
    asked = evaluation(3.5, version=1, server_round=2)
    loss, _, metrics = client(context, Pair((50.0,))).evaluate(*asked)
    assert loss == metrics["personal-loss"]
    assert metrics == pytest.approx(
        {
            "personal-loss": (1.0925 + 2.245375 - 4) ** 2 / 2,
            "global-loss": (1.0925 + 3.5 - 4) ** 2 / 2,
            **made_by("FedAPM"),
        },
        rel=1e-12,
    )


# --- Bad input ----------------------------------------------------------------------------------


def test_personal_shapes_may_not_change_between_rounds() -> None:
    context = new_context()
    client(context, Pair((1.0, 2.0))).fit(*message())
    later = message(**LATER, server_round=2)
    changed = client(context, Pair((1.0,)))
    with refused(ValueError, "round 1", "'v': (2,)", "'v': (1,)"):
        changed.fit(*later)
    with refused(ValueError, "round 1", "'v': (2,)", "'v': (1,)"):
        changed.evaluate(*evaluation(3, version=1, server_round=2))
    client(context, Pair((0.0, 0.0))).fit(*later)  # the shape it had
