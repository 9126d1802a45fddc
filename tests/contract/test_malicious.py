"""Well-formed ways to hurt a run: huge uploads, false reports, peers that claim too much."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from torch import nn

from clients import FedADMMClient, FedGiAClient, FedProxClient, FLAMEClient, client_app
from fl_admm_strategies import (
    FLAME,
    FedADMM,
    FedGiA,
    FedProx,
    StatefulStrategy,
)
from simulations.attacks import Attack, attacked_client_fn
from tests.support.cases import (
    AT_ANY_PACE,
    CASES,
    CHEAP,
    NUM_CLIENTS,
    Case,
    case_of,
    grid_of,
    plain,
    run,
    sampling,
)
from tests.support.federation import (
    Adding,
    Federation,
    Mean,
    assert_equal_to_rounding,
    assert_same_runs,
    client_fn_of,
    initial_arrays,
    make_client,
    method_state,
)
from tests.support.pace import fast
from tests.support.refusals import Warned, refused

HUGE = Attack("one-huge", 0.17, seed=3)
(LIAR,) = HUGE.malicious(NUM_CLIENTS)
OTHERS = {*range(NUM_CLIENTS)} - {LIAR}

# --- Huge uploads ---------------------------------------------------------------------------------


def attacked(case: Case, **settings: Any) -> StatefulStrategy:
    strategy = case.strategy(seed=1, fraction_evaluate=0, **settings)
    fn = attacked_client_fn(client_fn_of(case.client_class), HUGE)
    return run(case, Federation(client_app(fn), NUM_CLIENTS), 3, strategy)


# Not the papers' forms, and not FPFC, whose penalty bounds what one client does.
@pytest.mark.parametrize("name", fast(["FedMC-ADMM"], ["FedMC-ADMM", "FedAvg", "Ditto", "FLAME"]))
def test_a_huge_upload_is_refused_by_default(name: str, warned: Warned) -> None:
    assert attacked(case_of(name)).train_metrics[3].keys() == OTHERS
    assert warned(f"client {LIAR}", "bound")


# Clients that send changes of what they keep cannot be clipped: theirs are refused.
CLIPPED = {"FPFC": True, "FedAvg": True, "FedADMM-published": True, "FedADMM-client-duals": False}


@pytest.mark.parametrize("name", fast(["FPFC"], CLIPPED))
def test_nothing_is_left_of_a_huge_number(name: str, warned: Warned) -> None:
    strategy = attacked(case_of(name), max_norm="auto")
    largest = [np.abs(np.nan_to_num(a)).max() for a in method_state(strategy).values() if a.size]
    assert max(largest) < 1e4
    assert (LIAR in strategy.train_metrics[1]) == CLIPPED[name]
    assert bool(warned(f"client {LIAR}")) != CLIPPED[name]


@pytest.mark.parametrize("name", fast(["FPFC"], ["FPFC", "FedADMM", "FLAME", "Ditto"]))
def test_a_bound_that_no_client_exceeds_changes_nothing(name: str) -> None:
    case = case_of(name)
    strategy = run(case, grid_of(case), strategy=sampling(case, max_norm=1e20))
    assert_equal_to_rounding(strategy, plain(case)[0])


@pytest.mark.parametrize("name", fast(["FPFC"], ["FPFC", "FedADMM", "FLAME"]))
def test_a_clipped_client_goes_on_from_what_was_taken_of_its_upload(name: str) -> None:
    """It keeps what it uploaded, which is not what the server has."""
    case, runs = case_of(name), []
    for forgets in (False, True):
        grid = grid_of(case, 3)
        strategy = case.strategy(seed=1, max_norm=1e-3)

        def on_round(*_: Any, grid: Federation = grid, forgets: bool = forgets) -> None:
            for client in range(3) if forgets else ():
                grid.forget(client)

        strategy.start(grid, case.initial_arrays(), 3, on_round=on_round)
        runs.append(strategy)
    assert_equal_to_rounding(*runs)


def test_the_running_median_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    def mean_run(num_rounds: int, **options: Any) -> Mean:
        strategy = Mean(seed=1, fraction_train=0.5, max_norm="auto")
        fn = attacked_client_fn(client_fn_of(Adding), Attack("gaussian", 0.34, seed=3))
        grid = Federation(client_app(fn), NUM_CLIENTS)
        strategy.start(grid, CHEAP.initial_arrays(), num_rounds, **options)
        return strategy

    mean_run(3, checkpoint_dir=tmp_path)
    assert_same_runs(mean_run(6, checkpoint_dir=tmp_path, resume=True), mean_run(6))


class One(nn.Module):
    """A model of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.w.expand(len(inputs))


