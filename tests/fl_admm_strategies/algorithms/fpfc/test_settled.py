"""FPFC without a lambda after its search: groups that train together, and pairs that hold them.

See docs/methods/fpfc.md, "Without a lambda".
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, MessageType
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.metrics import adjusted_rand_score
from torch import nn

from clients import FPFCClient, client_app
from fl_admm_strategies import FPFC, AsyncFPFC, InProcessGrid
from fl_admm_strategies.algorithms.fpfc import together
from fl_admm_strategies.runtime.messages.records import from_array_record, parse_groups
from tests.fl_admm_strategies.algorithms.fpfc.test_search import (
    FIRST,
    GROUPS,
    JUDGE,
    NUM_CLIENTS,
    PROBE,
    PROBE_ROUNDS,
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
from tests.support.federation import Federation, assert_same_bits
from tests.support.pairs import v_of
from tests.support.slopes import app_of, arrays, client_of

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


class Softmax:
    """4 x 5 clients of the issue's first case: a common part and 0.5 times the group's own."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        common = draw.normal(size=(10, 20))
        teachers = [common + 0.5 * draw.normal(size=(10, 20)) for _ in range(4)]
        self.groups = np.repeat(range(4), 5)
        inputs = draw.normal(size=(20, 580, 20)).astype(np.float32)
        self.inputs = torch.from_numpy(inputs)
        labels = [(x @ teachers[g].T).argmax(1) for x, g in zip(inputs, self.groups, strict=True)]
        self.labels = torch.from_numpy(np.stack(labels))

    def client(self, context: Context) -> Any:
        client = int(context.node_config["partition-id"])
        batch = self.inputs[client, :80], self.labels[client, :80]
        loss = nn.functional.cross_entropy
        return FPFCClient(context, nn.Linear(20, 10), [batch], loss, full_batch=True).to_client()

    def accuracy(self, strategy: FPFC, kind: str) -> float:
        right = []
        for client in range(20):
            model = strategy.model(kind, client)
            made = self.inputs[client, 80:] @ torch.from_numpy(model["weight"]).T
            found = (made + torch.from_numpy(model["bias"])).argmax(1)
            right.append((found == self.labels[client, 80:]).float().mean())
        return 100 * float(torch.stack(right).mean())


@pytest.mark.slow
@pytest.mark.parametrize("rho", [1.0, 0.4])
def test_what_the_search_found_is_there_at_the_end(
    rho: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As landed first: ARI 1 after the search, 0 after round 120; accuracy 69.8, then 58.3 %.
    monkeypatch.setattr(together, "FUSION_ROUNDS", 30)
    problem, found = Softmax(3), {}
    strategy = FPFC(fraction_train=0.5, fraction_evaluate=0.0, rho=rho)

    def look(server_round: int, metrics: Any) -> None:
        if not found and not strategy.state.source.is_searching:
            found["ari"] = adjusted_rand_score(problem.groups, strategy.clusters())
            found["accuracy"] = problem.accuracy(strategy, "cluster")

    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(0)
        first = ArrayRecord(nn.Linear(20, 10).state_dict())
    grid = InProcessGrid(client_app(problem.client, num_clients=20, cohort=True), 1)
    strategy.start(grid, first, 120, on_round=look)
    assert found["ari"] == 1.0
    assert adjusted_rand_score(problem.groups, strategy.clusters()) == 1.0
    # By the pairs themselves as well: members are together, groups apart.
    norms, same = strategy.state.pairs.theta_norms(), problem.groups[:, None] == problem.groups
    assert norms[same].max() < 1e-3 < norms[~same].min()
    for kind in ("personal", "cluster"):
        assert problem.accuracy(strategy, kind) > found["accuracy"]


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
    assert rho(after[0]) == (0.0 if late + 1 < PAIRS + 3 else 1.0)


# --- The headline ---------------------------------------------------------------------------------


# --- Resuming, engines, one reply at a time -------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("last", [JUDGE, JUDGE + 1, PAIRS - 1, PAIRS, PAIRS + 1])
def test_interrupted_in_any_stage_it_resumes_to_the_same_bits(last: int, tmp_path: Path) -> None:
    def start(strategy: FPFC, **options: Any) -> None:
        grid = Federation(app(state_dir=tmp_path / "clients"), NUM_CLIENTS)
        run(strategy, LAST, grid, checkpoint_dir=tmp_path / "saved", **options)

    def interrupt(server_round: int, metrics: Any) -> None:
        if server_round == last + 1:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        start(auto(), on_round=interrupt)
    resumed = auto()
    start(resumed, resume=True)
    assert_same_bits(resumed.state_dict(), whole()[0].state_dict())


@pytest.mark.slow
def test_where_replies_are_taken_in_as_they_come_groups_are_held_and_nobody_is_moved() -> None:
    settings = {"consensus_rounds": 1, "lr": 0.1, "local_epochs": 4, "fraction_evaluate": 0.0}
    strategy = AsyncFPFC(delay=1.0, **settings)
    seen: dict[int, Any] = {}
    grid = Federation(app(), NUM_CLIENTS)
    strategy.start(
        grid, arrays(), JUDGE + 30, on_round=lambda r, _: seen.setdefault(r, omega(strategy))
    )
    assert strategy.clusters().tolist() == GROUPS
    assert strategy.state.source.found.fused_from == JUDGE
    for server_round in range(JUDGE + 1, JUDGE + 31):
        moved = np.flatnonzero((seen[server_round] != seen[server_round - 1]).any(axis=1))
        assert set(moved) <= strategy.train_metrics[server_round].keys()
    assert strategy.state.pairs.theta_norms()[0, [2, 5]].max() < 1e-3


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
