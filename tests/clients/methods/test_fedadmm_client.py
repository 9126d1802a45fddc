"""The clients of FedADMM's rule by hand, and what they refuse; docs/methods/fedadmm.md."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from numpy.testing import assert_allclose

from clients import FedADMMClient
from fl_admm_strategies.algorithms.fedadmm import FedADMMRule
from fl_admm_strategies.algorithms.shared.consensus import ProximalInstruction
from fl_admm_strategies.runtime.messages.stamp import made_by
from tests.clients.methods.lines import line_client, new_context
from tests.clients.methods.messages import changed, handshake, received, scalars
from tests.support.refusals import refused

PUBLISHED = FedADMMRule(published=True, rho=2.0, share=0.5)
ROUND = ProximalInstruction(
    model=scalars(w=3, b=0.5, seen=7),
    start={"u": np.array([1.0, 0.0]), "dual": np.zeros(2)},
    rule=PUBLISHED.text(),
    duals="strategy",
    optimised=["w", "b"],
    lr=0.05,  # .1 for half the loss
    local_epochs=1,
    wants_step_sum=False,
)
message = partial(changed, ROUND)


@pytest.mark.parametrize("duals", ["strategy", "client"])
def test_its_row_moves_by_its_own_upload(duals: str) -> None:
    # Round 1 at w = (3, .5), u_i^0 = (1, 0), pi = 0: u = (1.55, .25) as above, pi/2 = u - w =
    # (-1.45, -.25), and z - z^0 = (u - u^0) + (u - w) = (.55 - 1.45, .25 - .25).
    # u = (1 - .1 [.5 (-3) + 2 (1 - 3)], 0 - .1 [-1.5 + 2 (0 - .5)]), the residual is 1 + 0 - 4.
    context = new_context()
    first = message(duals=duals, start={"begin": np.array([1.0, 0.0])})
    arrays, num_examples, metrics = line_client(FedADMMClient, context).fit(*first)
    assert num_examples == 1
    assert metrics == {"initial-loss": 4.5, "loss": 4.5, **made_by("FedADMM")}
    expected = [-0.9, 0, 7] if duals == "client" else [1.55, 0.25, 7]
    assert_allclose(np.ravel(arrays), expected, atol=1e-14)
    # Round 2 at w = (2, 1): w - pi/2 = (3.45, 1.25), the residual 1.8 - 4 = -2.2,
    # u = (1.55 - .1 [-1.1 + 2 (-1.9)], .25 - .1 [-1.1 + 2 (-1)]) = (2.04, .56), and the change
    # (.49 + .04, .31 - .44).
    later = {"model": scalars(w=2, b=1, seen=8), "start": None, "duals": duals}
    arrays, _, _ = line_client(FedADMMClient, context).fit(
        *message(version=1, server_round=2, **later)
    )
    expected = [0.53, -0.13, 8] if duals == "client" else [2.04, 0.56, 8]
    assert_allclose(np.ravel(arrays), expected, atol=1e-14)


def test_what_a_clip_holds_back_is_in_the_next_upload() -> None:
    # The message of round 1 would change by (-.9, 0), clipped to .5. Without a step, in round 2 at
    # w = u_1 nothing else changes, and the rest follows.
    context, clip = new_context(), {"privacy-clip": 0.5}
    first = replace(ROUND, duals="client", start={"begin": np.array([1.0, 0.0])})
    arrays, _, _ = line_client(FedADMMClient, context).fit(*received(first, **clip))
    assert_allclose(np.ravel(arrays), [-0.5, 0, 7], atol=1e-6)
    rest = replace(first, start=None, local_epochs=0, model=scalars(w=1.55, b=0.25, seen=7))
    later = received(rest, **{**clip, "version": 1, "server-round": 2})
    arrays, _, _ = line_client(FedADMMClient, context).fit(*later)
    assert_allclose(np.ravel(arrays), [-0.4, 0, 7], atol=1e-6)


def test_a_handshake_asks_for_the_number_of_examples() -> None:
    assert line_client(FedADMMClient).fit(*handshake()) == ([], 1, made_by("FedADMM"))


def test_an_array_without_gradient_cannot_be_optimised() -> None:
    asked = message(optimised=["w", "b", "seen"], start={})
    with refused(ValueError, "seen", "FedADMM(averaged=...)"):
        line_client(FedADMMClient).fit(*asked)
