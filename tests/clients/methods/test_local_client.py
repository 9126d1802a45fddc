"""LocalClient by hand, and what it refuses; docs/methods/local.md."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from clients import LocalClient
from fl_admm_strategies.algorithms.local import LocalInstruction
from fl_admm_strategies.algorithms.shared.base import OwnModelEvaluation
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.runtime.messages.stamp import made_by
from tests.clients.methods.lines import line_client, new_context
from tests.clients.methods.messages import Received, received, scalars

START = scalars(w=3, b=0.5, seen=7)


def message(start: Arrays, *, version: int = 0, server_round: int = 1) -> Received:
    asked = LocalInstruction(start, lr=0.1, local_epochs=2)
    return received(asked, upload=[], version=version, server_round=server_round)


def numbers(arrays: Arrays) -> list[float]:
    return [float(array.item()) for array in arrays.values()]


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
    own = line_client(LocalClient, context).personal_arrays()
    assert_allclose(numbers(own), [3.1476, 0.6476, 7], rtol=1e-14)


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


def test_a_client_that_lost_its_model_refuses() -> None:
    client = line_client(LocalClient)
    with pytest.raises(ValueError, match=r"variables of round 3, but it holds .* \[\]"):
        client.fit(*message({}, version=3, server_round=4))
    evaluation = received(OwnModelEvaluation({}, None), version=3, server_round=4)
    with pytest.raises(ValueError, match="its state was lost"):
        client.evaluate(*evaluation)
    with pytest.raises(RuntimeError, match="has not been trained yet"):
        client.personal_arrays()


def test_another_methods_message_is_refused() -> None:
    parameters, config = message(START)
    del config["lr"]
    text = "lacks the setting 'lr' of LocalInstruction: it is not from this method's strategy"
    with pytest.raises(ValueError, match=text):
        line_client(LocalClient).fit(parameters, config)


def test_another_model_is_refused() -> None:
    start = START | {"w": np.zeros(2)}
    with pytest.raises(
        ValueError, match=r"sent 'w' of shape \(2,\), the client's model has \(1,\)"
    ):
        line_client(LocalClient).fit(*message(start))
