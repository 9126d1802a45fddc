"""CFL by hand: the two norms, the cut, the tree; docs/methods/cfl.md.

Clients have one sample and the loss <c_i, w>, whose gradient is c_i everywhere: their update is
Delta_i = -lr epochs c_i.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from numpy.testing import assert_allclose, assert_array_equal
from torch import Tensor, nn

from clients import CFLClient, TorchClient, client_app
from fl_admm_strategies import CFL
from fl_admm_strategies.algorithms.cfl import bipartition, directions, norms
from tests.fl_admm_strategies.algorithms.quadratics import follow
from tests.support.federation import Federation
from tests.support.refusals import refused

UPDATES = np.array([[0.9, 0.1], [0.8, 0.3], [-0.7, 0.2], [-0.9, -0.1], [0.1, -0.5]])
SIZES = (10, 20, 30, 20, 20)


class Linear(nn.Module):
    """A model whose output is its one parameter, w in R^2."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.w.expand(len(inputs), 2)


def linear_client(
    client_class: Callable[..., TorchClient[Any]], context: Context, updates: Any = UPDATES
) -> Any:
    """Return the client whose update is Delta_i at a step size of 1."""
    i = int(context.node_config["partition-id"])
    targets = torch.tensor(-updates[i]).expand(SIZES[i % len(SIZES)], 2)
    batch = (torch.zeros(len(targets)), targets)

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs * targets).sum(dim=1).mean()

    return client_class(context, Linear(), [batch], loss_fn, test_loader=[batch], full_batch=True)


class Clients(Federation):
    """The clients of some updates, of which those in `away` are not connected."""

    model = Linear

    def __init__(self, updates: Any = UPDATES, away: Collection[int] = ()) -> None:
        app = client_app(lambda context: linear_client(CFLClient, context, updates).to_client())
        configs = [{"partition-id": i} for i in range(len(updates))]
        super().__init__(app, len(updates), node_configs=configs)
        self.away = set(away)


def run(strategy: CFL, grid: Any, *rounds: Sequence[int], **options: Any) -> list[Any]:
    """Return the clusters and their models after every round, in which these clients train."""

    def read() -> tuple[list[int], list[Any]]:
        models = [record["w"].numpy().tolist() for record in strategy.cluster_arrays()]
        return strategy.clusters().tolist(), models

    return follow(strategy, grid, *rounds, read=read, **options)


EVERYBODY = range(5)


def cfl(**settings: Any) -> CFL:
    given = {"eps1": 0.1, "eps2": 0.5, "lr": 1.0, "warmup_rounds": 0, "fraction_evaluate": 0.0}
    return CFL(**given | settings)


def test_the_two_norms() -> None:
    # The plain mean is (.2, 0)/5 = (.04, 0). Weighted: (9 + 16 - 21 - 18 + 2, 1 + 6 + 6 - 2 - 10)
    # /100 = (-.12, .01), of length .1204159458. The longest is (-.9, -.1): .9055385138.
    assert_allclose(norms(UPDATES, np.ones(5)), [0.04, 0.9055385138], atol=1e-8)
    assert_allclose(norms(UPDATES, np.array(SIZES))[0], 0.1204159458, atol=1e-8)


def test_the_cut() -> None:
    units = directions(UPDATES)
    cosines = units @ units.T
    expected = [0.96937744, -0.92530514, 0.08662962, -0.45795659, -0.08662962]
    found = [cosines[i, j] for i, j in ((0, 1), (0, 2), (0, 4), (2, 4), (3, 4))]
    assert_allclose(found, expected, atol=1e-8)
    assert bipartition(UPDATES, "single").tolist() == [0, 0, 1, 1, 0]
    assert bipartition(UPDATES, "complete").tolist() == [0, 0, 1, 1, 0]


def test_single_and_complete_linkage_may_cut_in_different_places() -> None:
    angles = np.deg2rad([0, 30, 65, 105, 150, 290])
    updates = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    assert norms(updates, np.ones(6))[0] == pytest.approx(0.4083233547, abs=1e-8)
    assert bipartition(updates, "complete").tolist() == [0, 0, 1, 1, 1, 0]
    assert bipartition(updates, "single").tolist() == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("seed", range(5))
def test_single_linkage_is_the_least_similarity_across_the_cut(seed: int) -> None:
    updates = np.random.default_rng(seed).normal(size=(7, 3))
    cosines = directions(updates) @ directions(updates).T
    masks = [np.array([bits >> k & 1 for k in range(7)], dtype=bool) for bits in range(1, 2**6)]
    least = min(cosines[mask][:, ~mask].max() for mask in masks)
    found = bipartition(updates, "single") == 1
    assert cosines[found][:, ~found].max() == pytest.approx(least, abs=1e-12)


