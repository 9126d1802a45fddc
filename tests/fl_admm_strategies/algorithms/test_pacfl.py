"""PACFL on the five clients of docs/methods/pacfl.md, E1: six features, three samples each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from numpy.testing import assert_allclose
from torch import Tensor, nn

from clients import FedProxClient, LocalClient, PACFLClient, TorchClient, client_app
from fl_admm_strategies import PACFL, FedProx, Local, StatefulStrategy
from tests.fl_admm_strategies.algorithms.quadratics import follow
from tests.fl_admm_strategies.maths.test_subspaces import SMALLEST, X
from tests.support.federation import Federation, node_of
from tests.support.refusals import Warned, refused

EVERYBODY = range(5)


class Model(nn.Linear):
    """Two classes of six features, in float64."""

    def __init__(self) -> None:
        super().__init__(6, 2, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.weight)


class Clients(Federation):
    """The five clients, and a sixth whose data are those of another."""

    model = Model

    def __init__(
        self,
        client_class: type[TorchClient[Any]] = PACFLClient,
        *,
        like: int = 0,
        away: Collection[int] = (5,),
        data: Any = None,
    ) -> None:
        self.client_class = client_class
        self.data = [*X, X[like]] if data is None else data
        configs = [{"partition-id": i} for i in range(len(self.data))]
        super().__init__(client_app(self._client_fn), len(self.data), node_configs=configs)
        self.away = set(away)

    def _client_fn(self, context: Context) -> Any:
        i = int(context.node_config["partition-id"])
        inputs = torch.tensor(self.data[i], dtype=torch.float64)
        batch = (inputs, (torch.arange(len(inputs)) + i) % 2)
        loaders: dict[str, Any] = {"test_loader": [batch], "full_batch": True}
        model = Model() if inputs.shape[1] == 6 else nn.Linear(6, 2)
        return self.client_class(
            context, model, [batch], nn.CrossEntropyLoss(), **loaders
        ).to_client()


def pacfl(threshold: float, **settings: Any) -> PACFL:
    given = {"num_vectors": 2, "lr": 0.5, "fraction_evaluate": 0.0}
    return PACFL(threshold, **given | settings)


def start(strategy: StatefulStrategy, grid: Any, *rounds: Sequence[int], **options: Any) -> Any:
    return follow(strategy, grid, *rounds, **options)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"threshold": 16.0}, [0, 0, 1, 1, 2]),
        ({"threshold": 30.0}, [0, 0, 1, 1, 1]),
        ({"threshold": 50.0, "linkage": "single"}, [0] * 5),
        ({"threshold": 10.0}, [0, 1, 2, 3, 4]),
    ],
)
def test_the_clusters_of_the_worked_example(settings: dict[str, Any], expected: Any) -> None:
    strategy = pacfl(**settings)
    start(strategy, Clients(), EVERYBODY)
    assert strategy.clusters().tolist() == expected
    assert_allclose(strategy.angles()[np.triu_indices(5, k=1)], SMALLEST, atol=1e-8)


def test_every_cluster_is_a_federation_of_its_own() -> None:
    # Its model is FedAvg's of its clients alone, weighted by their examples.
    strategy = pacfl(30.0)
    data = [*X[:3], X[3] * 2, X[4]]
    start(strategy, Clients(data=data, away=()), EVERYBODY, (0, 2, 3), EVERYBODY)
    assert strategy.clusters().tolist() == [0, 0, 1, 1, 1]
    found = [record["weight"].numpy() for record in strategy.cluster_arrays()]
    for model, members, second in zip(found, ((0, 1), (2, 3, 4)), ((0,), (2, 3)), strict=True):
        plain = FedProx(mu=0.0, lr=0.5, fraction_evaluate=0.0)
        start(plain, Clients(FedProxClient, data=data, away=()), members, second, members)
        assert_allclose(model, plain.global_model()["weight"], atol=1e-12)


def test_directions_of_each_class() -> None:
    # Two classes, of two samples and of one: three directions, of which no two are orthogonal.
    strategy = pacfl(16.0, per_class=True, measure="entrywise")
    start(strategy, Clients(), EVERYBODY)
    bases = strategy.state.clusters.bases
    assert {client: basis.shape for client, basis in bases.items()} == dict.fromkeys(
        EVERYBODY, (6, 3)
    )
    own = np.array(X[1])[1] / np.linalg.norm(X[1][1])  # client 2's only sample of class 0
    assert_allclose(bases[1][:, 0], own, atol=1e-12)
    angles = [
        np.rad2deg(np.arccos(np.abs(bases[1].T @ bases[2]).max())),
        *strategy.angles()[1, [2]],
    ]
    assert angles[0] == pytest.approx(angles[1], abs=1e-9)


@pytest.mark.parametrize(("like", "expected"), [(1, 0), (3, 1), (4, 2)])
def test_a_client_that_joins_comes_into_the_cluster_of_its_group(like: int, expected: int) -> None:
    grid, strategy = Clients(like=like), pacfl(16.0)
    everybody = range(6)
    start(strategy, grid, EVERYBODY, everybody, everybody, after={1: grid.away.clear})
    assert strategy.clusters().tolist() == [0, 0, 1, 1, 2, expected]
    # It was sent its cluster's model at once: that of round 1, not the initial one.
    (message,) = (m for m in grid.phase("train", 2) if m.metadata.dst_node_id == node_of(5))
    assert message.content["arrays"]["weight"].numpy().any()
    assert strategy.traffic[2].up == 6 * 12 * 8 + 2 * 6 * 8


def test_a_client_that_is_like_nobody_starts_a_cluster() -> None:
    data = [*X, [[1, -1, 0, 0, 0, 0], [0, 0, 1, 0, -1, 0], [0, 0, 0, 0, 0, 0]]]
    grid, strategy = Clients(data=data), pacfl(16.0)
    everybody = range(6)
    start(strategy, grid, EVERYBODY, everybody, after={1: grid.away.clear})
    assert strategy.clusters().tolist() == [0, 0, 1, 1, 2, 3]
    own = Clients(LocalClient, data=data, away=EVERYBODY)
    first = ArrayRecord(Model().state_dict())
    Local(lr=0.5, min_available_nodes=1, fraction_evaluate=0).start(own, first, 1)
    record = own.context(node_of(5)).state.array_records["memory.1"]
    assert_allclose(strategy.model("cluster", 5)["weight"], record["weight"].numpy())


def test_a_run_begins_without_a_client_of_inputs_of_another_shape(warned: Warned) -> None:
    data, strategy = [*X[:4], [[1.0, 2.0]] * 3], pacfl(16.0)
    start(strategy, Clients(data=data, away=()), EVERYBODY)
    assert strategy.client_ids == [0, 1, 2, 3]
    assert warned("client 4", "(2, 1)")


def test_one_that_joins_so_is_left_out(warned: Warned) -> None:
    grid, strategy = Clients(data=[*X, [[1.0, 2.0]] * 3]), pacfl(16.0)
    start(strategy, grid, EVERYBODY, EVERYBODY, after={1: grid.away.clear})
    assert strategy.client_ids == list(EVERYBODY)
    assert len(warned()) == len(warned("client 5", "(2, 1)")) == 1


@pytest.mark.parametrize(
    ("inputs", "targets", "named"),
    [
        (torch.zeros(3, 6), torch.zeros(3, dtype=torch.int64), "inputs"),
        (torch.ones(3, 6), torch.zeros(3), "torch.float32"),
        ({"x": torch.ones(3, 6)}, torch.zeros(3, dtype=torch.int64), "dict"),
    ],
)
def test_data_without_directions_are_refused(inputs: Any, targets: Tensor, named: str) -> None:
    class Odd(Clients):
        def _client_fn(self, context: Context) -> Any:
            return PACFLClient(
                context, Model(), [(inputs, targets)], nn.CrossEntropyLoss()
            ).to_client()

    with refused(RuntimeError, named):
        start(pacfl(16.0, per_class=True), Odd(away=()), EVERYBODY)