def quadratic_client(client_class: Callable[..., NumPyClient]) -> Callable[[Context], Any]:
    """Return clients of f_i(w) = (w - c_i)^2 / 2 with c_i = 1 and, for the last of them, 9."""

    def client_fn(context: Context) -> Any:
        target = 9.0 if context.node_config["partition-id"] == 4 else 1.0
        data = [(torch.zeros(1, 1), torch.full((1,), target))]
        loss = lambda out, target: ((out - target) ** 2).mean() / 2  # noqa: E731
        return client_class(context, One(), data, loss, full_batch=True).to_client()

    return client_fn


ADMM: dict[str, tuple[Callable[..., StatefulStrategy], Any]] = {
    "FedADMM": (lambda **base: FedADMM(rho=0.5, lr=0.4, **base), FedADMMClient),
    "FedADMM-published": (
        lambda **base: FedADMM(rho=0.5, lr=0.4, published=True, **base),
        FedADMMClient,
    ),
    "FLAME": (lambda **base: FLAME(lam=1.0, rho=0.2, lr=0.3, **base), FLAMEClient),
}


@pytest.mark.parametrize("name", fast(["FedADMM"], ADMM))
def test_the_model_is_that_of_the_members_once_a_client_has_left(name: str) -> None:
    """The minimiser is 1; with a dual of the client that left in its sum, w would keep part of it.

    Its upload of round 2 is 1e3, so that a sum that is not added up anew would keep a rounding.
    """
    make, client_class = ADMM[name]

    def huge(replies: list[Message]) -> list[Message]:
        replies[-1].content["arrays"] = ArrayRecord({"w": Array(np.full(1, 1e3, np.float32))})
        return replies

    app = client_app(quadratic_client(client_class))
    grid = Federation(app, range(5), {0: [2, 3, 4, 5, 6], 3: [2, 3, 4, 5]}, spoil={2: huge})
    base = {"seed": 1, "fraction_evaluate": 0, "max_norm": math.inf, "max_missed_rounds": 1}
    strategy = make(local_epochs=5, **base)
    strategy.start(grid, ArrayRecord(One().state_dict()), 50)
    assert strategy.client_ids == [0, 1, 2, 3]
    assert strategy.global_arrays["w"].numpy()[0] == pytest.approx(1, abs=1e-2)


# --- False reports --------------------------------------------------------------------------------


def test_a_client_counts_for_at_most_ten_times_the_median(warned: Warned) -> None:
    class Boasting(FedProxClient):
        def train_size(self) -> int:
            boasts = self.context.node_config["partition-id"] == 0
            return 2**50 if boasts else 10

        def train(self, asked: Any, config: Any) -> Any:
            client = float(self.context.node_config["partition-id"])
            return {n: np.full_like(a, client) for n, a in asked.model.items()}, {"loss": client}

    strategy = FedProx(seed=1, fraction_evaluate=0)
    strategy.start(Federation(client_app(client_fn_of(Boasting)), 3), initial_arrays(), 1)
    assert strategy.train_metrics[1][0]["num-examples"] == 2**50  # what it said
    # Ten times the median, 10: (0 * 100 + 1 * 10 + 2 * 10)/120.
    bias = strategy.global_arrays["head.bias"].numpy()[0]
    assert bias == pytest.approx(0.25, abs=1e-6)
    assert len(warned("[0]", "examples")) == 1


