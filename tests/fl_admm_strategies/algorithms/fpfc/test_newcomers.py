"""New clients after a run of FPFC: independent of each other, and of no consequence to the others.

See docs/methods/fpfc.md, "New clients after the run".
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import MessageType
from numpy.testing import assert_allclose

from clients import FPFCClient, client_app
from fl_admm_strategies import FPFC, SmoothedSCAD
from fl_admm_strategies.algorithms.fpfc.messages import FPFCRule
from fl_admm_strategies.algorithms.fpfc.newcomers import FPFCNewcomers
from fl_admm_strategies.maths.pairs import PairwiseStore
from fl_admm_strategies.runtime.messages.records import from_array_record
from tests.support.federation import (
    Federation,
    assert_same_bits,
    client_fn_of,
    initial_arrays,
)
from tests.support.slopes import SLOPES, app_of, arrays, model, samples

OLD = 6
PENALTY = SmoothedSCAD(0.8)


def app(first: int, slopes: torch.Tensor = SLOPES, features: int = 3) -> Any:
    """Return clients `first`, ...: even ones have one regression, odd ones another."""
    return app_of(
        lambda client: samples(first + client, slopes[(first + client) % 2], 20, 0.1),
        net=model(features),
    )


@cache
def trained() -> FPFC:
    strategy = FPFC(PENALTY, rho=1.0, lr=0.1, local_epochs=5, fraction_evaluate=0.0)
    strategy.start(Federation(app(0), OLD), arrays(), 30)
    return strategy


def joined(count: int = 2, rounds: int = 12, first: int = 10, **base: Any) -> tuple[Any, Any]:
    strategy = trained().newcomers(min_available_nodes=1, seed=1, **base)
    grid = Federation(app(first), count)
    strategy.start(grid, trained().global_arrays, rounds)
    return strategy, grid


@pytest.mark.slow
def test_they_find_their_groups_and_nobody_changes() -> None:
    before = trained().state_dict()
    assert trained().clusters().tolist() == [0, 1, 0, 1, 0, 1]
    strategy, _ = joined()
    number = trained().models().cluster_of
    assert strategy.groups() == {0: number[0], 1: number[1]}
    assert_same_bits(trained().state_dict(), before)
    last = strategy.evaluate_metrics[12]
    for client in (0, 1):
        assert last[client]["loss"] == last[client]["cluster-loss"]
        assert last[client]["personal-loss"] < 0.05
        assert last[client]["cluster-loss"] < 0.05 < last[client]["global-loss"]
    personal = from_array_record(strategy.model_arrays("personal", 0))
    group = trained().models().clusters[number[0]]
    assert_allclose(personal["weight"], group["weight"], atol=0.1)
    cluster = from_array_record(strategy.model_arrays("cluster", 0))
    assert np.array_equal(cluster["weight"], group["weight"])


@pytest.mark.parametrize("published", [True, False])
def test_its_pairs_are_those_of_the_method(published: bool) -> None:
    # The store of FPFC, with the newcomer as one more client and nobody else active: (6), (A.3).
    _, grid = joined(count=1, rounds=5, published=published)
    omega = trained().state.pairs.omega
    uploads = []
    for server_round in range(1, 6):
        (reply,) = grid.replies(MessageType.TRAIN, server_round)
        upload = from_array_record(reply.content["arrays"])
        uploads.append(np.concatenate([upload[name].ravel() for name in ("weight", "bias")]))
    group = trained().models().clusters[trained().models().cluster_of[0]]
    alpha = np.concatenate([group[name].ravel() for name in ("weight", "bias")])
    store = PairwiseStore(np.vstack([omega, alpha[None]]), PENALTY, 1.0)
    for server_round, upload in enumerate(uploads, start=1):
        if server_round > 1 or not published:
            (message,) = grid.phase(MessageType.TRAIN, server_round)
            sent = from_array_record(message.content["arrays"])
            zeta = np.concatenate([sent["weight"].ravel(), sent["bias"].ravel()])
            assert_allclose(zeta, store.zeta([OLD])[0], rtol=1e-5, atol=1e-6)
            assert FPFCRule.read(message.content["config"]["rule"]).rho == 1.0
        store.update([OLD], upload[None])
    (first,) = grid.phase(MessageType.TRAIN, 1)
    assert FPFCRule.read(first.content["config"]["rule"]).rho == (0.0 if published else 1.0)


def test_who_trains_too_far_from_its_group_still_joins_it() -> None:
    # Few samples with much noise, and a pull that reaches a lambda = 0.37: trained from the initial
    # model, as in the paper, a client ends out of reach of both groups.
    few = app_of(lambda client: samples(20 + client, SLOPES[client % 2], 6, 2.0), net=model())
    number = trained().models().cluster_of
    found = {}
    for published in (True, False):
        strategy = FPFCNewcomers(
            *(trained().models(), SmoothedSCAD(0.1)),
            lr=0.1,
            local_epochs=20,
            nu=0.185,
            published=published,
            min_available_nodes=2,
        )
        strategy.start(Federation(few, 2), trained().global_arrays, 5)
        found[published] = strategy.groups()
        group = from_array_record(strategy.model_arrays("cluster", 0))
        joins = np.array_equal(group["weight"], trained().models().clusters[number[0]]["weight"])
        assert joins == (not published)
    assert found == {True: {0: None, 1: None}, False: {0: number[0], 1: number[1]}}


def test_arrays_that_are_not_clustered_stay_as_they_are() -> None:
    strategy = FPFC(SmoothedSCAD(0.5), lr=0.2, local_epochs=1, clustered="^head")
    fit = client_app(client_fn_of(FPFCClient))
    strategy.start(Federation(fit, 4), initial_arrays(), 2)
    new = strategy.newcomers(min_available_nodes=1)
    grid = Federation(fit, 1)
    new.start(grid, strategy.global_arrays, 3)
    personal = from_array_record(new.model_arrays("personal", 0))
    shared = from_array_record(strategy.global_arrays)
    for name in personal:
        assert np.array_equal(personal[name], shared[name]) == name.startswith("body")
    (reply,) = grid.replies(MessageType.TRAIN, 2)
    assert sorted(from_array_record(reply.content["arrays"])) == ["head.bias", "head.weight"]


@pytest.mark.slow
def test_an_interrupted_one_resumes_to_the_same_bits() -> None:
    expected, _ = joined()
    states: dict[int, Any] = {}
    first = trained().newcomers(min_available_nodes=1, seed=1)
    first.start(
        Federation(app(10), 2),
        trained().global_arrays,
        5,
        on_round=lambda r, m: states.update({r: first.state_dict()}),
    )
    for saved in (1, 4):
        again = trained().newcomers(min_available_nodes=1, seed=1)
        again.load_state_dict(states[saved])
        again.start(Federation(app(10), 2), trained().global_arrays, 12)
        assert_same_bits(again.state_dict(), expected.state_dict())
