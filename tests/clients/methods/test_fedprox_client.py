"""FedProxClient by hand; docs/methods/fedprox.md."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from numpy.testing import assert_allclose

from clients import FedProxClient
from fl_admm_strategies.algorithms.fedprox import FedProxInstruction
from fl_admm_strategies.runtime.messages.stamp import made_by
from tests.clients.methods.lines import Line, line_client
from tests.clients.methods.messages import changed, scalars

MODEL = scalars(w=3, b=0.5, seen=7)


message = partial(changed, FedProxInstruction(MODEL, mu=2.0, lr=0.1, local_epochs=2))


def test_it_is_pulled_back_to_where_it_started() -> None:
    # f = (w + b - 4)^2 / 2, mu = 2. From (3, .5): residual -.5 and no pull yet: (3.05, .55). Then
    # the residual is -.4 and the pull 2 * .05 on both: + .1 (.4 - .1) = .03. The loss before the
    # last step is .4^2 / 2; the buffer goes back as it came.
    arrays, num_examples, metrics = line_client(FedProxClient).fit(*message())
    assert_allclose(np.ravel(arrays), [3.08, 0.58, 7], rtol=1e-14)
    assert num_examples == 1
    assert metrics.pop("initial-loss") >= metrics["loss"]
    assert metrics == {"loss": pytest.approx(0.08, rel=1e-12), **made_by("FedProx")}


def test_without_the_proximal_term_it_descends_on_its_loss() -> None:
    # - .5, then - .4: both grow by .05 + .04.
    arrays, _, _ = line_client(FedProxClient).fit(*message(mu=0.0))
    assert_allclose(np.ravel(arrays), [3.09, 0.59, 7], rtol=1e-14)


def test_a_frozen_parameter_is_neither_moved_nor_pulled() -> None:
    # w alone: 3 + .05, then residual -.45 and pull .1: + .1 (.45 - .1).
    model = Line()
    model.b.requires_grad_(False)
    arrays, _, _ = line_client(FedProxClient, model=model).fit(*message())
    assert_allclose(np.ravel(arrays), [3.085, 0.5, 7], rtol=1e-14)
