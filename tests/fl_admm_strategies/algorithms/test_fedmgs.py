"""FedMGS against numbers worked out beside a dense transcript, and what the server keeps."""

from __future__ import annotations

import numpy as np
import pytest

from clients import FedMGSClient
from fl_admm_strategies import FedMGS, SquaredL2
from fl_admm_strategies.algorithms.fedmgs import CURVATURE
from fl_admm_strategies.runtime.messages.records import RawReply, Reply
from fl_admm_strategies.runtime.messages.stamp import made_by
from tests.support.ratings import RatingsRun, worked_example
from tests.support.refusals import refused


def test_the_worked_example() -> None:
    """Rank 1, Q_1 = 2, lam = gamma = 0.1; both clients take part, then the second alone."""
    run = worked_example(FedMGS(SquaredL2(0.1), user_steps=2), FedMGSClient)
    run.round(1, [0, 1])
    found = run.strategy.global_model()["item-factors"]
    expected = [[1.0306190413, 0.6924691434, 0.8672640534]]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-8)
    run.round(2, [1])
    found = run.strategy.global_model()["item-factors"]
    expected = [[1.0319393283, 0.8143143928, 0.9153434723]]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-8)
    users = np.concatenate([run.held(i)["user-factors"].ravel() for i in (0, 1)])
    expected = [4.2323843117, 3.4503401361, 3.0996465617, 2.713970087]
    np.testing.assert_allclose(users, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("reported", [{}, {CURVATURE: -1.0}, {CURVATURE: np.inf}])
def test_a_reply_without_a_usable_curvature_is_refused_by_name(
    reported: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    run = RatingsRun(FedMGS(SquaredL2(0.2)), SquaredL2(0.3), kind=FedMGSClient)
    strategy, V = run.strategy, run.first["item-factors"]
    run.round(1)
    before = strategy.state.clients.column("gradient").copy()
    strategy.run.configure_train(2, {})
    metrics = {"num-examples": 3.0, **reported, **made_by("FedMGS")}
    replies = [(2, RawReply({"item-factors": V}, metrics))]
    assert strategy.run.aggregate_train(2, replies) is None
    np.testing.assert_array_equal(strategy.state.clients.column("gradient"), before)
    assert f"The {CURVATURE} of client 2 is" in caplog.text
    with refused(ValueError, "client 7", CURVATURE):
        strategy.new_client(7, Reply({"item-factors": V}, 3.0, reported))
