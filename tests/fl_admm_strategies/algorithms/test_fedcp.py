"""FedCP by hand: features routed to a global and a personal head; docs/methods/fedcp.md.

The routing itself is in tests/clients/toolkit/models/test_heads.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord
from numpy.testing import assert_allclose, assert_array_equal
from torch import nn
from torch.nn import functional as F  # noqa: N812

from clients import FedCPClient, RoutedHeads, TwoHeaded
from clients.toolkit.models.heads import mean_discrepancy
from fl_admm_strategies import FedCP
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.messages import FedCPInstruction
from tests.clients.methods.lines import new_context
from tests.clients.methods.messages import received
from tests.fl_admm_strategies.algorithms.test_fedrod import client_of, grid_of
from tests.support.federation import Federation, dataset, initial_arrays, make_model
from tests.support.refusals import refused


def routed_heads() -> RoutedHeads:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return RoutedHeads.of(make_model())


def start() -> tuple[Arrays, Arrays]:
    """Return the shared arrays and the personal ones of the initial model."""
    first = {name: tensor.numpy() for name, tensor in routed_heads().state_dict().items()}
    shared = {name: array for name, array in first.items() if "personal" not in name}
    return shared, {name: array for name, array in first.items() if "personal" in name}


def fit(client: Any, shared: Arrays, *, version: int = 0, **changes: Any) -> Arrays:
    """Train a client; return its upload by name."""
    settings: dict[str, Any] = {"lam": 2.0, "gumbel": False, "lr": 0.2, "local_epochs": 1}
    asked = FedCPInstruction(shared, "^personal_head[.]", **settings | changes)
    now = {"version": version, "server_round": version + 1}
    upload, _, _ = client.fit(*received(asked, **now))
    return dict(zip(shared, upload, strict=True))


def run(strategy: FedCP, num_rounds: int = 2, **options: Any) -> Federation:
    grid = grid_of(FedCPClient, routed_heads)
    strategy.start(grid, ArrayRecord(routed_heads().state_dict()), num_rounds, **options)
    return grid


# --- A round ------------------------------------------------------------------------------------


def test_a_step_by_hand() -> None:
    client = client_of(FedCPClient, routed_heads, new_context())
    shared, personal = start()
    upload = fit(client, shared)

    inputs, labels = dataset(2).tensors
    model = routed_heads()
    h = model.features(inputs)
    loss = F.cross_entropy(model.join(h, model.route(h, model.context())), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = {
        name: (p - 0.2 * p.grad).detach().numpy()  # type: ignore[operator]
        for name, p in model.named_parameters()
    }
    for name, own in client.personal_arrays().items():
        assert_allclose(own, expected[name], atol=1e-6)
        # The global head is fixed meanwhile; the mean of both heads is sent in its place.
        generic = name.removeprefix("personal_")
        assert_allclose(upload[generic], (own + shared[generic]) / 2, atol=1e-7)
    for name in (name for name in shared if not name.startswith("head.")):
        assert_allclose(upload[name], expected[name], atol=1e-6)
    assert personal.keys() == client.personal_arrays().keys()


def test_the_features_are_held_near_those_received() -> None:
    # The first step of a round is without that pull, as the features are those received.
    inputs, _ = dataset(2).tensors
    shared, _ = start()
    gaps = []
    for lam in (0.0, 10.0):
        client = client_of(FedCPClient, routed_heads, new_context())
        upload = fit(client, shared, lam=lam, lr=0.1, local_epochs=40)
        before, after = routed_heads(), routed_heads()
        after.load_state_dict({n: torch.from_numpy(a) for n, a in upload.items()}, strict=False)
        with torch.no_grad():
            gap = mean_discrepancy(after.features(inputs), before.features(inputs))
        gaps.append(gap.item())
    assert 0 < gaps[1] < 0.5 * gaps[0]


def test_the_context_is_that_of_the_personal_head_at_the_start_of_the_round() -> None:
    # And not of the head that is received: one round in which that is another. The gradient of
    # cross-entropy does not change the sum of a head's rows, so it takes a decay to see that.
    shared, _ = start()
    others = {n: a + 1 if n.startswith("head.") else a for n, a in shared.items()}
    contexts = []
    original = RoutedHeads.route

    def spy(self: Any, features: Any, context: Any, **options: Any) -> Any:
        contexts.append(context.clone())
        return original(self, features, context, **options)

    context = new_context()
    decaying = partial(torch.optim.SGD, weight_decay=0.5)
    fit(client_of(FedCPClient, routed_heads, context), shared, local_epochs=3)
    own = client_of(FedCPClient, routed_heads, context).personal_arrays()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoutedHeads, "route", spy)
        later = client_of(FedCPClient, routed_heads, context, optimizer_fn=decaying)
        fit(later, others, version=1, local_epochs=3)
    assert len(contexts) == 3
    for found in contexts:
        assert_allclose(found.numpy(), own["personal_head.weight"].sum(0), rtol=1e-5)


def test_noise_is_the_runs_own_and_can_be_switched_off() -> None:
    shared, _ = start()  # with the global head another one: between two alike nothing is decided
    others = {n: -a if n == "head.weight" else a for n, a in shared.items()}

    def upload(gumbel: bool) -> Arrays:
        return fit(client_of(FedCPClient, routed_heads, new_context()), others, gumbel=gumbel)

    noisy, again, plain = upload(True), upload(True), upload(False)
    assert_array_equal(noisy["policy.0.weight"], again["policy.0.weight"])
    assert abs(noisy["policy.0.weight"] - plain["policy.0.weight"]).max() > 1e-5


def test_the_routed_sum_is_evaluated() -> None:
    strategy = FedCP(lam=1.0, lr=0.3, local_epochs=2)
    run(strategy, collect=True)
    shared = {name for name in routed_heads().state_dict() if "personal" not in name}
    assert set(strategy.global_arrays) == shared
    for i, arrays in strategy.models().personal.items():
        model = routed_heads()
        model.load_state_dict({n: torch.from_numpy(a.copy()) for n, a in arrays.items()})
        inputs, labels = dataset(i).tensors
        with torch.no_grad():
            loss = F.cross_entropy(model(inputs), labels).item()
        own = strategy.evaluate_metrics[2][i]
        assert own["personal-loss"] == pytest.approx(loss, rel=1e-5)
        assert "global-loss" not in own


# --- Refusals -----------------------------------------------------------------------------------


def test_other_models_are_refused_on_both_sides() -> None:
    for model in (make_model(), TwoHeaded.of(make_model())):
        with refused(TypeError, "RoutedHeads.of"):
            FedCPClient(new_context(), model, [], nn.CrossEntropyLoss())
    with refused(ValueError, "RoutedHeads.of"):
        FedCP().start(grid_of(FedCPClient, routed_heads), initial_arrays(), 1)
