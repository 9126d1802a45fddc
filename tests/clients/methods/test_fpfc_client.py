"""FPFCClient by hand: equation (5), its own iterate, the diagnostics; docs/methods/fpfc.md."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from clients import FPFCClient
from fl_admm_strategies.algorithms.fpfc.messages import (
    FPFCInstruction,
    FPFCRule,
    ScoreInstruction,
)
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.runtime.messages.records import ClientInstruction
from fl_admm_strategies.runtime.messages.stamp import made_by
from tests.clients.methods.lines import Line, line_client, new_context, sample
from tests.clients.methods.messages import Received, changed, received, scalars
from tests.support.refusals import refused

# --- Equation (5) -------------------------------------------------------------------------------

SEEN = scalars(seen=7)


def message(w: float = 3.0, b: float = 0.5, start: float | None = None, **changes: Any) -> Received:
    """Return the message of a round: zeta_i = w, the shared b, and omega_i = `start`."""
    return changed(instruction(scalars(w=w, b=b) | SEEN, start, ["w"]), **changes)


def instruction(model: Arrays, start: float | None, names: list[str]) -> FPFCInstruction:
    return FPFCInstruction(
        model=model,
        start=None if start is None else {"omega": np.array([start])},
        rule=FPFCRule(True, 2.0).text(),
        optimised=names,
        lr=0.1,
        local_epochs=1,
    )


def test_the_clustered_block_starts_at_omega_and_is_pulled_to_zeta() -> None:
    # Clustered w: from omega = 1 with zeta = 3, rho = 2, alpha = 0.1. Shared b: from the server's
    # 0.5, no pull. One sample x = 1, y = 4, f = (w + b - 4)^2 / 2.
    # t=0: residual 1.5 - 4 = -2.5; w = 1 - .1 (-2.5 + 2 (1 - 3)) = 1.65; b = .5 + .25 = .75.
    # t=1: residual -1.6; w = 1.65 - .1 (-1.6 + 2 (-1.35)) = 2.08; b = .75 + .16 = .91.
    # The loss before the last step is 1.6^2 / 2 = 1.28.
    arrays, num_examples, metrics = line_client(FPFCClient).fit(*message(start=1, local_epochs=2))
    assert_allclose(np.concatenate(arrays), [2.08, 0.91, 7], rtol=1e-14)
    assert num_examples == 1
    assert metrics.pop("initial-loss") >= metrics["loss"]
    assert metrics == {"loss": pytest.approx(1.28, rel=1e-14), **made_by("FPFC")}


def test_it_starts_from_its_own_last_iterate_when_the_server_sends_none() -> None:
    # From w = 1.65 (above, T = 1), zeta = 1.65, b = 0.35: residual -2, so w = 1.85 and b = 0.55.
    context = new_context()
    line_client(FPFCClient, context).fit(*message(start=1))
    later = message(w=1.65, b=0.35, version=1, server_round=4)
    arrays, _, _ = line_client(FPFCClient, context).fit(*later)
    assert_allclose(np.concatenate(arrays), [1.85, 0.55, 7], rtol=1e-14)
    # Now it holds the iterate of round 4.
    later = message(w=1.85, b=2.15, version=4, server_round=5)
    arrays, _, _ = line_client(FPFCClient, context).fit(*later)
    assert_allclose(np.concatenate(arrays), [1.85, 2.15, 7], rtol=1e-14)


# --- Scores of several models -------------------------------------------------------------------


def test_scores_are_means_over_all_samples_with_errors_from_their_parts() -> None:
    # 21 samples x = 1, y = 0 to 20, in ten parts of two and one of one. Model k predicts p_k:
    # its loss is the mean of (p_k - y)^2/2 over all samples, its gradient in w the mean of p_k - y.
    # The difference of two losses has the standard error sqrt(11/10 sum_p (n_p/21 (d_p - d))^2).
    y = np.arange(21.0)
    batch = torch.ones(21, dtype=torch.float64), torch.tensor(y)
    held = torch.ones(2, dtype=torch.float64), torch.tensor([1.0, 4.0], dtype=torch.float64)
    client = line_client(FPFCClient, train_loader=[batch], validation_loader=[held])
    sent = ScoreInstruction(
        model=scalars(w=3, b=1) | SEEN,
        more={"1/w": np.array([9.0])},
        num_models=2,
        lr=0.1,
        local_epochs=0,
        optimised=["w"],
        held_out=0.2,
        held_out_seed=0,
    )
    arrays, num_examples, metrics = client.fit(*received(sent, upload=[]))
    assert (arrays, num_examples) == ([], 21)
    losses = [(p - y) ** 2 / 2 for p in (4.0, 10.0)]
    sizes = np.array([2] * 10 + [1])
    between = np.add.reduceat(losses[1] - losses[0], np.arange(0, 21, 2)) / sizes
    rest = sizes / 21 * (between - (losses[1] - losses[0]).mean())
    expected = {
        "training-loss-0": losses[0].mean(),
        "training-loss-1": losses[1].mean(),
        "training-loss-error-0-1": np.sqrt(11 / 10 * (rest**2).sum()),
        "gradient-norm-0": 6.0,
        "gradient-norm-1": 0.0,
        "held-out-loss-0": (9 + 0) / 4,
        "held-out-loss-1": (81 + 36) / 4,
        # d = 36, 18 and their mean 27: sqrt(2/1 (4.5^2 + 4.5^2)).
        "held-out-loss-error-0-1": 9.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


# --- Evaluation ---------------------------------------------------------------------------------


def evaluation(
    personal: Arrays, cluster: Arrays, global_: Arrays, dual: Arrays | None = None, seed: int = 5
) -> Received:
    """Return the message of an evaluation, with (1/m) sum_j v_ij where it is given."""
    groups = {"personal": personal, "cluster": cluster, "global": global_}
    if dual is not None:
        groups["mean-dual"] = dual
    message = ClientInstruction(groups, {"server-round": 1, "seed": seed})
    return message.flat(), message.full_config()


def test_the_kinds_of_models_and_the_diagnostics() -> None:
    # One sample x = 1, y = 4. personal (w, b) = (1, 1): residual -2, f = 2. cluster (2, 3): 1,
    # f = 1/2. global (0, 0): -4, f = 8. The gradient over the clustered w is the residual:
    # |-2 + 0.5| = 1.5 with the mean dual 0.5, and 1 at the cluster's model.
    models = [scalars(w=w, b=b) | SEEN for w, b in ((1, 1), (2, 3), (0, 0))]
    asked = evaluation(*models, scalars(w=0.5))
    loss, num_examples, metrics = line_client(FPFCClient).evaluate(*asked)
    assert (loss, num_examples) == (2.0, 1)
    losses = {"personal-loss": 2.0, "cluster-loss": 0.5, "global-loss": 8.0, **made_by("FPFC")}
    assert metrics == losses | {"stationarity": 1.5, "cluster-gradient-norm": 1.0}
    _, _, metrics = line_client(FPFCClient).evaluate(*evaluation(*models))
    assert metrics == losses  # no dual, no diagnostics


def test_the_gradient_is_over_the_training_data() -> None:
    client, model = (
        line_client(FPFCClient, test_loader=[sample(1.0, 9.0)]),
        scalars(w=1, b=1) | SEEN,
    )
    loss, _, metrics = client.evaluate(*evaluation(model, model, model, scalars(w=0)))
    assert loss == 24.5  # (2 - 9)^2 / 2, on the test data
    assert metrics["stationarity"] == 2.0  # |2 - 4|, on the training data


@pytest.mark.parametrize("wrong", ["seen", "b"])
def test_what_is_not_trained_cannot_be_clustered(wrong: str) -> None:
    model = Line()
    model.b.requires_grad_(False)
    message = instruction(scalars(w=1, b=1, seen=1), None, ["w", wrong])
    with refused(ValueError, wrong, "FPFC(clustered=...)"):
        line_client(FPFCClient, model=model).fit(*received(message))
