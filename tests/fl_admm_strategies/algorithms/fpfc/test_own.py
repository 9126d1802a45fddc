"""FPFC without a lambda asks its clients whether their own models are better than their groups'.

See docs/methods/fpfc.md, "Without a lambda".
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import MessageType
from numpy.testing import assert_allclose

from fl_admm_strategies.algorithms.fpfc.finding import Choice
from tests.fl_admm_strategies.algorithms.fpfc.test_recheck import choose
from tests.fl_admm_strategies.algorithms.fpfc.test_search import (
    FIRST,
    GROUPS,
    NUM_CLIENTS,
    ROUNDS,
    app,
    asked,
    auto,
    flat,
    rho,
    run,
    sent,
    uploads,
)
from tests.fl_admm_strategies.algorithms.fpfc.test_settled import omega
from tests.support.federation import Federation

ONE, ALONE = [0] * 6, list(range(6))


@pytest.mark.parametrize(
    ("groups", "expected"),
    [(GROUPS, GROUPS), (ONE, ALONE), ([0, 1, 0, 1, 1, 2], [0, 1, 0, 1, 1, 2])],
)
def test_groups_stay_unless_their_clients_are_better_alone(
    groups: list[int], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, groups)
    chosen = Choice.take

    def without_a_recheck(self: Choice, server_round: int, replies: Any) -> Any:
        following = chosen(self, server_round, replies)
        if following == "Reprobe":
            self.found.probes = {}
        return following

    monkeypatch.setattr(Choice, "take", without_a_recheck)
    strategy, grid = auto(), Federation(app(), NUM_CLIENTS)
    seen: dict[int, Any] = {}
    # Without the two rounds of the re-check.
    last = ROUNDS - 2
    run(strategy, last, grid, on_round=lambda r, m: seen.setdefault(r, omega(strategy)))
    assert strategy.clusters().tolist() == expected
    own = last - 2
    assert strategy.diagnostics().search.asked == own
    assert asked(grid, own) == asked(grid, own + 1) == list(range(NUM_CLIENTS))
    made, compared = uploads(grid, own), sent(grid, own + 1)
    for client in range(NUM_CLIENTS):
        # Its group's model before and after, and its own.
        members = [c for c in range(NUM_CLIENTS) if groups[c] == groups[client]]
        after = np.mean([flat(under_0(made[c])) for c in members], axis=0)
        expected_models = [seen[own - 1][client], after, flat(under_0(made[client]))]
        assert_allclose(compared[client], expected_models, rtol=1e-5, atol=1e-6)
        if expected == ALONE:
            assert_allclose(seen[own + 1][client], expected_models[2], rtol=1e-6)
    # Alone without a pull, and without a bound on the upload.
    alone = {c for c in range(NUM_CLIENTS) if expected.count(expected[c]) == 1}
    assert {c for c in range(NUM_CLIENTS) if strategy.state.source.is_free(c)} == alone
    for message in grid.phase(MessageType.TRAIN, last):
        assert (rho(message) == 0) == (message.metadata.dst_node_id - FIRST in alone)


def under_0(upload: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("0/"): array for name, array in upload.items()}
