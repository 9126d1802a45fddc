"""LocalClient by hand, and what it refuses; docs/methods/local.md."""

from __future__ import annotations

import pytest
from numpy.testing import assert_allclose

from clients import LocalClient
from fl_admm_strategies.algorithms.local import LocalInstruction
from fl_admm_strategies.algorithms.shared.models import OwnModelEvaluation
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.runtime.messages.stamp import made_by
from tests.clients.methods.lines import line_client, new_context, numbers
from tests.clients.methods.messages import Received, received, scalars

START = scalars(w=3, b=0.5, seen=7)


def message(start: Arrays, *, version: int = 0, server_round: int = 1) -> Received:
    asked = LocalInstruction(start, lr=0.1, local_epochs=2)
    return received(asked, upload=[], version=version, server_round=server_round)


def test_it_descends_on_its_own_loss_and_uploads_nothing() -> None:
    # f = (w + b - 4)^2 / 2. From (3, .5): residual -.5, so both grow by .05; then -.4 and .04. The
    # loss before the last step is .4^2 / 2.
    context = new_context()
    client = line_client(LocalClient, context)
    losses = {"initial-loss": 0.125, "loss": pytest.approx(0.08, rel=1e-12)}
    metrics = losses | made_by("Local")
    assert client.fit(*message(START)) == ([], 1, metrics)
    assert_allclose(numbers(client.personal_arrays()), [3.09, 0.59, 7], rtol=1e-14)
    # The next round goes on from there: -.32 and .032, then -.256 and .0256.
    line_client(LocalClient, context).fit(*message({}, version=1, server_round=2))
    kept = line_client(LocalClient, context).personal_arrays()
    assert_allclose(numbers(kept), [3.1476, 0.6476, 7], rtol=1e-14)


def test_it_evaluates_its_own_model() -> None:
    # The initial model before its first round: (3.5 - 4)^2 / 2; its own, 3.68, after it.
    context = new_context()
    client = line_client(LocalClient, context)
    first = received(OwnModelEvaluation(START, None))
    assert client.evaluate(*first) == (0.125, 1, {"personal-loss": 0.125, **made_by("Local")})
    client.fit(*message(START))
    later = received(OwnModelEvaluation({}, None), version=1, server_round=2)
    loss, _, metrics = client.evaluate(*later)
    assert loss == metrics["personal-loss"] == pytest.approx(0.32**2 / 2, rel=1e-12)
