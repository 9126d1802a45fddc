"""One of m clients says or does not say what it likes: the others' run goes on as without it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from clients import FedADMMClient, client_app
from fl_admm_strategies import FedADMM, InProcessGrid
from fl_admm_strategies.runtime.saving.state import arrays_of
from tests.support.cases import AT_ANY_PACE, CASES, CHEAP, Case
from tests.support.federation import (
    Adding,
    KeyedGrid,
    Mean,
    assert_same_bits,
    client_fn_of,
    initial_arrays,
    make_client,
    raising_client_fn,
)
from tests.support.pace import fast
from tests.support.refusals import Warned

M, BAD = 6, 0  # how many clients there are, and which is bad

# --- Metrics --------------------------------------------------------------------------------------

LIES: dict[str, dict[str, Any]] = {
    "left-out": {},
    "nan": {"accuracy": math.nan},
    "infinite": {"accuracy": math.inf},
    "perfect": {"accuracy": 1.0, "num-examples": 2**53},
    "huge": {"accuracy": 1e300, "num-examples": 2**53},
    "many": {"accuracy": 0.5, **{f"{k:0>100}": 0.1234567890123456 * k for k in range(3000)}},
    "unprintable": {"accuracy": 0.5, **{"\N{SNOWMAN}" * 100 + str(k): 1.0 for k in range(290)}},
}


class Reporting(Adding):
    """Has an accuracy between .3 and .5; the bad one says something else."""

    lie: Mapping[str, Any] = {}

    def fit(self, parameters: Any, config: Any) -> Any:
        arrays, num_examples, metrics = super().fit(parameters, config)
        said = dict(self.lie) if self.client == BAD else {"accuracy": 0.3 + 0.04 * self.client}
        return arrays, said.pop("num-examples", num_examples), metrics | said

    def evaluate(self, parameters: Any, config: Any) -> Any:
        loss, num_examples, _ = super().evaluate(parameters, config)
        said = dict(self.lie) if self.client == BAD else {"accuracy": 0.3 + 0.04 * self.client}
        return loss, said.pop("num-examples", num_examples), said


def reporting(lie: Mapping[str, Any], m: int = M) -> InProcessGrid:
    class Lying(Reporting):
        pass

    Lying.lie = lie
    return InProcessGrid(client_app(lambda context: Lying(context).to_client()), m)


@pytest.mark.parametrize("m", fast([3], [3, M]))
@pytest.mark.parametrize("lie", [*LIES])
def test_no_clients_metrics_end_a_run_or_hide_the_others(lie: str, m: int) -> None:
    strategy, seen = Mean(), {}

    def stop(server_round: int, metrics: Mapping[str, float]) -> bool:
        seen[server_round] = dict(metrics)
        return metrics["accuracy"] > 0.99 or metrics["train-accuracy"] > 0.99

    strategy.start(reporting(LIES[lie], m), CHEAP.initial_arrays(), 3, stop=stop)
    assert strategy.last_round == 3
    for metrics in seen.values():
        for name in ("accuracy", "train-accuracy"):
            assert 0.3 <= metrics[name] <= 0.3 + 0.04 * m, name
    means = strategy.run.record.measured(3)
    assert means.get("accuracy-clients") == (
        m - 1 if lie in ("left-out", "nan", "infinite") else None
    )


def test_a_resumed_run_decides_as_the_one_before(tmp_path: Path) -> None:
    def stop(server_round: int, metrics: Mapping[str, float]) -> bool:
        seen.append((server_round, dict(metrics)))
        return False

    seen: list[tuple[int, dict[str, float]]] = []
    grid, first = reporting(LIES["huge"]), CHEAP.initial_arrays()
    Mean().start(grid, first, 2, stop=stop, checkpoint_dir=tmp_path)
    before, seen = seen, []
    Mean().start(grid, first, 2, stop=stop, checkpoint_dir=tmp_path, resume=True)
    assert seen == before


@pytest.mark.parametrize("lie", ["many", "unprintable"])
def test_the_history_of_a_round_has_a_bound(lie: str, tmp_path: Path) -> None:
    Mean().start(reporting(LIES[lie]), CHEAP.initial_arrays(), 1, checkpoint_dir=tmp_path)
    assert (tmp_path / "history.jsonl").stat().st_size < 100_000


# --- The handshake --------------------------------------------------------------------------------

SHAKING = [case for case in CASES if case.shakes_hands]


def never(case: Case) -> Any:
    """Return the app of clients of which the last raises whatever it is asked before round 1."""
    return client_app(raising_client_fn(case.client_class, {M - 1: [0]}))


def cases(*but: str) -> Any:
    return pytest.mark.parametrize(
        "case",
        [case for case in SHAKING if case.name not in but],
        ids=lambda case: case.name,
    )


# Who joins FedMC-ADMM has Y_i = 0 and is not asked, so that it does in round 1.
@cases("FedMC-ADMM-client-duals")
def test_a_run_begins_as_if_who_shakes_no_hands_were_not_there(case: Case, warned: Warned) -> None:
    strategy, expected = case.strategy(seed=1), case.strategy(seed=1)
    strategy.start(InProcessGrid(never(case), M), case.initial_arrays(), 2)
    configs = [{"partition-id": client, "num-partitions": M - 1} for client in range(M - 1)]
    others = InProcessGrid(never(case), M - 1, node_configs=configs)
    expected.start(others, case.initial_arrays(), 2)
    assert strategy.client_ids == expected.client_ids == list(range(M - 1))
    assert len(warned("begins without", f"[{M - 1}]")) == 1
    assert_same_bits(arrays_of(strategy.state), arrays_of(expected.state))
    assert strategy.train_metrics == expected.train_metrics
    assert strategy.evaluate_metrics == expected.evaluate_metrics


@cases()
def test_who_shakes_hands_late_joins(case: Case) -> None:
    tries: list[int] = []

    def client_fn(context: Context) -> Any:
        client = make_client(case.client_class, context)
        if context.node_config["partition-id"] == M - 1:
            tries.append(1)
            if len(tries) < 4:
                raise OSError("not yet")
        return client.to_client()

    strategy = case.strategy(seed=1, fraction_evaluate=0.0)
    strategy.start(InProcessGrid(client_app(client_fn), M), case.initial_arrays(), 4)
    assert strategy.client_ids == list(range(M))
    assert strategy.membership.num_initial == M - 1


# --- Training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", fast(["FPFC"], AT_ANY_PACE))
def test_who_never_trains_leaves_and_the_others_go_on(case: Case, warned: Warned) -> None:
    num_rounds = 40 if case.name == "AsyncFPFC" else 8
    app = client_app(raising_client_fn(case.client_class, {M - 1: range(1, num_rounds + 1)}))
    strategy = case.strategy(seed=1)
    strategy.start(InProcessGrid(app, M), case.initial_arrays(), num_rounds)
    assert strategy.last_round == num_rounds
    assert strategy.client_ids == list(range(M - 1))
    assert len(warned("never answered", f"[{M - 1}]")) == 1
    last = max(strategy.train_metrics)
    assert M - 1 not in strategy.train_metrics[last]


# --- Clients that there are not -------------------------------------------------------------------


class Phantoms(KeyedGrid):
    """Sites of one client each, and the last, which says that it has many and is none of them."""

    def __init__(self, app: Any, num_sites: int) -> None:
        nodes = list(range(2, 2 + num_sites))
        super().__init__(app, tuple(range(num_sites)), {0: nodes})


def with_phantoms(count: int) -> Any:
    """Return FedADMM's clients, of which client 3 says that it is `count` and never trains."""
    honest = client_app(client_fn_of(FedADMMClient))
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        own = int(context.node_config["partition-id"])
        ids = [own] if own < 3 else list(range(3, 3 + count))
        config = ConfigRecord({"client-ids": ids, "num-clients": 0})
        return Message(RecordDict({"config": config}), reply_to=message)

    def act(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 3:
            raise OSError("nobody is here")
        reply: Message = honest(message, context)
        return reply

    app.train()(act)
    app.evaluate()(act)
    return app


def moved(strategy: FedADMM) -> float:
    first, model = initial_arrays(), strategy.global_arrays
    changes = [model[name].numpy() - first[name].numpy() for name in first]
    return float(np.sqrt(sum(np.sum(change**2) for change in changes)))


@pytest.mark.slow
@pytest.mark.parametrize("most", [None, 300])
def test_clients_that_never_answer_have_no_weight_in_the_end(
    most: int | None, warned: Warned
) -> None:
    settings: dict[str, Any] = {"published": True, "rho": 0.1, "lr": 0.5, "fraction_evaluate": 0}
    strategy = FedADMM(**settings, max_clients_per_node=most, node_timeout=0.3, seed=1)
    strategy.start(Phantoms(with_phantoms(300), 4), initial_arrays(), 12)
    alone = FedADMM(**settings, node_timeout=0.3, seed=1)
    alone.start(Phantoms(with_phantoms(300), 3), initial_arrays(), 12)
    assert strategy.client_ids == [0, 1, 2]
    # By default the node is left out; else its clients leave after five rounds.
    assert moved(strategy) > (0.99 if most is None else 0.6) * moved(alone)
    assert warned("node 5" if most is None else "never answered")


@pytest.mark.slow
def test_a_resumed_run_knows_who_never_answered(tmp_path: Path) -> None:
    def start(grid: Phantoms, num_rounds: int, **options: Any) -> FedADMM:
        strategy = FedADMM(
            rho=0.1, lr=0.5, fraction_train=0.5, max_clients_per_node=9, node_timeout=0.3, seed=1
        )
        strategy.start(grid, initial_arrays(), num_rounds, **options)
        return strategy

    whole, grid = start(Phantoms(with_phantoms(9), 4), 24), Phantoms(with_phantoms(9), 4)
    for last in (6, 14, 24):
        parts = start(grid, last, checkpoint_dir=tmp_path, resume=True)
    assert whole.membership.waiting
    assert len(whole.client_ids) < 3 + 9  # some have left
    assert_same_bits(parts.state_dict(), whole.state_dict())
