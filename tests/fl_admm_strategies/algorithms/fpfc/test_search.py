"""FPFC without a lambda: the stages of the search, who is asked what, lost replies, resuming.

See docs/methods/fpfc.md, "Without a lambda".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, MessageType
from numpy.testing import assert_allclose, assert_array_equal
from torch import nn

from clients import FPFCClient, client_app
from clients.toolkit.data.batches import split_batch
from clients.toolkit.data.holdout import hold_out
from fl_admm_strategies import FPFC, InProcessGrid, LambdaPath, SmoothedSCAD
from fl_admm_strategies.algorithms.fpfc.finding import LONGER, VOTERS
from fl_admm_strategies.algorithms.fpfc.messages import FPFCMessage, FPFCRule, TrialInstruction
from fl_admm_strategies.maths.blocks import under
from fl_admm_strategies.runtime.messages.records import from_array_record, parse_groups
from tests.support.federation import (
    Federation,
    assert_same_bits,
)
from tests.support.pairs import num_stored, v_of
from tests.support.refusals import refused
from tests.support.slopes import SLOPES, Samples, app_of, arrays, client_of, model, samples

NUM_CLIENTS = 6
GROUPS = [0, 1, 0, 1, 1, 0]

# With one round of consensus: probe 2, refit 3 to 7, scores 8, the re-check 9 and 10, and from 11
# on FPFC's own.
CONSENSUS, PROBE, REFIT, SCORE, REPROBE, JUDGE, FUSION = 1, 2, 3, 8, 9, 10, 11
ROUNDS = 13


def data(client: int, count: int = 30) -> Samples:
    """Return samples; clients of equal `GROUPS` have the same regression."""
    inputs, outputs = samples(client, SLOPES[GROUPS[client % 6]], 30, 0.1)
    return inputs[:count], outputs[:count]


def app(**options: Any) -> Any:
    return app_of(data, **options)


def searching(context: Context, **options: Any) -> FPFCClient:
    return client_of(context, data(int(context.node_config["partition-id"])), **options)


def auto(**changes: Any) -> FPFC:
    settings = {"consensus_rounds": 1, "lr": 0.1, "local_epochs": 4, "fraction_train": 0.5}
    return FPFC(**settings | {"fraction_evaluate": 0.0, "seed": 1} | changes)


def run(strategy: FPFC, rounds: int = ROUNDS, grid: Any = None, **options: Any) -> Federation:
    grid = grid or Federation(app(), NUM_CLIENTS)
    strategy.start(grid, arrays(), rounds, **options)
    return grid


@cache
def plain() -> tuple[FPFC, Federation]:
    """Return a run with nothing in its way; only to read."""
    strategy = auto()
    return strategy, run(strategy)


def asked(grid: Federation, server_round: int) -> list[int]:
    return sorted(
        int(message.metadata.dst_node_id) - FIRST
        for message in grid.phase(MessageType.TRAIN, server_round)
    )


FIRST = min(InProcessGrid(app(), 1).get_node_ids())


def rho(message: Message) -> float:
    return FPFCRule.read(config(message)["rule"]).rho


def config(message: Message) -> Mapping[str, Any]:
    return dict(message.content["config"])


# --- The stages -----------------------------------------------------------------------------------


def slow(value: int) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


def test_the_groups_are_found_and_lambda_from_them() -> None:
    strategy, _ = plain()
    assert strategy.clusters().tolist() == [0, 1, 0, 1, 1, 0]
    found = strategy.diagnostics()
    search = found.search
    assert search.last_round == SCORE
    assert search.num_groups.tolist() == [1, 2, 3, 6]
    assert search.num_groups[search.chosen] == 2
    assert found.lam == search.smallest_distance / 3.7
    assert found.nu == 3.7 * found.lam / 2  # half of what was between the groups
    assert strategy.settings()["penalty"] == "auto"
    assert isinstance(strategy.penalty_in_use, SmoothedSCAD)


def test_the_log_says_how_far_the_search_is(caplog: pytest.LogCaptureFixture) -> None:
    run(auto(), SCORE)
    rounds = [m for m in caplog.messages if m.startswith("[ROUND")]
    for number, line in enumerate(rounds[:-1], start=1):
        assert line.endswith(f" (looking for groups, round {number} of about {SCORE})")
    assert "looking" not in rounds[-1]


def uploads(grid: Federation, server_round: int) -> dict[int, dict[str, Any]]:
    return {
        reply.metadata.src_node_id - FIRST: from_array_record(reply.content["arrays"])
        for reply in grid.replies(MessageType.TRAIN, server_round)
    }


@pytest.mark.slow
def test_the_models_by_hand() -> None:
    # Candidate 1 has the two groups. After the last refit its models are the plain means of what
    # the members uploaded; FPFC starts from them, with theta_ij = omega_i - omega_j and v_ij = 0.
    strategy, grid = auto(), Federation(app(), NUM_CLIENTS)
    run(strategy, SCORE, grid)
    last = uploads(grid, SCORE - 1)
    flat = {c: np.append(upload["1/weight"], upload["1/bias"]) for c, upload in last.items()}
    alpha = [
        np.mean([flat[c] for c in (0, 2, 5)], axis=0),
        np.mean([flat[c] for c in (1, 3, 4)], 0),
    ]
    pairs = strategy.state.pairs
    assert_allclose(pairs.omega, [alpha[g] for g in GROUPS], rtol=1e-6)
    assert num_stored(pairs) == 0
    assert_array_equal(v_of(pairs, 0, 1), np.zeros(4))
    b = np.linalg.norm(alpha[0] - alpha[1])
    assert strategy.penalty_in_use.lam == pytest.approx(b / 3.7)
    # The least lambda that holds them: gradients of the mean squared error over all samples.
    norms = []
    for client, group in enumerate(GROUPS):
        x, y = (part.numpy() for part in data(client))
        x = np.hstack([x, np.ones((len(x), 1))])
        norms.append(np.linalg.norm(2 * x.T @ (x @ alpha[group] - y[:, 0]) / len(x)))
    search = strategy.diagnostics().search
    assert search.lam_needed == pytest.approx(6 * max(norms) / 2, rel=1e-4)


def test_a_probe_is_plain_descent_on_the_samples_that_are_not_held_out() -> None:
    strategy, grid = plain()
    (message,) = [
        m for m in grid.phase(MessageType.TRAIN, PROBE) if m.metadata.dst_node_id == FIRST
    ]
    start = from_array_record(message.content["arrays"])
    seed = strategy.run.sampling.client_seeds([0], 0)[0]
    assert config(message)["held-out-seed"] == seed
    kept, _ = hold_out([data(0)], split_batch, 0.2, seed)
    ((x, y),) = kept
    assert len(x) == 24
    net = descent(x, y, start)
    upload = uploads(grid, PROBE)[0]
    assert_allclose(upload["0/weight"], net.weight.detach().numpy(), rtol=1e-5)


def flat(arrays: Mapping[str, Any]) -> Any:
    return np.append(arrays["weight"], arrays["bias"])


def sent(grid: Federation, server_round: int) -> dict[int, list[Any]]:
    """Return the models that every client was sent in a stage that asks everybody."""
    found = {}
    for message in grid.phase(MessageType.TRAIN, server_round):
        records = message.content.array_records.values()
        parameters = [array.numpy() for record in records for array in record.values()]
        instruction = FPFCMessage.decode(parameters, config(message))
        assert isinstance(instruction, TrialInstruction)
        more = instruction.more or {}
        blocks = [under(f"{k}/", more) for k in range(1, instruction.num_models)]
        found[message.metadata.dst_node_id - FIRST] = list(map(flat, [instruction.model, *blocks]))
    return found


def of_one_feature_each(client: int) -> Samples:
    """Return samples of one task, in which every client knows a part of it only."""
    inputs, outputs = samples(client, torch.zeros(3), 30, 0.02)
    inputs = inputs * torch.eye(3)[client % 3]
    return inputs, outputs + inputs @ SLOPES[0][:, None]


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "groups"), [(90, [0, 0, 0]), (SCORE + 30, [0, 1, 2])])
def test_where_alone_is_taken_the_best_other_grouping_has_more_time(
    rounds: int, groups: list[int]
) -> None:
    # Alone each has its own slope at once; the mean of all comes to the three slopes later. A run
    # that is about to end does not wait.
    strategy = auto(fraction_train=0.7, max_norm=1e6)
    grid = run(strategy, rounds, Federation(app_of(of_one_feature_each), 3))
    assert strategy.clusters().tolist() == groups
    search = strategy.diagnostics().search
    longer = range(SCORE + 1, search.last_round)
    assert len(longer) == (0 if groups[1] else LONGER)
    for server_round in longer:
        assert len(asked(grid, server_round)) == 2
        assert {len(models) for models in sent(grid, server_round).values()} == {2}


@pytest.mark.slow
def test_of_many_clients_a_few_choose_and_the_one_of_its_kind_is_among_them() -> None:
    # 43 of one regression and 1 of another; models are not refitted.
    count, odd = 44, 7
    slopes = {odd: SLOPES[1]}

    def data_of_many(client: int) -> Samples:
        return samples(client, slopes.get(client, SLOPES[0]), 30, 0.1)

    strategy = auto(fraction_train=0.2, consensus_rounds=3)
    grid = run(strategy, 5, Federation(app_of(data_of_many), count))
    assert [len(asked(grid, r)) for r in (1, 2, 3, 4, 5)] == [8, 8, 8, count, VOTERS]
    assert odd in asked(grid, 5)
    assert strategy.clusters().tolist() == [int(client == odd) for client in range(count)]
    search = strategy.diagnostics().search
    assert search.last_round == 5
    # A client that is new starts at the mean, without a pull; later ones are as ever.
    heard: set[int] = set()
    for server_round in (1, 2, 3):
        for message in grid.phase(MessageType.TRAIN, server_round):
            is_new = message.metadata.dst_node_id - FIRST not in heard
            assert parse_groups(config(message)).get("start") == ([] if is_new else None)
            assert rho(message) == (0.0 if is_new else 1.0)
        heard |= set(asked(grid, server_round))


@pytest.mark.slow
def test_one_group_and_everybody_alone(caplog: pytest.LogCaptureFixture) -> None:
    def grid(weights: Callable[[int], torch.Tensor]) -> Federation:
        def client(context: Context) -> Any:
            number = int(context.node_config["partition-id"])
            return client_of(context, samples(number + 6, weights(number), 30, 0.1)).to_client()

        return Federation(client_app(client), NUM_CLIENTS)

    together = auto(fraction_train=1.0)
    run(together, grid=grid(lambda client: SLOPES[0]))
    assert together.clusters().tolist() == [0] * 6
    search = together.diagnostics().search
    assert np.isnan(search.smallest_distance)
    assert together.penalty_in_use.lam == 2 * search.lam_needed > 0

    directions = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    alone = auto(fraction_train=1.0)
    run(alone, grid=grid(lambda client: 3 * directions[client]))
    assert alone.clusters().tolist() == list(range(6))


# --- Too short, too few, bad input ----------------------------------------------------------------


def descent(x: torch.Tensor, y: torch.Tensor, start: Mapping[str, Any]) -> nn.Module:
    """Return the model after the 20 steps of a probe."""
    net = model()
    net.load_state_dict({name: torch.tensor(array) for name, array in start.items()})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return net


def clients_with(counts: Mapping[int, int]) -> Federation:
    """Return a grid on which some clients have few samples."""
    return Federation(app_of(lambda c: data(c, counts.get(c, 30))), NUM_CLIENTS)


def test_clients_with_one_sample_each_are_refused() -> None:
    with refused(RuntimeError, "samples"):
        run(auto(), grid=clients_with(dict.fromkeys(range(NUM_CLIENTS), 1)))


def test_a_client_that_cannot_compute_its_loss_is_refused() -> None:
    class Own(FPFCClient):
        def minimise(self, objective: Any, *, lr: float, epochs: int) -> dict[str, float]:
            objective.penalty(self.model)
            return {"loss": 0.0}

    def client(context: Context) -> Any:
        return Own(context, model(), [data(0)]).to_client()

    with refused(RuntimeError, "loss_fn"):
        run(auto(), grid=Federation(client_app(client), NUM_CLIENTS))


# --- Lost replies ---------------------------------------------------------------------------------


def without(*clients: int) -> Callable[[list[Message]], list[Message]]:
    lost = {FIRST + client for client in clients}
    return lambda replies: [r for r in replies if r.metadata.src_node_id not in lost]


@pytest.mark.slow
@pytest.mark.parametrize(
    "server_round",
    [*map(slow, (CONSENSUS, REFIT + 3, SCORE, REPROBE, JUDGE, FUSION)), REFIT],
)
def test_a_lost_reply_of_another_stage_counts_as_none(server_round: int) -> None:
    grid = Federation(app(), NUM_CLIENTS)
    run(auto(), server_round, grid)
    victim = asked(grid, server_round)[0]
    strategy = auto()
    grid = Federation(app(), NUM_CLIENTS, spoil={server_round: without(victim)})
    run(strategy, grid=grid)
    assert strategy.clusters().tolist() == [0, 1, 0, 1, 1, 0]
    found, expected = strategy.diagnostics().search, plain()[0].diagnostics().search
    assert found.last_round == SCORE
    if server_round not in (REPROBE, JUDGE, FUSION):
        assert not np.array_equal(found.losses, expected.losses)


# --- Clients that come and go ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "when", [*map(slow, (PROBE, REFIT + 1, SCORE, REPROBE, JUDGE, FUSION)), REFIT]
)
def test_clients_join_and_leave_in_every_stage(when: int) -> None:
    # Client 7, of the first group, comes in a stage; 4 leaves then for good.
    partitions = (*range(NUM_CLIENTS), 6)
    nodes = [FIRST + place for place in range(7)]
    online = {0: nodes[:6], when: [node for node in nodes if node != nodes[4]]}
    grid = Federation(app(), partitions, online)
    strategy = auto(max_missed_rounds=2, fraction_train=1.0)
    strategy.start(grid, arrays(), 30)
    assert strategy.client_ids == [0, 1, 2, 3, 5, 6]
    assert strategy.clusters().tolist() == [0, 1, 0, 1, 0, 0]


# --- Resuming, engines, the other API -------------------------------------------------------------


@pytest.mark.parametrize(
    "last",
    [
        *map(slow, (CONSENSUS, PROBE, REFIT + 2)),
        REFIT,
        *map(slow, (SCORE - 1, SCORE, REPROBE, JUDGE, FUSION, FUSION + 1)),
    ],
)
def test_interrupted_in_any_stage_it_resumes_to_the_same_bits(last: int, tmp_path: Path) -> None:
    def start(strategy: FPFC, **options: Any) -> None:
        grid = Federation(app(state_dir=tmp_path / "clients"), NUM_CLIENTS)
        run(strategy, grid=grid, checkpoint_dir=tmp_path / "saved", **options)

    def interrupt(server_round: int, metrics: Any) -> None:
        if server_round == last + 1:  # trained, but not saved
            raise InterruptedError

    with pytest.raises(InterruptedError):
        start(auto(), on_round=interrupt)
    strategy = auto()
    start(strategy, resume=True)
    assert_same_bits(strategy.state_dict(), plain()[0].state_dict())
    found, expected = strategy.diagnostics().search, plain()[0].diagnostics().search
    assert_array_equal(found.losses, expected.losses)


def test_a_saved_search_of_another_run_is_refused() -> None:
    state = plain()[0].state_dict()
    for damaged in (
        {k: v for k, v in state.items() if not k.endswith("source/center")},
        state | {"state/source/groups/ids": np.zeros(2, np.uint64)},
    ):
        strategy = auto()
        strategy.load_state_dict(damaged)
        with refused(ValueError, "saved state"):
            run(strategy, ROUNDS + 1)
    for given in (SmoothedSCAD(0.5), LambdaPath([0.5])):
        strategy = auto(penalty=given)
        strategy.load_state_dict(state)
        with refused(ValueError):
            run(strategy, ROUNDS + 1)


@pytest.mark.slow
def test_clients_search_together_as_a_cohort() -> None:
    def factory(context: Context) -> Any:
        return searching(context).to_client()

    hosted = client_app(factory, num_clients=NUM_CLIENTS, cohort=True)
    strategy, expected = auto(), auto()
    strategy.start(InProcessGrid(hosted, 1), arrays(), ROUNDS)
    run(expected)
    assert strategy.clusters().tolist() == expected.clusters().tolist()
    assert_allclose(strategy.state.pairs.omega, expected.state.pairs.omega, rtol=1e-4, atol=1e-5)
