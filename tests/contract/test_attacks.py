"""Well-formed ways to hurt a run: huge but finite uploads, peers that claim too much."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from torch import nn

from clients import FedADMMClient, FedGiAClient, FLAMEClient, LpProjADMMClient, client_app
from fl_admm_strategies import (
    FLAME,
    FedADMM,
    FedGiA,
    InProcessGrid,
    LpProjADMM,
    StatefulStrategy,
)
from fl_admm_strategies.algorithms import fedadmm, flame
from fl_admm_strategies.runtime.trust.intake import LARGEST
from tests.support.cases import CASES, CHEAP, Case, grid_of
from tests.support.federation import (
    Federation,
    KeyedGrid,
    Mean,
    RestlessGrid,
    Spoil,
    assert_same_bits,
    client_fn_of,
    initial_arrays,
    node_of,
    not_asking,
    trained,
)
from tests.support.pace import fast
from tests.support.refusals import Warned, refused

VICTIM = 3


def upload(value: float, client: int = VICTIM) -> Spoil:
    """Return what fills the floating point arrays of a client's replies with a number."""

    def spoil(replies: list[Message]) -> list[Message]:
        for reply in replies:
            if reply.metadata.src_node_id == node_of(client):
                arrays = {n: a.numpy().copy() for n, a in reply.content["arrays"].items()}
                for array in arrays.values():
                    if array.dtype.kind == "f":
                        array[...] = value
                reply.content["arrays"] = ArrayRecord({n: Array(a) for n, a in arrays.items()})
        return replies

    return spoil


# --- Finite uploads that are too large ------------------------------------------------------------


@pytest.mark.parametrize(
    "case", fast(["FPFC", "FedMC-ADMM"], [case for case in CASES if case.server_learns])
)
def test_an_upload_too_large_for_any_sum_is_refused_by_name(case: Case, warned: Warned) -> None:
    strategy = case.strategy(seed=1, fraction_evaluate=0)
    attacked = 1 if case.name == "FedEASE" else 2  # a client of FedEASE uploads once
    grid = grid_of(case)
    grid.spoil = {attacked: upload(1.01 * LARGEST)}
    strategy.start(grid, case.initial_arrays(), 2)
    assert len(warned()) == len(warned(f"round {attacked}", f"client {VICTIM}")) == 1
    expected = case.strategy(seed=1, fraction_evaluate=0)
    not_asking(expected, {attacked: [VICTIM]})
    expected.start(grid_of(case), case.initial_arrays(), 2)
    assert_same_bits(strategy.state_dict(), expected.state_dict())


# --- What left must be gone -----------------------------------------------------------------------