LIES: dict[str, dict[str, Any]] = {
    "left-out": {},
    "nan": {"accuracy": math.nan},
    "infinite": {"accuracy": math.inf},
    "perfect": {"accuracy": 1.0, "num-examples": 2**53},
    "huge": {"accuracy": 1e300, "num-examples": 2**53},
    "many": {"accuracy": 0.5, **{f"{k:0>100}": 0.1234567890123456 * k for k in range(3000)}},
}


@pytest.mark.parametrize("lie", LIES)
def test_no_clients_metrics_end_a_run_or_hide_the_others(lie: str, tmp_path: Path) -> None:
    class Reporting(Adding):
        """Has an accuracy between .3 and .5; client 0 says something else."""

        def said(self) -> dict[str, Any]:
            return dict(LIES[lie]) if self.client == 0 else {"accuracy": 0.3 + 0.04 * self.client}

        def fit(self, parameters: Any, config: Any) -> Any:
            arrays, num_examples, metrics = super().fit(parameters, config)
            said = self.said()
            return arrays, said.pop("num-examples", num_examples), metrics | said

        def evaluate(self, parameters: Any, config: Any) -> Any:
            loss, num_examples, _ = super().evaluate(parameters, config)
            said = self.said()
            return loss, said.pop("num-examples", num_examples), said

    seen: list[Mapping[str, float]] = []

    def stop(server_round: int, metrics: Mapping[str, float]) -> bool:
        seen.append(metrics)
        return metrics["accuracy"] > 0.99 or metrics["train-accuracy"] > 0.99

    strategy = Mean()
    app = client_app(lambda context: Reporting(context).to_client())
    options: Any = {"stop": stop, "checkpoint_dir": tmp_path}
    strategy.start(Federation(app, 3), CHEAP.initial_arrays(), 3, **options)
    assert strategy.last_round == len(seen) == 3
    for metrics in seen:
        assert all(0.3 <= metrics[name] <= 0.42 for name in ("accuracy", "train-accuracy"))
    assert (tmp_path / "history.jsonl").stat().st_size < 100_000


@pytest.mark.parametrize("curvature", [0.0, math.nan, 1e308])
def test_a_client_that_joins_with_an_impossible_curvature_is_refused(
    curvature: float, warned: Warned
) -> None:
    class Odd(FedGiAClient):
        def measure_curvature(self, model: Any, config: Any) -> Any:
            client = int(self.context.node_config["partition-id"])
            return curvature if client == 3 else 1.0

    app = client_app(client_fn_of(Odd))
    grid = Federation(app, range(4), {0: [2, 3, 4], 2: [2, 3, 4, 5]})
    strategy = FedGiA(t=0.5, seed=1, fraction_evaluate=0)
    strategy.start(grid, initial_arrays(), 3)
    assert strategy.client_ids == [0, 1, 2]
    assert warned("client 3", "curvature")


# --- Clients that never answer --------------------------------------------------------------------

SHAKING = [case for case in CASES if case.shakes_hands]
LAST = NUM_CLIENTS - 1


@pytest.mark.parametrize("case", SHAKING, ids=lambda case: case.name)
def test_a_run_begins_without_a_client_that_is_silent_before_it(case: Case, warned: Warned) -> None:
    strategy, expected = case.strategy(seed=1), case.strategy(seed=1)
    run(case, grid_of(case, raises={LAST: [0]}), 2, strategy)
    configs = [{"partition-id": client, "num-partitions": LAST} for client in range(LAST)]
    run(case, grid_of(case, LAST, node_configs=configs), 2, expected)
    assert strategy.client_ids == list(range(LAST))
    assert len(warned("begins without", f"[{LAST}]")) == 1
    assert_equal_to_rounding(strategy, expected)


@pytest.mark.parametrize("case", SHAKING, ids=lambda case: case.name)
def test_a_client_that_answers_late_joins(case: Case) -> None:
    tries: list[int] = []

    def client_fn(context: Context) -> Any:
        client = make_client(case.client_class, context)
        if context.node_config["partition-id"] == LAST:
            tries.append(1)
            if len(tries) < 4:
                raise OSError("not yet")
        return client.to_client()

    strategy = case.strategy(seed=1, fraction_evaluate=0.0)
    strategy.start(Federation(client_app(client_fn), NUM_CLIENTS), case.initial_arrays(), 4)
    assert strategy.client_ids == list(range(NUM_CLIENTS))


