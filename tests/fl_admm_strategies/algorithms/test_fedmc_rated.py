"""FedMC-ADMM with rows="rated": the trajectory of all rows, in the memory of the rated ones.

See docs/methods/fedmc-admm-notes.md, P13.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fl_admm_strategies import FedMCADMM
from fl_admm_strategies.algorithms.shared.completion import CURVATURE
from fl_admm_strategies.maths import rated
from fl_admm_strategies.maths.rated import RatedConsensus
from fl_admm_strategies.maths.regularizers import L1Norm, SquaredL2
from fl_admm_strategies.runtime.messages.records import RawReply
from tests.support.pace import fast
from tests.support.ratings import NUM_CLIENTS, NUM_ITEMS, RANK, Federation, ratings
from tests.support.refusals import names, refused

KINDS = {"l2": SquaredL2(0.2), "l1": L1Norm(0.2)}
USERS = SquaredL2(0.3)


def federation(rows: str, kind: str = "l2", **settings: Any) -> Federation:
    options = {"beta": 0.8, "inner_steps": 3, "fraction_train": 0.4, "seed": 1} | settings
    options = {"solve": "linear"} | options
    strategy = FedMCADMM(KINDS[kind], rows=rows, **options)  # type: ignore[arg-type]
    test = {i: ratings(i, seed=1) for i in range(NUM_CLIENTS)}
    return Federation(strategy, USERS, test=test, density=0.3)


def items(run: Federation) -> Any:
    return run.strategy.global_model()["item-factors"]


# q from near 1, where V fades slowly, to 1e-5
@pytest.mark.parametrize(
    ("kind", "beta"), fast([("l2", 0.05), ("l1", 0.8)], [("l2", 0.05), ("l1", 0.8), ("l2", 50.0)])
)
@pytest.mark.parametrize("start_at", fast(["global"], ["own", "global"]))
@pytest.mark.parametrize("averaging", fast(["participants"], ["all", "participants"]))
def test_the_trajectory_is_that_of_all_rows(kind, beta, start_at, averaging, monkeypatch):
    monkeypatch.setattr("fl_admm_strategies.algorithms.fedmc_admm.REBUILD_EVERY", 10)
    scale = {"init_scale": 0.5, "beta": beta, "start_at": start_at, "averaging": averaging}
    dense, sparse = federation("all", kind, **scale), federation("rated", kind, **scale)
    near = {"rtol": 1e-9, "atol": 1e-10}
    for k in range(1, 26):
        assert dense.round(k) == sparse.round(k)
        np.testing.assert_allclose(items(sparse), items(dense), **near)
        if k % 8 == 0:
            assert sparse.evaluate(k) == pytest.approx(dense.evaluate(k), rel=1e-8)
    for i in range(NUM_CLIENTS):
        own, whole = sparse.strategy.state.consensus[i], dense.strategy.state.consensus.clients[i]
        assert own.items.tolist() == sorted(set(dense.train[i].items.tolist()))
        w = dense.held(i)["W"]
        np.testing.assert_allclose(own.w.T, w[:, own.items], **near)
        dual = whole.pi.reshape(RANK, NUM_ITEMS) / beta
        np.testing.assert_allclose(own.dual.T, dual[:, own.items], **near)
        start = items(dense) if start_at == "global" else w
        assert sparse.strategy.state.consensus.curvature(i) == pytest.approx(
            np.linalg.norm(start @ start.T), rel=1e-9
        )
        np.testing.assert_allclose(sparse.held(i)["U"], dense.held(i)["U"], rtol=1e-7)
        assert [*sparse.held(i)] == ["U"]  # no copy of V


def test_one_round_of_what_is_not_rated_by_hand() -> None:
    # One item, which the client has not rated; q = 1/2. v^0 = 4, then 2 in place of the mean.
    # Round 1: w = (4 + 4)/2 = 4, d = 4 - 4 = 0. Round 2 at v = 2: w = (4 + 2)/2 = 3, d = 3 - 2 = 1.
    # Round 3 at v = 2: w = (3 + (2 - 1))/2 = 2, d = 1 + 2 - 2 = 1. Z = 4, 4, 3.
    consensus = RatedConsensus(np.array([[4.0]]), prox=lambda mean: np.full_like(mean, 2.0))
    consensus.insert({0: {rated.RATED: np.array([False])}})
    for z, curvature in ((4.0, 16.0), (4.0, 9.0), (3.0, 4.0)):
        consensus.update(0, np.zeros((0, 1)), 0.5)
        consensus.aggregate()
        assert consensus.total == pytest.approx(z)
        assert consensus.curvature(0) == pytest.approx(curvature)  # ||w w'||


def test_old_item_factors_are_forgotten() -> None:
    run = federation("rated", beta=1e4, fraction_train=1.0)
    for k in range(1, 12):
        run.round(k)
    consensus = run.strategy.state.consensus
    assert 1 <= len(consensus._sent) <= 5  # q is 1e-9 or so
    assert all({*pair} <= consensus._sent.keys() for pair in consensus._products)


def test_clients_that_join_and_leave() -> None:
    """As with all rows: a joining client starts at V, one that leaves takes its Z_i along."""
    results = []
    for rows in ("all", "rated"):
        run = federation(rows, fraction_train=1.0)
        consensus = run.strategy.state.consensus
        for k in (1, 2):
            run.round(k)
        consensus.remove([3], 2)
        run.strategy.membership.reset([3])  # it begins anew on its side as well
        mask = np.zeros(NUM_ITEMS, np.bool_)
        mask[run.train[3].items] = True
        consensus.insert({3: {rated.RATED: mask}})
        run.round(3)
        results.append(items(run))
    np.testing.assert_allclose(*results, rtol=1e-10)


def test_what_travels_are_the_rated_items_and_evaluation_keeps_no_copy() -> None:
    run = federation("rated", fraction_train=1.0)
    asked = run.strategy.run.configure_train(1, {})
    for i, own in asked.items():
        count = len(set(run.train[i].items.tolist()))
        assert {name: a.shape for g in own.groups.values() for name, a in g.items()} == {
            "item-factors": (RANK, count)
        }
    run.strategy.run.aggregate_train(1, run._fit(asked))
    run.evaluate(1)
    client = run.client(0)
    assert [*client.personal_arrays()] == ["user-factors"]
    with refused(ValueError, "item_factors"):
        client.recommend(0, 3)
    factors = run.strategy.global_arrays["item-factors"].numpy()
    best = client.recommend(0, NUM_ITEMS, exclude_seen=False, item_factors=factors)
    users = client.personal_arrays()["user-factors"]
    np.testing.assert_array_equal(best, np.argsort(-(users @ factors)[0], kind="stable"))


def test_a_reply_of_another_shape_is_refused_and_a_strange_curvature_is_harmless() -> None:
    run = federation("rated", fraction_train=1.0)
    asked = run.strategy.run.configure_train(1, {})
    replies = dict(run._fit(asked))
    replies[0] = RawReply({"item-factors": np.ones((RANK, NUM_ITEMS))}, replies[0].metrics)
    replies[1].metrics[CURVATURE] = float("nan")
    run.strategy.run.aggregate_train(1, replies.items())
    assert sorted(run.strategy.membership.last_accepted.items()) == [
        (0, 0),
        *((i, 1) for i in range(1, NUM_CLIENTS)),
    ]
    assert names(run.strategy.run.intake.last_refusal, "client 0", "item-factors", "shape")
    assert np.isfinite(items(run)).all()


@pytest.mark.parametrize("wrong", [{"duals": "client"}, {"y0": "handshake"}])
def test_settings_that_do_not_go_together(wrong: dict[str, Any]) -> None:
    with refused(ValueError, "rows", "rated", "duals"):
        FedMCADMM(SquaredL2(0.1), rows="rated", solve="linear", **wrong)


def test_a_state_of_other_ratings_or_rows_is_refused() -> None:
    run = federation("rated")
    run.round(1)
    state = run.strategy.state.consensus.state_arrays()
    for name, array in {
        "items": state["items"] + NUM_ITEMS,
        "w": state["w"][1:],
        "v": state["v"].T,
    }.items():
        with refused(ValueError, "saved"):
            run.strategy.state.consensus.load_state_arrays(state | {name: array})
    with refused(ValueError, "saved state lacks", "items"):
        run.strategy.state.consensus.load_state_arrays({"v": state["v"]})
