"""Well-formed ways to hurt a run: huge uploads, false reports, peers that claim too much."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
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

from clients import FedGiAClient, FedProxClient, client_app
from fl_admm_strategies import (
    FedGiA,
    FedProx,
    StatefulStrategy,
)
from simulations.attacks import Attack, attacked_client_fn
from tests.support.cases import (
    AT_ANY_PACE,
    CASES,
    NUM_CLIENTS,
    Case,
    case_of,
    grid_of,
    run,
)
from tests.support.federation import (
    Federation,
    Mean,
    assert_equal_to_rounding,
    client_fn_of,
    initial_arrays,
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


@pytest.mark.parametrize("case", fast(["FPFC"], AT_ANY_PACE))
def test_a_client_that_never_trains_leaves_and_the_others_go_on(case: Case, warned: Warned) -> None:
    num_rounds = 40 if case.is_async else 8
    strategy = run(case, grid_of(case, raises={LAST: range(1, num_rounds + 1)}), num_rounds)
    assert strategy.last_round == num_rounds
    assert strategy.client_ids == list(range(LAST))
    assert len(warned("never answered", f"[{LAST}]")) == 1


TWO = ArrayRecord({"w": Array(np.zeros(2))})


@pytest.mark.parametrize(("since", "alike", "last"), [(1, True, 0), (1, False, 2), (3, True, 6)])
def test_a_run_in_which_no_client_can_train_ends_with_the_reason(
    since: int, alike: bool, last: int
) -> None:
    class Failing(NumPyClient):
        """A client whose training fails from a round on; so does its evaluation, otherwise."""

        def __init__(self, number: object) -> None:
            self.number = number

        def fit(self, parameters: Any, config: Any) -> Any:
            if config["server-round"] >= since:
                raise OSError("no data here" + "!" * (0 if alike else int(str(self.number))))
            return parameters, 1, {}

        def evaluate(self, parameters: Any, config: Any) -> Any:
            raise ValueError(f"the model of {self.number} is empty")

    rounds: list[int] = []
    app = client_app(lambda context: Failing(context.node_config["partition-id"]).to_client())
    with refused(RuntimeError, "OSError", "no data here"):  # not that the evaluation failed, too
        Mean().start(Federation(app, 3), TWO, 6, on_round=lambda r, _: rounds.append(r))
    assert rounds == list(range(1, last + 1))


def test_a_run_in_which_no_client_can_be_evaluated_ends_in_its_first_round(warned: Warned) -> None:
    class Failing(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            return parameters, 1, {}

        def evaluate(self, parameters: Any, config: Any) -> Any:
            raise ValueError("the model is empty")

    app = client_app(lambda context: Failing().to_client())
    with refused(RuntimeError, "evaluated", "[0, 1, 2]", "the model is empty", "line"):
        Mean().start(Federation(app, 3), TWO, 6)
    assert len(warned("refused", "the model is empty")) == 1


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
