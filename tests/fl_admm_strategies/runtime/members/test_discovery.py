"""Nodes that go and come back in the middle of a run, as SuperNodes of a deployment do."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode

from clients import FPFCClient, client_app
from fl_admm_strategies import FPFC, InProcessGrid, SmoothedSCAD
from fl_admm_strategies.runtime.members import discovery
from tests.support.federation import (
    Federation,
    Online,
    assert_same_bits,
    client_fn_of,
    initial_arrays,
    not_asking,
    trained,
)
from tests.support.refusals import Warned, names, refused

# Nodes 2, 3, 4 are clients 0, 1, 2; further nodes are added per test, from id 5 on.
FIRST = (0, 1, 2)


def fpfc(**settings: Any) -> FPFC:
    return FPFC(SmoothedSCAD(0.5), lr=0.2, local_epochs=2, fraction_evaluate=0, seed=1, **settings)


def fpfc_app() -> ClientApp:
    return client_app(client_fn_of(FPFCClient))


def run(
    online: Online, partitions: Sequence[int] = FIRST, num_rounds: int = 4, **settings: Any
) -> tuple[FPFC, Federation]:
    grid = Federation(fpfc_app(), partitions, online)
    strategy = fpfc(**settings)
    strategy.start(grid, initial_arrays(), num_rounds)
    return strategy, grid


def as_if_not_sampled(away: Mapping[int, int]) -> FPFC:
    """Return a run with three steady nodes in which `away[round]` was not sampled."""
    strategy = not_asking(fpfc(), {server_round: [client] for server_round, client in away.items()})
    strategy.start(InProcessGrid(fpfc_app(), 3), initial_arrays(), 4)
    return strategy


def test_a_client_that_comes_back_on_another_node_takes_part_again(warned: Warned) -> None:
    # Client 1's node 3 is gone in rounds 2 and 3; its new node 5 has nothing of what it kept.
    strategy, grid = run({0: [2, 3, 4], 2: [2, 4], 4: [2, 4, 5]}, partitions=(0, 1, 2, 1))
    assert trained(strategy) == {1: [0, 1, 2], 2: [0, 2], 3: [0, 2], 4: [0, 1, 2]}
    assert_same_bits(strategy.state_dict(), as_if_not_sampled({2: 1, 3: 1}).state_dict())
    assert grid.asked == [5]
    assert len(warned()) == len(warned("round 2", "client 1")) == 1  # once for both rounds


def test_the_same_node_may_come_back() -> None:
    # Its client was not asked in round 2, so only the directory can know that it may have been
    # restarted, and that it needs its omega_1 in round 3.
    grid = Federation(fpfc_app(), FIRST, {0: [2, 3, 4], 2: [2, 4], 3: [2, 3, 4]})
    strategy = fpfc()
    current: dict[int, bool] = {}
    instructions = not_asking(strategy, {2: [1]}).train_instructions

    def watched(server_round: int, client_ids: Sequence[int]) -> Any:
        current[server_round] = strategy.membership.has_current_state(1)
        return instructions(server_round, client_ids)

    strategy.train_instructions = watched  # type: ignore[method-assign]
    strategy.start(grid, initial_arrays(), 4)
    assert current == {1: False, 2: True, 3: False, 4: True}
    assert trained(strategy) == {1: [0, 1, 2], 2: [0, 2], 3: [0, 1, 2], 4: [0, 1, 2]}
    assert grid.asked == []
    assert_same_bits(strategy.state_dict(), as_if_not_sampled({2: 1}).state_dict())


def test_a_second_node_of_a_client_waits_until_the_first_is_gone(warned: Warned) -> None:
    # Round 4 is the first in which node 3 is not there any more; node 5 is asked once only.
    strategy, grid = run({0: [2, 3, 4], 2: [2, 3, 4, 5], 4: [2, 4, 5]}, partitions=(0, 1, 2, 1))
    assert trained(strategy) == {r: [0, 1, 2] for r in (1, 2, 3, 4)}
    assert grid.asked == [5]
    assert len(warned()) == len(warned("node 5", "[1]", "node [3]")) == 1


def test_a_node_that_hosts_new_clients_is_welcome(warned, caplog):
    strategy, grid = run({0: [2, 3, 4], 2: [2, 3, 4, 5]}, partitions=(0, 1, 2, 7))
    assert trained(strategy) == {1: [0, 1, 2]} | {r: [0, 1, 2, 7] for r in (2, 3, 4)}
    assert grid.asked == [5]
    assert warned() == []
    assert any(names(line, "[7]", "node 5") for line in caplog.messages)


def test_a_run_whose_clients_are_gone_ends_with_an_error_that_says_what_to_do(caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="flwr")
    monkeypatch.setattr(discovery, "_REPORT_EVERY", 0.15)
    with refused(TimeoutError, "1 of the run's 3", 2, "min_available_nodes", "node_timeout"):
        run({0: [2, 3, 4], 2: [4]}, node_timeout=0.3)
    assert 1 <= sum(names(line, "1 of 2") for line in caplog.messages) <= 2


class SuperLinkGrid(InProcessGrid):
    """The node of client 1 dies with the message of round 2, and the SuperLink says so itself."""

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        messages = list(messages)
        replies = super().send_and_receive(messages, timeout=timeout)
        for position, message in enumerate(messages):
            if message.metadata.dst_node_id == 3 and message.metadata.group_id == "2":
                error = Error(ErrorCode.NODE_UNAVAILABLE, "Node Unavailable")
                replies[position] = Message(error, reply_to=message)
                replies[position].metadata.__dict__["_src_node_id"] = SUPERLINK_NODE_ID
        return replies


def test_an_error_of_the_superlink_names_the_client(warned: Warned) -> None:
    strategy = fpfc()
    strategy.start(SuperLinkGrid(fpfc_app(), 3), initial_arrays(), 3)
    assert trained(strategy) == {1: [0, 1, 2], 2: [0, 2], 3: [0, 1, 2]}
    assert len(warned()) == len(warned("round 2", "client 1", "Node Unavailable")) == 1


class Slow(InProcessGrid):
    """A grid whose nodes answer half a second after the first has been asked."""

    began = 0.0

    def pull_messages(self, message_ids: Any) -> Any:
        self.began = self.began or time.monotonic()
        return super().pull_messages(message_ids) if time.monotonic() > self.began + 0.5 else []


def test_simulated_nodes_may_start_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(TimeoutError, "none of 3 connected nodes", "starting", "node_timeout"):
        fpfc(node_timeout=0.2).start(Slow(fpfc_app(), 3), initial_arrays(), 1)
    monkeypatch.setattr(discovery, "runs_on_ray", lambda: True)
    strategy = fpfc(node_timeout=0.2)
    strategy.start(Slow(fpfc_app(), 3), initial_arrays(), 1)
    assert trained(strategy) == {1: [0, 1, 2]}
