"""An update reads what was sent."""

from __future__ import annotations

from collections.abc import Mapping

from fl_admm_strategies.runtime.messages.records import Reply
from tests.support.cases import Case, at_any_pace, grid_of, sampling
from tests.support.federation import (
    node_of,
)


@at_any_pace
def test_a_reply_comes_with_what_its_client_was_sent(case: Case) -> None:
    grid, strategy = grid_of(case), sampling(case)
    update, ages = strategy.update, []

    def compare(server_round: int, replies: Mapping[int, Reply]) -> None:
        for client, reply in replies.items():
            sent_in = reply.asked.config["server-round"]
            ages.append(server_round - sent_in)
            if strategy.in_rounds:
                (message,) = (
                    message
                    for message in grid.phase("train", sent_in)
                    if message.metadata.dst_node_id == node_of(client)
                )
                assert dict(message.content["config"]) == reply.asked.full_config()
        update(server_round, replies)

    strategy.update = compare  # type: ignore[method-assign]
    strategy.start(grid, case.initial_arrays(), 4)
    if strategy.in_rounds:
        assert set(ages) == {0}
    else:
        assert ages == [*strategy.staleness.values()]  # type: ignore[attr-defined]
        assert max(ages) > 0
