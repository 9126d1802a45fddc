"""FedADMMClient by hand, and what it refuses; docs/methods/fedadmm.md."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from numpy.testing import assert_allclose

from clients import FedADMMClient
from fl_admm_strategies.algorithms.fedadmm import FedADMMInstruction
from fl_admm_strategies.runtime.messages.stamp import made_by
from tests.clients.methods.lines import line_client, new_context, numbers
from tests.clients.methods.messages import changed, handshake, scalars
from tests.support.refusals import refused

ANCHOR = scalars(w=3, b=0.5, seen=7)
START = scalars(w=1, b=0)


ROUND = FedADMMInstruction(
    *(ANCHOR, START, None),
    rho=2.0,
    lr=0.05,  # .1 for half the loss
    local_epochs=1,
    loss_weight=0.5,
    wants_step_sum=False,
    duals="strategy",
    start_at="own",
    averaging="all",
    optimised=["w", "b"],
)
message = partial(changed, ROUND)


def test_steps_from_u_i_towards_the_anchor() -> None:
    # Residual 1 + 0 - 4 = -3, alpha = 1/2: w = 1 - .1 [.5 (-3) + 2 (1 - 3)] = 1.55,
    # b = 0 - .1 [-1.5 + 2 (0 - .5)] = .25. The second step: residual -2.2,
    # w = 1.55 - .1 [-1.1 + 2 (-1.45)] = 1.95, b = .25 - .1 [-1.1 - .5] = .41; the loss before it
    # is 2.2^2/2 = 2.42. The counter goes back as it came.
    arrays, num_examples, metrics = line_client(FedADMMClient).fit(*message(local_epochs=2))
    assert_allclose(np.ravel(arrays), [1.95, 0.41, 7], rtol=1e-14)
    assert num_examples == 1
    assert metrics.pop("initial-loss") == 4.5
    assert metrics == {"loss": pytest.approx(2.42, rel=1e-14), **made_by("FedADMM")}


def test_it_goes_on_from_its_own_u_i() -> None:
    context = new_context()
    line_client(FedADMMClient, context).fit(*message())
    kept = line_client(FedADMMClient, context).personal_arrays()
    assert_allclose(numbers(kept), [1.55, 0.25, 7], rtol=1e-14)
    later = message(start=None, version=1, server_round=4)
    arrays, _, _ = line_client(FedADMMClient, context).fit(*later)
    assert_allclose(np.ravel(arrays), [1.95, 0.41, 7], rtol=1e-14)


def test_with_its_own_dual_it_uploads_the_change_of_z() -> None:
    # Round 1 at w = (3, .5), u_i^0 = (1, 0), pi = 0: the anchor is w, so u = (1.55, .25) as above,
    # pi = 2 (u - w) = (-2.9, -.5), and z - z^0 = (u - u^0) + (u - w) = (.55 - 1.45, .25 - .25).
    context = new_context()
    arrays, _, _ = line_client(FedADMMClient, context).fit(*message(duals="client"))
    assert_allclose(np.ravel(arrays), [-0.9, 0, 7], atol=1e-14)
    # Round 2 at w = (2, 1): the anchor is w - pi/2 = (3.45, 1.25), the residual 1.8 - 4 = -2.2,
    # u = (1.55 - .1 [-1.1 + 2 (-1.9)], .25 - .1 [-1.1 + 2 (-1)]) = (2.04, .56), and the change
    # (.49 + .04, .31 - .44).
    later = {"anchor": scalars(w=2, b=1, seen=8), "start": None, "duals": "client"}
    arrays, _, _ = line_client(FedADMMClient, context).fit(
        *message(version=1, server_round=2, **later)
    )
    assert_allclose(np.ravel(arrays), [0.53, -0.13, 8], atol=1e-14)


@pytest.mark.parametrize("duals", ["strategy", "client"])
def test_from_w_with_its_dual(duals: str) -> None:
    # Round 1 at w = (3, .5), pi = 0: residual 3 + .5 - 4 = -.5, u = w - .05 * .5 (-.5)/.5 =
    # (3.025, .525), the move (.025, .025) and pi = 2 * .025 = .05 each.
    context = new_context()
    form = {"start_at": "global", "averaging": "participants", "duals": duals, "start": None}
    arrays, _, _ = line_client(FedADMMClient, context).fit(*message(dual={}, **form))
    assert_allclose(
        np.ravel(arrays), [0.025, 0.025, 7] if duals == "client" else [3.025, 0.525, 7], atol=1e-14
    )
    # Round 2 at w = (2, 1): residual -1, the pull to w - pi/2 = (1.975, .975) is 2 * .025/.5 = .1:
    # u = w - .05 [-1 + .1] = (2.045, 1.045), whether it holds its pi_i or is sent it.
    for dual in (None, scalars(w=0.05, b=0.05)):
        later = message(
            **form, version=1, server_round=2, anchor=scalars(w=2, b=1, seen=8), dual=dual
        )
        arrays, _, _ = line_client(FedADMMClient, context).fit(*later)
        first = [0.045, 0.045, 8] if duals == "client" else [2.045, 1.045, 8]
        assert_allclose(np.ravel(arrays), first, atol=1e-14)


def test_a_handshake_asks_for_the_number_of_examples() -> None:
    assert line_client(FedADMMClient).fit(*handshake()) == ([], 1, made_by("FedADMM"))


def test_an_array_without_gradient_cannot_be_optimised() -> None:
    asked = message(optimised=["w", "b", "seen"], start=scalars(w=1, b=0, seen=7))
    with refused(ValueError, "seen", "FedADMM(averaged=...)"):
        line_client(FedADMMClient).fit(*asked)