class One(nn.Module):
    """A model of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.w.expand(len(inputs))


def quadratic_client(client_class: Callable[..., NumPyClient]) -> Callable[[Context], Any]:
    """Return clients of f_i(w) = (w - 1)^2 / 2, whose common minimiser is 1."""
    data = [(torch.zeros(1, 1), torch.ones(1))]

    def client_fn(context: Context) -> Any:
        loss = lambda out, target: ((out - target) ** 2).mean() / 2  # noqa: E731
        return client_class(context, One(), data, loss, full_batch=True).to_client()

    return client_fn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "client_class"),
    [
        (lambda **base: FLAME(lam=1.0, rho=0.2, lr=0.3, local_epochs=5, **base), FLAMEClient),
        (
            lambda **base: LpProjADMM(
                lam=1.0, rho=0.2, lr=0.3, local_epochs=5, dimension=1, **base
            ),
            LpProjADMMClient,
        ),
        (lambda **base: FedADMM(rho=0.5, lr=0.4, local_epochs=5, **base), FedADMMClient),
    ],
    ids=["FLAME", "LpProjADMM", "FedADMM"],
)
def test_nothing_is_left_of_a_large_upload_once_its_sender_has_left(
    make: Callable[..., StatefulStrategy],
    client_class: Callable[..., NumPyClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Grid(RestlessGrid):
        def send_and_receive(self, messages: Any, **options: Any) -> Any:
            replies = super().send_and_receive(messages, **options)
            return upload(1e8)(replies) if self.server_round == 2 else replies

    everybody = [node_of(client) for client in range(5)]
    rest = [node for node in everybody if node != node_of(VICTIM)]
    app = client_app(quadratic_client(client_class))
    grid = Grid(app, range(5), {0: everybody, 3: rest})
    strategy = make(seed=1, fraction_evaluate=0, max_norm=math.inf, max_missed_rounds=1)
    # Changes are float32, so a sum is right again after the next time it is rebuilt.
    for method in (fedadmm, flame):
        monkeypatch.setattr(method, "REBUILD_EVERY", 100)
    strategy.start(grid, ArrayRecord(One().state_dict()), 160)
    w = strategy.state.consensus.w
    if isinstance(strategy, LpProjADMM):  # P is one row of length 1: its only entry is 1 or -1
        w = np.abs(w)
    # Before, 0.9 and 0.1 stayed for ever of FLAME and Lp-Proj: what the float32 changes had rounded
    # away beside 1e8. The rows themselves forget it at a linear rate.
    assert abs(float(w[0]) - 1) < 1e-3


def test_sums_are_added_up_anew_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedadmm, "REBUILD_EVERY", 3)
    strategy = FedADMM(published=True, rho=0.2, lr=1.0, seed=1, fraction_evaluate=0)

    def disturb(server_round: int, _: Mapping[str, float]) -> None:
        if server_round == 1:
            strategy.state.consensus.mean.total += 1.0  # what rounding would do in a long run

    app = client_app(quadratic_client(FedADMMClient))
    with InProcessGrid(app, 3) as grid:
        strategy.start(grid, ArrayRecord(One().state_dict()), 4, on_round=disturb)
    own = strategy.state.consensus
    z = own.clients.column("u") + own.clients.column("pi") / np.float32(0.2)
    np.testing.assert_allclose(own.mean.total, z.sum(axis=0, dtype=np.float64), rtol=1e-6)


# --- Runs that get nowhere ------------------------------------------------------------------------


TWO = ArrayRecord({"w": Array(np.zeros(2))})


class Failing(NumPyClient):
    """A client whose training fails from a round on; so does its evaluation, for another reason."""

    def __init__(self, since: int) -> None:
        self.since = since

    def fit(self, parameters: Any, config: Any) -> Any:
        if config["server-round"] >= self.since:
            raise OSError("no data here")
        return parameters, 1, {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        raise ValueError("the model is empty")


def failing_run(since: int, num_rounds: int, **base: Any) -> list[int]:
    """Return the rounds of a run that fails for the reason of its training."""
    strategy, rounds = Mean(seed=1, **base), list[int]()
    with (
        InProcessGrid(client_app(lambda context: Failing(since).to_client()), 3) as grid,
        refused(RuntimeError, "OSError", "no data here"),  # not that the evaluation failed, too
    ):
        strategy.start(grid, TWO, num_rounds, on_round=lambda r, _: rounds.append(r))
    return rounds


def test_a_run_in_which_nobody_can_train_ends_after_a_few_rounds_with_the_reason() -> None:
    assert failing_run(since=1, num_rounds=50) == [1, 2]  # the third ends it


def test_a_run_whose_last_rounds_were_all_refused_is_no_success() -> None:
    assert failing_run(since=3, num_rounds=6) == [1, 2, 3, 4, 5, 6]


# --- One peer must not end the server -------------------------------------------------------------


def claims(words: Sequence[Any]) -> ClientApp:
    """Return an app whose node p says ``words[p]`` when it is asked who it is."""
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
        keys = [key for key in message.content if key.startswith("arrays")]
        content = RecordDict()
        for key in keys:
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


def test_the_federation_is_as_large_as_most_nodes_say(warned: Warned) -> None:
    strategy = mean_run([*HONEST, ([3], 1000)], {0: [*NODES, 5]})
    assert strategy.client_ids == [0, 1, 2, 3]
    assert strategy.membership.announced == 3
    assert warned("node 5", 1000)


@pytest.mark.parametrize(
    "words",
    [
        "No query function registered",
        "Invalid message type: query",
        "<class 'ray.exceptions.OutOfMemoryError'>",
    ],
)
def test_one_node_does_not_speak_for_the_app_of_all(words: str) -> None:
    class Grid(InProcessGrid):
        def pull_messages(self, message_ids: Any) -> list[Message]:
            replies = list(super().pull_messages(message_ids))
            return [
                Message(Error(2, words), reply_to=self.queried[r.metadata.reply_to_message_id])
                if r.metadata.src_node_id == 2  # the one that is asked first
                else r
                for r in replies
            ]

        def push_messages(self, messages: Any) -> Any:
            messages = list(messages)
            ids = list(super().push_messages(messages))
            self.queried = dict(zip(ids, messages, strict=True))
            return ids

    strategy = Mean(seed=1, fraction_evaluate=0, node_timeout=5)
    words_of_all = [([9], 2), ([0], 2), ([1], 2)]
    grid = Grid(claims(words_of_all), 3, node_configs=[{"number": n} for n in range(3)])
    strategy.start(grid, TWO, 2)
    assert {0, 1} <= set(strategy.client_ids) <= {0, 1, 2}  # 2 is the node's own id


@pytest.mark.parametrize("curvature", [0.0, math.nan, 1e308])
def test_a_client_that_joins_with_an_impossible_curvature_is_refused(
    curvature: float, warned: Warned
) -> None:
    class Odd(FedGiAClient):
        def measure_curvature(self, model: Any, config: Any) -> Any:
            client = int(self.context.node_config["partition-id"])
            return {"curvature": curvature if client == VICTIM else 1.0}

    grid = RestlessGrid(
        client_app(client_fn_of(Odd)), [0, 1, 2, 3], {0: [2, 3, 4], 2: [2, 3, 4, 5]}
    )
    strategy = FedGiA(t=0.5, seed=1, fraction_evaluate=0)
    strategy.start(grid, initial_arrays(), 3)
    assert strategy.client_ids == [0, 1, 2]
    assert warned("client 3", "curvature")


def test_an_app_that_no_node_can_load_is_reported_by_its_error() -> None:
    class Grid(InProcessGrid):
        def pull_messages(self, message_ids: Any) -> list[Message]:
            return [
                Message(Error(1, "ModuleNotFoundError: No module named 'tensorx'"), reply_to=asked)
                for asked in self.queries
                if asked.metadata.message_id in set(message_ids)
            ]

        def push_messages(self, messages: Any) -> list[str]:
            self.queries = [*messages]
            return list(super().push_messages(self.queries))

    strategy = Mean(seed=1, node_timeout=60)
    with refused(RuntimeError, "tensorx"):
        strategy.start(Grid(claims(HONEST), 3), TWO, 2)


# --- Somebody else's id ---------------------------------------------------------------------------


def test_who_claims_the_id_of_an_absent_client_gets_nothing_of_it(warned: Warned) -> None:
    # Client 1's node 3 is gone from round 2 on; node 5 says that it is client 1.
    app = client_app(client_fn_of(CHEAP.client_class))
    grid = KeyedGrid(app, (0, 1, 2, 1), {0: [2, 3, 4], 2: [2, 4, 5]})
    strategy = CHEAP.strategy(seed=1)
    strategy.start(grid, CHEAP.initial_arrays(), 3)
    assert trained(strategy) == {1: [0, 1, 2], 2: [0, 2], 3: [0, 2]}
    assert grid.words[5] == [("query", 0)]
    assert len(warned("node 5")) == 1


# --- Callbacks ------------------------------------------------------------------------------------


def test_lists_that_evaluate_fn_returned_survive_saving_and_resuming(tmp_path: Any) -> None:
    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"per-class": [0.5, 1.0], "counts": [1, server_round], "loss": 2.0})

    def start(num_rounds: int, **options: Any) -> Any:
        return Mean(seed=1, fraction_evaluate=0).start(
            InProcessGrid(
                claims([([c], 3) for c in range(3)]),
                3,
                node_configs=[{"number": number} for number in range(3)],
            ),
            TWO,
            num_rounds,
            evaluate_fn=evaluate,
            checkpoint_dir=tmp_path,
            **options,
        )

    start(2)
    result = start(3, resume=True)
    assert json.loads(
        json.dumps({r: dict(m) for r, m in result.evaluate_metrics_serverapp.items()})
    ) == {str(r): {"per-class": [0.5, 1.0], "counts": [1, r], "loss": 2.0} for r in range(4)}
