"""The clients of pFedMe and Lp-Proj by hand, on mini-batches; see docs/methods."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from numpy.testing import assert_allclose

from clients import LpProjClient, PFedMeClient
from fl_admm_strategies.algorithms.lp_proj_sgd import LpProjSGDInstruction
from fl_admm_strategies.algorithms.pfedme import PFedMeInstruction
from fl_admm_strategies.runtime.messages.stamp import made_by
from tests.clients.methods.lines import line_client, numbers, sample
from tests.clients.methods.messages import changed, received, scalars

MODEL = scalars(w=3, b=0.5, seen=7)
TWO_BATCHES = [sample(1.0, 4.0), sample(0.0, 1.0)]


ROUND = PFedMeInstruction(
    MODEL,
    lam=2.0,
    lr=0.1,
    outer_lr=0.25,
    local_rounds=2,
    inner_steps=2,
    upload=None,
)
pfedme = partial(changed, ROUND)


def test_pfedme_takes_k_steps_on_one_batch_and_then_the_next() -> None:
    # lambda = 2. (x, y) = (1, 4) from (3, .5): residual -.5, (3.05, .55); residual -.4 and pull
    # 2 * .05: + .1 (.4 - .1) = (3.08, .58), and w_i = (3.04, .54). Then (0, 1): residual -.42:
    # w = 3.08 - .1 * 2 * .04 = 3.072, b = .58 + .1 (.42 - 2 * .04) = .614; residual -.386:
    # w = 3.072 - .1 * 2 * .032 = 3.0656, b = .614 + .1 (.386 - 2 * .074) = .6378; and
    # w_i = (3.04 + .5 * .0256, .54 + .5 * .0978). The loss before the last step is .386^2/2.
    client = line_client(PFedMeClient, train_loader=TWO_BATCHES, full_batch=False)
    arrays, num_examples, metrics = client.fit(*pfedme())
    assert_allclose(np.ravel(arrays), [3.0528, 0.5889, 7], rtol=1e-14)
    assert_allclose(numbers(client.personal_arrays()), [3.0656, 0.6378, 7], rtol=1e-14)
    assert num_examples == 2
    assert metrics == {
        "initial-loss": 0.125,
        "loss": pytest.approx(0.386**2 / 2, rel=1e-12),
        **made_by("PFedMe"),
    }
    # The loader begins anew when it ends: a third step of w_i has the first batch again.
    again = line_client(PFedMeClient, train_loader=TWO_BATCHES, full_batch=False)
    _, _, metrics = again.fit(*pfedme(local_rounds=3, inner_steps=1, lam=1e-12))
    # .1 of the residuals in turn: (3.05, .55), then b = .595; 3.05 + .595 - 4 = -.355.
    assert metrics["loss"] == pytest.approx(0.355**2 / 2, rel=1e-9)


@pytest.mark.parametrize(
    ("p", "theta", "w_i"), [(2, [3.04, 0.585], [3.02, 0.5425]), (1, [2.85, 0.395], [2.5, 0.0])]
)
def test_lp_proj_takes_each_step_on_a_batch_of_its_own(
    p: int, theta: list[float], w_i: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    # P = I and lambda = 2. p = 2: (3.05, .55) on the first batch, then on (0, 1), residual -.45:
    # w = 3.05 - .1 * 2 * .05 = 3.04, b = .55 + .1 (.45 - 2 * .05) = .585; w_i moves by half of
    # (.04, .085). p = 1: w = 3.05 - .1 * 2 = 2.85, b = .55 + .1 (.45 - 2) = .395, both below w_i,
    # which moves by .25 * 2 downwards.
    monkeypatch.setattr("clients.methods.lp_proj.projection", lambda *_: np.eye(2))
    anchor = {"w": np.array([3.0, 0.5])}
    asked = LpProjSGDInstruction(
        anchor, MODEL, 2.0, 0.1, 0.25, 1, 2, p, 0, projected=["w", "b"], upload=None
    )
    client = line_client(LpProjClient, train_loader=TWO_BATCHES, full_batch=False)
    (upload,), _, _ = client.fit(*received(asked, upload=["w"]))
    assert_allclose(numbers(client.personal_arrays()), [*theta, 7], rtol=1e-14)
    assert_allclose(upload, w_i, atol=1e-14)
