"""DittoClient by hand: the global step, the personal one, and what stays; docs/methods/ditto.md."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import nn
from torch.utils.data import DataLoader

from clients import DittoClient, FedProxClient
from fl_admm_strategies.algorithms.ditto import DittoInstruction
from fl_admm_strategies.algorithms.fedprox import FedProxInstruction
from fl_admm_strategies.algorithms.shared.models import OwnModelEvaluation
from fl_admm_strategies.runtime.messages.stamp import made_by
from tests.clients.methods.lines import line_client, new_context, numbers
from tests.clients.methods.messages import changed, received, scalars
from tests.support.federation import dataset, make_model

MODEL, START = scalars(w=3, b=0.5, seen=7), scalars(w=1, b=0, seen=2)


ROUND = DittoInstruction(
    MODEL, START, lam=2.0, lr=0.1, local_epochs=1, personal_lr=0.2, personal_epochs=2
)
message = partial(changed, ROUND)


def test_the_global_step_is_uploaded_and_the_personal_one_kept() -> None:
    # f = (w + b - 4)^2 / 2. Global, one step of .1 from (3, .5): residual -.5, (3.05, .55).
    # Personal, two steps of .2 from (1, 0), lambda = 2, pulled to (3, .5), not to (3.05, .55):
    # residual -3: w = 1 - .2 [-3 + 2 (-2)] = 2.4, b = -.2 [-3 + 2 (-.5)] = .8; residual -.8:
    # w = 2.4 - .2 [-.8 + 2 (-.6)] = 2.8, b = .8 - .2 [-.8 + 2 (.3)] = .84. The losses before the
    # last steps are .5^2 / 2 and .8^2 / 2.
    client = line_client(DittoClient)
    arrays, num_examples, metrics = client.fit(*message())
    assert_allclose(np.ravel(arrays), [3.05, 0.55, 7], rtol=1e-14)
    assert_allclose(numbers(client.personal_arrays()), [2.8, 0.84, 2], rtol=1e-14)
    assert num_examples == 1
    assert metrics == {
        "initial-loss": 0.125,  # that of the global step
        "loss": pytest.approx(0.125, rel=1e-12),
        "personal-loss": pytest.approx(0.32, rel=1e-12),
        **made_by("Ditto"),
    }


def test_the_personal_step_goes_on_from_its_own_model() -> None:
    # From (2.8, .84), residual -.36, at w = (2, 0): w = 2.8 - .2 [-.36 + 2 (.8)] = 2.552,
    # b = .84 - .2 [-.36 + 2 (.84)] = .576.
    context = new_context()
    line_client(DittoClient, context).fit(*message())
    later = {"model": scalars(w=2, b=0, seen=8), "start": None, "personal_epochs": 1}
    again = message(version=1, server_round=2, **later)
    line_client(DittoClient, context).fit(*again)
    kept = line_client(DittoClient, context).personal_arrays()
    assert_allclose(numbers(kept), [2.552, 0.576, 2], rtol=1e-13)
    # The server did not take in round 2, so it has not happened.
    line_client(DittoClient, context).fit(*message(version=1, server_round=3, **later))
    kept = line_client(DittoClient, context).personal_arrays()
    assert_allclose(numbers(kept), [2.552, 0.576, 2], rtol=1e-13)


def test_the_personal_step_changes_nothing_of_what_is_uploaded() -> None:
    # Mini-batches in the order that the seed says, whatever comes after them; as FedProx's client
    # without a pull.
    start = {name: tensor.numpy() for name, tensor in make_model().state_dict().items()}

    def client(client_class: Any) -> Any:
        loader = DataLoader(dataset(2), batch_size=4, shuffle=True)
        return client_class(new_context(), make_model(), loader, nn.CrossEntropyLoss())

    expected, _, _ = client(FedProxClient).fit(*received(FedProxInstruction(start, 0.0, 0.1, 2)))
    for lam, epochs in ((0.0, 1), (3.0, 4)):
        asked = DittoInstruction(start, start, lam, 0.1, 2, 0.05, epochs)
        torch.manual_seed(epochs)
        arrays, _, _ = client(DittoClient).fit(*received(asked))
        for array, same in zip(arrays, expected, strict=True):
            np.testing.assert_array_equal(array, same)


def test_both_models_are_evaluated_the_personal_one_first() -> None:
    # Before its first round it has w^0, which goes along: (1 - 4)^2 / 2, and (3.5 - 4)^2 / 2.
    client = line_client(DittoClient)
    loss, num_examples, metrics = client.evaluate(*received(OwnModelEvaluation(START, MODEL)))
    assert (loss, num_examples) == (4.5, 1)
    assert metrics == {"personal-loss": 4.5, "global-loss": 0.125, **made_by("Ditto")}
    client.fit(*message())  # (2.8, .84) then
    later = received(OwnModelEvaluation({}, MODEL), version=1, server_round=2)
    _, _, metrics = client.evaluate(*later)
    assert metrics == {
        "personal-loss": pytest.approx(0.36**2 / 2, rel=1e-12),
        "global-loss": 0.125,
        **made_by("Ditto"),
    }
