"""FPFC without a lambda after its search: groups that train together, and pairs that hold them.

See docs/methods/fpfc.md, "Without a lambda".
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, MessageType
from numpy.testing import assert_allclose, assert_array_equal

from clients import FPFCClient, client_app
from fl_admm_strategies import FPFC, InProcessGrid
from fl_admm_strategies.algorithms.fpfc import together
from fl_admm_strategies.algorithms.fpfc.finding import PROBE_ROUNDS
from fl_admm_strategies.algorithms.fpfc.search import lambda_between
from fl_admm_strategies.runtime.messages.records import from_array_record, parse_groups
from tests.fl_admm_strategies.algorithms.fpfc.test_search import (
    FIRST,
    GROUPS,
    JUDGE,
    NUM_CLIENTS,
    PROBE,
    app,
    asked,
    auto,
    config,
    data,
    flat,
    rho,
    run,
    uploads,
    without,
)
from tests.support.federation import Federation
from tests.support.pairs import v_of
from tests.support.slopes import app_of, client_of

LATE = JUDGE + PROBE_ROUNDS + 1
PAIRS, LAST = JUDGE + 4, JUDGE + 7  # groups train together in rounds 13 to 15, pairs in 16 to 19


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "FUSION_ROUNDS", LAST - PAIRS + 1)


def unequal(client: int) -> Any:
    """Return samples: of client 0 ten, of the others 30."""
    return data(client, 10 if client == 0 else 30)


def omega(strategy: FPFC) -> Any:
    return strategy.state.pairs.omega.copy()


@cache
def whole() -> tuple[FPFC, Federation, Mapping[int, Any]]:
    """Return a run with nothing in its way, and its models by round; only to read."""
    strategy, grid = auto(), Federation(app(), NUM_CLIENTS)
    seen: dict[int, Any] = {}
    run(strategy, LAST, grid, on_round=lambda r, metrics: seen.setdefault(r, omega(strategy)))
    return strategy, grid, seen


# --- Settled groups are trained as one model each -------------------------------------------------


def test_a_group_trains_one_model_the_mean_by_examples_and_sends_it_to_all() -> None:
    strategy, grid = auto(), Federation(app_of(unequal), NUM_CLIENTS)
    seen: dict[int, Any] = {}
    run(strategy, LAST, grid, on_round=lambda r, metrics: seen.setdefault(r, omega(strategy)))
    assert strategy.clusters().tolist() == GROUPS
    for server_round in range(JUDGE + 1, PAIRS):
        for message in grid.phase(MessageType.TRAIN, server_round):
            client = message.metadata.dst_node_id - FIRST
            sent = flat(from_array_record(message.content["arrays"]))
            assert_array_equal(sent, seen[server_round - 1][client])
            assert parse_groups(config(message)) == {"model": ["weight", "bias"], "start": []}
            assert rho(message) == 0.0
        made = {c: flat(upload) for c, upload in uploads(grid, server_round).items()}
        for client, group in enumerate(GROUPS):
            here = [c for c in made if GROUPS[c] == group]
            counts = [10 if c == 0 else 30 for c in here]
            expected = (
                np.average([made[c] for c in here], axis=0, weights=counts)
                if here
                else seen[server_round - 1][client]
            )
            assert_allclose(seen[server_round][client], expected, rtol=1e-5)
    assert strategy.state.source.found.fused_from == PAIRS - 1


# --- FPFC's own rounds ----------------------------------------------------------------------------


def test_who_sits_out_moves_with_its_group_and_is_sent_where_it_is() -> None:
    _, grid, seen = whole()
    for server_round in range(PAIRS, LAST + 1):
        before, after = seen[server_round - 1], seen[server_round]
        active = asked(grid, server_round)
        for client, group in enumerate(GROUPS):
            here = [c for c in active if GROUPS[c] == group]
            if client not in active:
                moves = [after[c] - before[c] for c in here] or [np.zeros(4)]
                expected = before[client] + np.mean(moves, axis=0)
                assert_allclose(after[client], expected, rtol=1e-5, atol=1e-6)
        for message in grid.phase(MessageType.TRAIN, server_round):
            client = message.metadata.dst_node_id - FIRST
            if "start" in (parse_groups(config(message)) or {}):
                sent = from_array_record(message.content["arrays.start"])["omega"]
                assert_array_equal(sent, before[client])
            else:  # it holds what it has uploaded, which is where it is
                last = max(r for r in range(PAIRS, server_round) if client in asked(grid, r))
                assert_array_equal(flat(uploads(grid, last)[client]), before[client])


@pytest.mark.slow
def test_it_solves_the_problem_inside_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    # Least squares: with equal n_i the minimiser of sum_i f_i over a group is that of all its
    # samples; with others too, since clients count by their examples.
    monkeypatch.setattr(together, "FUSION_ROUNDS", 80)
    strategy = auto(fraction_train=0.5)
    run(strategy, 180, InProcessGrid(app_of(unequal), NUM_CLIENTS))
    for group in (0, 1):
        members = [c for c in range(NUM_CLIENTS) if GROUPS[c] == group]
        x = torch.cat([unequal(c)[0] for c in members]).numpy()
        y = torch.cat([unequal(c)[1] for c in members]).numpy()
        x = np.hstack([x, np.ones((len(x), 1))])
        best = np.linalg.lstsq(x, y, rcond=None)[0][:, 0]
        for client in members:
            assert_allclose(strategy.state.pairs.omega[client], best, atol=2e-3)


@pytest.mark.slow
def test_with_a_small_rho_groups_are_still_apart_at_the_end() -> None:
    # (6) pulls in full up to lambda + lambda/rho: with lambda = b/a the groups would be drawn
    # together.
    assert lambda_between(2.0, 9.0, rho=1.0) == 2.0 / 3.7
    assert lambda_between(2.0, 9.0, rho=0.4) == pytest.approx(0.6 * 2.0 / 3.5)
    assert lambda_between(np.nan, 9.0, rho=1.0) == 18.0  # one group: twice what holds it
    strategy = auto(rho=0.5, lr=0.3)
    run(strategy, 70, Federation(app_of(unequal), NUM_CLIENTS))
    norms, same = strategy.state.pairs.theta_norms(), np.equal.outer(GROUPS, GROUPS)
    assert norms[same].max() < 1e-3 < norms[~same].min()


# --- Clients that the search did not hear of ------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [3, 40])
def test_a_silent_client_is_in_no_pair_no_cluster_and_no_mean(
    rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As landed first: it had a row at the common start, which is near everybody, and duals with
    # all; that merged both groups at round 20.
    monkeypatch.setattr(together, "FUSION_ROUNDS", 100)
    silent = {r: without(3) for r in range(PROBE, 100)}
    strategy = auto(fraction_train=1.0)
    end = JUDGE + PROBE_ROUNDS - 1
    run(strategy, end + rounds, Federation(app(), NUM_CLIENTS, spoil=silent))
    assert strategy.clusters().tolist() == [0, 1, 0, 2, 1, 0]
    nu = strategy.nu_in_use
    assert strategy.clusters(nu).tolist() == [0, 1, 0, 2, 1, 0]
    pairs = strategy.state.pairs
    for other in range(NUM_CLIENTS):
        assert_array_equal(v_of(pairs, 3, other), np.zeros(4))
    others = [c for c in range(NUM_CLIENTS) if c != 3]
    assert_allclose(flat(strategy.global_model()), pairs.omega[others].mean(axis=0), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("late", [LATE, LAST + 1])
def test_a_client_that_comes_later_says_which_group_suits_it(late: int) -> None:
    # Together until round 15, pairs from then on: it comes before and after.
    silent = {r: without(3) for r in range(PROBE, late)}
    strategy = auto(fraction_train=1.0)
    grid = Federation(app(), NUM_CLIENTS, spoil=silent)
    run(strategy, LAST + 3, grid)
    assert strategy.clusters().tolist() == GROUPS
    metrics = strategy.train_metrics[late][3]
    losses = sorted(metrics[name] for name in metrics if name.startswith("held-out-loss"))
    assert losses.index(metrics["held-out-loss"]) == 1  # of its own model, between two groups'
    after = [
        m for m in grid.phase(MessageType.TRAIN, late + 1) if m.metadata.dst_node_id - FIRST == 3
    ]
    is_fusion = late + 1 >= PAIRS + 3
    assert rho(after[0]) == (1.0 if is_fusion else 0.0)
    # It begins at the model of its group, and not where it came to alone.
    assert parse_groups(config(after[0]))["start"] == (["omega"] if is_fusion else [])


# --- FPFC's own rounds that make things worse -----------------------------------------------------


class Worsening(FPFCClient):
    """Says that its loss grows, by `factor` from one training to the next."""

    factor = 1.2

    def minimise(self, *args: Any, **kwargs: Any) -> Any:
        super().minimise(*args, **kwargs)
        client = int(self.context.node_config["partition-id"])
        trainings[client] = trainings.get(client, 0) + 1
        return {"loss": self.factor ** trainings[client]}


trainings: dict[int, int] = {}


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "is_given_up"), [(2.0, True), (1.01, False), (0.9, False)])
def test_own_rounds_that_raise_the_losses_are_given_up(
    monkeypatch: pytest.MonkeyPatch, factor: float, is_given_up: bool
) -> None:
    # After five of these rounds most have trained twice or more often: by 2, 1.04 at most, or less.
    monkeypatch.setattr(together, "FUSION_ROUNDS", 8)
    monkeypatch.setattr(Worsening, "factor", factor)
    trainings.clear()

    def client_fn(context: Context) -> Any:
        return client_of(context, unequal(int(context.node_config["partition-id"])), Worsening)

    strategy, grid = auto(), Federation(client_app(client_fn), NUM_CLIENTS)
    run(strategy, LAST + 4, grid)
    found, models = strategy.state.source.found, omega(strategy)
    assert found.fused_until == (found.fused_from + 5 if is_given_up else 0)
    assert strategy.diagnostics().search.fused_until == found.fused_until
    assert strategy.clusters().tolist() == GROUPS
    for group in (0, 1):  # one model each again
        members = [c for c in range(NUM_CLIENTS) if GROUPS[c] == group]
        spread = np.ptp(models[members], axis=0).max()
        assert (spread == 0) == is_given_up