def test_a_zero_update_is_at_right_angles_to_all() -> None:
    assert_array_equal(directions(np.array([[0.0, 0.0], [3.0, 4.0]])), [[0, 0], [0.6, 0.8]])


def test_a_cluster_at_rest_is_cut_and_its_parts_move_in_the_same_round() -> None:
    # .04 < .1 and .906 > .5. Means of the parts: (1.8, -.1)/3 and (-1.6, .1)/2. In round 2 the
    # norms of the means are .6 and .8: no cut.
    first, second = run(cfl(), Clients(), EVERYBODY, EVERYBODY)
    assert first[0] == [0, 0, 1, 1, 0]
    assert_allclose(first[1], [[0.6, -1 / 30], [-0.8, 0.05]], atol=1e-12)
    assert second[0] == first[0]
    assert_allclose(second[1], 2 * np.array(first[1]), atol=1e-12)


@pytest.mark.parametrize(
    "settings",
    [
        {"weights": "size"},  # .12 >= .1
        {"eps1": 0.04},
        {"eps2": 0.91},
        {"warmup_rounds": 1},
    ],
)
def test_what_keeps_a_cluster_whole(settings: dict[str, Any]) -> None:
    ((labels, (model,)),) = run(cfl(**settings), Clients(), EVERYBODY)
    assert labels == [0] * 5
    expected = [-0.12, 0.01] if "weights" in settings else [0.04, 0.0]
    assert_allclose(model, expected, atol=1e-12)


def test_after_the_warm_up_it_is_cut() -> None:
    seen = run(cfl(warmup_rounds=1), Clients(), EVERYBODY, EVERYBODY)
    assert [len(models) for _, models in seen] == [1, 2]


def test_two_clients_are_never_cut() -> None:
    grid = Clients(np.array([[1.0, 0.0], [-1.0, 0.0]]))
    assert run(cfl(), grid, (0, 1))[0][0] == [0, 0]


def test_fewer_than_half_of_the_cluster_do_not_cut_it() -> None:
    updates = np.tile([[1.0, 0.0], [-1.0, 0.0]], (4, 1))
    settings = {"eps1": 0.4}
    assert run(cfl(**settings), Clients(updates), (0, 1, 2))[0][0] == [0] * 8
    assert len(run(cfl(**settings), Clients(updates), (0, 1, 2, 3))[0][1]) == 3


def test_who_did_not_reply_goes_to_the_part_that_went_its_way() -> None:
    # Clients 1 to 4 cut the cluster in {1, 2} and {3, 4}, at the mean (.025, .125). Client 5 stays
    # with the model of before, 0; drawn in round 2 it is nearer to the first: (.1, -.5) and the
    # directions of (.85, .2) and (-.8, .05) have the products -.017 and -.13.
    seen = run(cfl(eps1=0.2), Clients(), range(4), (4,), EVERYBODY)
    assert [labels for labels, _ in seen] == [[0, 0, 1, 1, 2], [0, 0, 1, 1, 0], [0, 0, 1, 1, 0]]
    assert_allclose(seen[0][1], [[0.85, 0.2], [-0.8, 0.05], [0, 0]], atol=1e-12)
    # In round 2 nobody but client 5 trains, from the model of before: no model moves.
    assert_allclose(seen[1][1], [[0.85, 0.2], [-0.8, 0.05]], atol=1e-12)
    assert_allclose(seen[2][1][0], [0.85 + 0.6, 0.2 - 1 / 30], atol=1e-12)


def test_a_client_that_joins_descends_the_tree_from_the_root() -> None:
    updates = np.concatenate([UPDATES, [[-0.6, 0.0]]])
    grid = Clients(updates, away=[5])
    everybody = range(6)
    seen = run(cfl(), grid, EVERYBODY, everybody, everybody, after={1: grid.away.clear})
    assert [labels for labels, _ in seen] == [
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 0, 1],
        [0, 0, 1, 1, 0, 1],
    ]
    # Its first update, from the root's model, moves no model; its next one counts.
    assert_allclose(seen[1][1][1], [-1.6, 0.1], atol=1e-12)
    assert_allclose(seen[2][1][1], [-1.6 - 2.2 / 3, 0.1 + 0.1 / 3], atol=1e-12)


def test_a_saved_tree_is_put_back_and_that_of_another_model_refused() -> None:
    strategy = cfl(eps1=0.2)
    run(strategy, Clients(), range(4))
    saved, again = strategy.state_dict(), cfl(eps1=0.2)
    again.load_state_dict(saved)
    again.start(Clients(), ArrayRecord(Linear().state_dict()), 2)
    assert again.clusters().tolist() == [0, 0, 1, 1, 0]  # client 5 found the first part
    other = cfl()
    other.load_state_dict(saved | {"state/clusters/models/w": np.zeros((3, 3))})
    with refused(ValueError, "saved"):
        other.start(Clients(), ArrayRecord(Linear().state_dict()), 2)
