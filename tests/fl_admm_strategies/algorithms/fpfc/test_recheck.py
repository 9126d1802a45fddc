"""FPFC without a lambda: groups that the search got wrong are mended by the re-check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fl_admm_strategies.algorithms.fpfc import recheck, together
from fl_admm_strategies.algorithms.fpfc.finding import Choice
from fl_admm_strategies.algorithms.fpfc.together import RECHECK_AFTER, RECHECKS
from fl_admm_strategies.maths.pairs import PairwiseStore
from tests.support.federation import Federation
from tests.support.pace import fast

from .test_search import JUDGE, NUM_CLIENTS, REPROBE, app, asked, auto, run
from .test_search import without as losing

TRUTH = [0, 1, 0, 1, 1, 0]
# A group of three that is split has too few to say so; tests of maths.recheck have larger ones.
WRONG = {"merged": [0] * 6, "misplaced": [0, 1, 0, 1, 0, 0]}


def choose(monkeypatch: pytest.MonkeyPatch, groups: Sequence[int]) -> None:
    """Let the search end with these groups, at the means of their probes."""
    take = Choice.take

    def chosen(self: Choice, server_round: int, replies: Any) -> Any:
        following = take(self, server_round, replies)
        found, state = self.found, self.fpfc.state
        found.groups = {client: groups[client] for client in found.groups}
        models = {
            group: np.mean([p for c, p in found.probes.items() if groups[c] == group], axis=0)
            for group in groups
        }
        omega = np.stack([models[groups[client]] for client in state.clients.ids])
        state.pairs = PairwiseStore(omega, state.source.penalty, state.pairs.rho)
        return following

    monkeypatch.setattr(Choice, "take", chosen)


def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pairs begin in the last four rounds only, before which groups may be looked at."""
    for module in (recheck, together):
        monkeypatch.setattr(module, "FUSION_ROUNDS", 4)


@pytest.mark.parametrize("wrong", fast(["merged"], WRONG))
def test_wrong_groups_are_mended(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, WRONG[wrong])
    strategy = auto()
    run(strategy, JUDGE)
    assert strategy.clusters().tolist() == TRUTH
    pairs = strategy.state.pairs
    for members in ([0, 2, 5], [1, 3, 4]):
        assert len(np.unique(pairs.omega[members], axis=0)) == 1


def test_a_client_without_a_probe_stays_in_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that came later, and was placed by what it measured."""
    choose(monkeypatch, TRUTH)
    begin = recheck.Reprobe.begin_round

    def without_one(self: Any, now: Any) -> Any:
        self.found.probes.pop(5, None)
        return begin(self, now)

    monkeypatch.setattr(recheck.Reprobe, "begin_round", without_one)
    strategy = auto()
    run(strategy, JUDGE)
    assert strategy.clusters().tolist() == TRUTH


@pytest.mark.slow
def test_it_is_done_again_while_it_changes_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, WRONG["merged"])
    short(monkeypatch)
    strategy, grid = auto(), Federation(app(), NUM_CLIENTS)
    run(strategy, JUDGE + 2 * RECHECK_AFTER + 8, grid)
    everybody = list(range(NUM_CLIENTS))
    second = JUDGE + RECHECK_AFTER + 1
    last = second + RECHECK_AFTER + 2  # where a third would have been
    assert [r for r in range(REPROBE, last + 1) if asked(grid, r) == everybody] == [
        *(REPROBE, JUDGE),
        *(second, second + 1),
    ]
    assert strategy.state.source.found.rechecks == RECHECKS  # the second changed nothing
    assert strategy.state.source.found.probes == {}


@pytest.mark.slow
@pytest.mark.parametrize("lost", [REPROBE, JUDGE])
def test_who_does_not_reply_goes_where_its_group_goes_and_is_heard_later(
    lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, WRONG["merged"])
    short(monkeypatch)
    strategy = auto()
    last = JUDGE + RECHECK_AFTER + 8
    run(strategy, last, Federation(app(), NUM_CLIENTS, spoil={lost: losing(2)}))
    assert strategy.clusters().tolist() == TRUTH