@pytest.mark.parametrize("case", fast(["FPFC"], AT_ANY_PACE))
def test_a_client_that_never_trains_leaves_and_the_others_go_on(case: Case, warned: Warned) -> None:
    num_rounds = 40 if case.is_async else 8
    strategy = run(case, grid_of(case, raises={LAST: range(1, num_rounds + 1)}), num_rounds)
    assert strategy.last_round == num_rounds
    assert strategy.client_ids == list(range(LAST))
    assert len(warned("never answered", f"[{LAST}]")) == 1


TWO = ArrayRecord({"w": Array(np.zeros(2))})


@pytest.mark.parametrize(("since", "last"), [(1, 2), (3, 6)], ids=["at once", "no success"])
def test_a_run_in_which_no_client_can_train_ends_with_the_reason(since: int, last: int) -> None:
    class Failing(NumPyClient):
        """A client whose training fails from a round on; so does its evaluation, otherwise."""

        def fit(self, parameters: Any, config: Any) -> Any:
            if config["server-round"] >= since:
                raise OSError("no data here")
            return parameters, 1, {}

        def evaluate(self, parameters: Any, config: Any) -> Any:
            raise ValueError("the model is empty")

    rounds: list[int] = []
    grid = Federation(client_app(lambda context: Failing().to_client()), 3)
    with refused(RuntimeError, "OSError", "no data here"):  # not that the evaluation failed, too
        Mean().start(grid, TWO, 6, on_round=lambda r, _: rounds.append(r))
    assert rounds == list(range(1, last + 1))


# --- One peer must not end the server -------------------------------------------------------------


def claims(words: Sequence[Any]) -> ClientApp:
    """Return an app whose node p says ``words[p]`` when it is asked for its clients."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        word = words[int(context.node_config["number"])]
        if isinstance(word, str):
            raise RuntimeError(word)
        ids, total = word
        record = ConfigRecord({"client-ids": ids, "num-clients": total})
        return Message(RecordDict({"config": record}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        content = RecordDict()
        for key in [key for key in message.content if key.startswith("arrays")]:
            content[key] = message.content[key]
            content[key.replace("arrays", "metrics")] = MetricRecord({"num-examples": 1})
        return Message(content, reply_to=message)

    return app


def mean_run(words: Sequence[Any], online: Mapping[int, Sequence[int]], **base: Any) -> Any:
    configs = [{"number": number} for number in range(len(words))]
    grid = Federation(claims(words), len(words), online, node_configs=configs)
    strategy = Mean(seed=1, fraction_evaluate=0, node_timeout=5, **base)
    strategy.start(grid, TWO, 3)
    return strategy


HONEST: list[Any] = [([0], 3), ([1], 3), ([2], 3)]
NODES = [2, 3, 4]


@pytest.mark.parametrize(
    ("word", "base", "named"),
    [
        (([1], 3), {}, "3"),
        (([7], 2**62), {}, str(2**62)),
        ((list(range(10, 5010)), 3), {"max_clients_per_node": 100}, "5000"),
        (([-1], 3), {}, "-1"),
        ("ray.exceptions.OutOfMemoryError: really", {}, "OutOfMemoryError"),
    ],
    ids=["another's id", "absurd size", "too many", "no id", "an engine's words"],
)
@pytest.mark.parametrize("when", ["before round 1", "joining"])
def test_a_node_whose_word_cannot_be_right_is_left_out_by_name(
    when: str, word: Any, base: dict[str, Any], named: str, warned: Warned
) -> None:
    online = {0: [*NODES, 5]} if when == "before round 1" else {0: NODES, 2: [*NODES, 5]}
    strategy = mean_run([*HONEST, word], online, **base)
    assert strategy.client_ids == [0, 1, 2]
    assert sorted(strategy.train_metrics[3]) == [0, 1, 2]
    assert warned("node 5", named)


def test_the_federation_is_as_large_as_most_nodes_say() -> None:
    assert mean_run([*HONEST, ([3], 1000)], {0: [*NODES, 5]}).client_ids == [0, 1, 2, 3]
