"""What every strategy here promises, whatever its algorithm. A strategy joins with one `Case`."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
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
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.server import LegacyContext, ServerConfig
from flwr.server.workflow import DefaultWorkflow
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from clients import client_app
from fl_admm_strategies import LegacyStrategy, StatefulStrategy, run_in_process
from tests.support.cases import CASES, NUM_CLIENTS, Case, State, each_case, forks, grid_of, run
from tests.support.federation import (
    WatchedGrid,
    assert_same_bits,
    client_fn_of,
    dataset,
    differs,
    make_model,
    node_of,
    raising_client_fn,
    run_on_ray,
    warnings_in,
)

VICTIM = 3

# --- Determinism --------------------------------------------------------------------------------


def participants(strategy: StatefulStrategy) -> list[list[int]]:
    return [sorted(strategy.train_metrics[r]) for r in sorted(strategy.train_metrics)]


@each_case
def test_one_seed_gives_the_same_bits_and_another_seed_samples_others(case: Case) -> None:
    first, second, other = (
        run(case, grid_of(case), strategy=case.strategy(fraction_train=0.5, seed=seed))
        for seed in (1, 1, 2)
    )
    assert_same_bits(second.state_dict(), first.state_dict())
    assert second.train_metrics == first.train_metrics
    assert second.evaluate_metrics == first.evaluate_metrics
    if case.everybody_trains:
        assert differs(other.state_dict(), first.state_dict())
    else:
        assert participants(other) != participants(first)


@each_case
def test_only_the_sampled_clients_take_part(case: Case) -> None:
    grid = grid_of(case)
    strategy = run(
        case, grid, strategy=case.strategy(fraction_train=0.5, fraction_evaluate=0.34, seed=1)
    )
    for server_round in (1, 2, 3):
        trained = sorted(strategy.train_metrics[server_round])
        assert len(trained) == (NUM_CLIENTS if case.everybody_trains else 3)  # 0.5 of 6
        asked = [m.metadata.dst_node_id for m in grid.phase(MessageType.TRAIN, server_round)]
        assert sorted(asked) == [node_of(client) for client in trained]
        assert len(strategy.evaluate_metrics[server_round]) == 2  # int(0.34 * 6)
    if not case.everybody_trains:
        assert len({tuple(group) for group in participants(strategy)}) > 1  # drawn anew each round


@each_case
def test_the_order_of_the_replies_does_not_matter(case: Case) -> None:
    def rotate(replies: list[Message]) -> list[Message]:
        return [*replies[4:], *reversed(replies[:4])]

    shuffled = grid_of(case, spoil=dict.fromkeys((1, 2, 3), rotate))
    assert_same_bits(run(case, shuffled).state_dict(), run(case, grid_of(case)).state_dict())


# --- Bad replies --------------------------------------------------------------------------------


def change_arrays(change: Callable[[dict[str, NDArray[Any]]], None]) -> Callable[[Message], None]:
    def spoil(reply: Message) -> None:
        arrays = {name: array.numpy() for name, array in reply.content["arrays"].items()}
        change(arrays)
        reply.content["arrays"] = ArrayRecord({k: Array(v) for k, v in arrays.items()})

    return spoil


def set_num_examples(value: float) -> Callable[[Message], None]:
    def spoil(reply: Message) -> None:
        reply.content["metrics"]["num-examples"] = value

    return spoil


def put(value: float) -> Callable[[dict[str, NDArray[Any]]], None]:
    def change(arrays: dict[str, NDArray[Any]]) -> None:
        next(iter(arrays.values())).flat[-2] = value

    return change


def last(changed: Callable[[NDArray[Any]], NDArray[Any]]) -> Callable[[Message], None]:
    def change(arrays: dict[str, NDArray[Any]]) -> None:
        name = list(arrays)[-1]
        arrays[name] = changed(arrays[name])

    return change_arrays(change)


def unreadable(reply: Message) -> None:
    array = Array(dtype="float32", shape=(3,), stype="numpy.ndarray", data=b"no numpy file")
    reply.content["arrays"][list(reply.content["arrays"])[-1]] = array


# How the victim's reply is spoilt, and a word that the log line must hold.
SPOILT: dict[str, tuple[Callable[[Message], None], str]] = {
    "NaN": (change_arrays(put(np.nan)), "' holds NaN"),
    "infinity": (change_arrays(put(-np.inf)), "' holds NaN or infinity"),
    "shape": (last(lambda array: array[:2]), "' has shape (2,"),
    "dtype": (last(lambda array: array.astype(np.float16)), "dtype float16, expected"),
    "name": (
        change_arrays(lambda a: a.update(extra=a.popitem()[1])),
        "and have ['extra'] (1), which was",
    ),
    "one array less": (change_arrays(lambda a: a.popitem()), "lack ["),
    "one array more": (
        change_arrays(lambda a: a.update(extra=np.zeros(3))),
        "have ['extra'] (1), which was",
    ),
    "no arrays": (lambda reply: reply.content.pop("arrays"), "arrays lack ["),
    "unreadable bytes": (unreadable, "cannot be read"),
    "zero examples": (set_num_examples(0), "'num-examples' is 0"),
    "negative examples": (set_num_examples(-5), "'num-examples' is -5"),
    "NaN examples": (set_num_examples(float("nan")), "'num-examples' is nan"),
    "infinitely many examples": (set_num_examples(float("inf")), "'num-examples' is inf"),
    "no examples": (lambda reply: reply.content["metrics"].pop("num-examples"), "lack the number"),
    "no metrics": (lambda reply: reply.content.pop("metrics"), "0 MetricRecords"),
}


def of_victim(reply: Message) -> bool:
    return bool(reply.metadata.src_node_id == node_of(VICTIM))


def spoil_one(spoil: Callable[[Message], None]) -> Callable[[list[Message]], list[Message]]:
    def spoil_all(replies: list[Message]) -> list[Message]:
        for reply in replies:
            if of_victim(reply):
                spoil(reply)
        return replies

    return spoil_all


def without(case: Case, client: int, server_round: int, **settings: Any) -> StatefulStrategy:
    """Return a strategy that drops a client from the sample of one round."""
    strategy = case.strategy(seed=1, **settings)
    orders = strategy.train_orders

    def fewer_orders(this_round: int, client_ids: Sequence[int]) -> Any:
        left_out = client if this_round == server_round else None
        return orders(this_round, [other for other in client_ids if other != left_out])

    strategy.train_orders = fewer_orders  # type: ignore[method-assign]
    return strategy


@cache
def run_without_victim(case: Case) -> StatefulStrategy:
    return run(case, grid_of(case), 2, strategy=without(case, VICTIM, 2, fraction_evaluate=0))


def assert_as_if_not_sampled(
    case: Case, grid: WatchedGrid, records: list[logging.LogRecord], reason: str
) -> None:
    strategy = run(case, grid, 2, strategy=case.strategy(seed=1, fraction_evaluate=0))
    (line,) = warnings_in(records)
    assert f"client {VICTIM} " in line
    assert "round 2" in line
    assert reason in line
    expected = run_without_victim(case)
    assert_same_bits(strategy.state_dict(), expected.state_dict())
    assert strategy.train_metrics == expected.train_metrics
    assert sorted(strategy.train_metrics[2]) == [0, 1, 2, 4, 5]


# Which reply is spoilt is the base's to see, so the fast suite has all kinds for one strategy only.
FEW = ("NaN", "shape", "name", "no examples")
SPOILT_CASES = [
    pytest.param(
        case,
        kind,
        id=f"{kind}-{case.name}",
        marks=[] if case is CASES[0] or kind in FEW else [pytest.mark.slow],
    )
    for case in CASES
    for kind in SPOILT
]


@pytest.mark.parametrize(("case", "kind"), SPOILT_CASES)
def test_a_spoilt_reply_is_as_if_the_client_was_not_sampled(
    case: Case, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoil, reason = SPOILT[kind]
    grid = grid_of(case, spoil={2: spoil_one(spoil)})
    assert_as_if_not_sampled(case, grid, caplog.records, reason)


@each_case
def test_two_replies_of_a_client_are_both_refused(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    def twice(replies: list[Message]) -> list[Message]:
        return replies + [reply for reply in replies if of_victim(reply)]

    assert_as_if_not_sampled(
        case, grid_of(case, spoil={2: twice}), caplog.records, "more than once"
    )


@each_case
def test_a_lost_reply_is_as_if_the_client_was_not_sampled(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    def lose(replies: list[Message]) -> list[Message]:
        return [reply for reply in replies if not of_victim(reply)]

    assert_as_if_not_sampled(case, grid_of(case, spoil={2: lose}), caplog.records, "no reply")


@each_case
def test_a_client_that_raises_is_as_if_it_was_not_sampled(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    app = client_app(raising_client_fn(case.client_class, {VICTIM: [2]}))
    grid = WatchedGrid(app, NUM_CLIENTS)
    assert_as_if_not_sampled(case, grid, caplog.records, "OSError: the disk is full")


def foreign_reply(node: int, reply: Message, *, failed: bool = False) -> Message:
    """Return another node's reply to a message that it did not get."""
    request = Message(RecordDict(), node, MessageType.TRAIN, group_id="2")
    if failed:
        return Message(Error(2, "out of memory"), reply_to=request)
    return Message(RecordDict(dict(reply.content)), reply_to=request)


@each_case
@pytest.mark.parametrize("failed", [False, True])
def test_the_reply_of_a_client_that_was_not_asked_is_ignored(
    case: Case, failed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def intrude(replies: list[Message]) -> list[Message]:
        return [foreign_reply(node_of(VICTIM), replies[0], failed=failed), *replies]

    strategy = without(case, VICTIM, 2, fraction_evaluate=0)
    run(case, grid_of(case, spoil={2: intrude}), 2, strategy=strategy)
    (line,) = warnings_in(caplog.records)
    assert f"client {VICTIM} " in line
    assert "round 2" in line
    assert ("out of memory" if failed else "not asked") in line
    assert_same_bits(strategy.state_dict(), run_without_victim(case).state_dict())


@each_case
def test_the_reply_of_an_unknown_node_is_ignored(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    grid = grid_of(case, spoil={2: lambda replies: [foreign_reply(999, replies[0]), *replies]})
    strategy = run(case, grid, 2)
    (line,) = warnings_in(caplog.records)
    assert "round 2" in line
    assert "999" in line
    assert_same_bits(strategy.state_dict(), run(case, grid_of(case), 2).state_dict())


@each_case
def test_a_round_without_a_usable_reply_changes_nothing(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    states: list[State] = []
    app = client_app(raising_client_fn(case.client_class, {c: [2] for c in range(NUM_CLIENTS)}))
    strategy = case.strategy(seed=1)
    strategy.start(
        WatchedGrid(app, NUM_CLIENTS),
        case.initial_arrays(),
        3,
        on_round=lambda server_round, metrics: states.append(
            {key: array.copy() for key, array in strategy.state_arrays().items()}
        ),
    )
    assert_same_bits(states[1], states[0])
    assert differs(states[2], states[1])  # and the run goes on
    lines = warnings_in(caplog.records)
    for client in range(NUM_CLIENTS):
        assert len([line for line in lines if f"client {client} " in line]) == 1
    assert len(lines) == NUM_CLIENTS + 1  # and one line that the round changes nothing
    assert 2 not in strategy.train_metrics


# --- Checkpoints --------------------------------------------------------------------------------


@each_case
@pytest.mark.parametrize("clients_keep_their_state", [True, False])
def test_a_saved_state_continues_to_the_same_bits(
    case: Case, clients_keep_their_state: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def new() -> StatefulStrategy:
        return case.strategy(fraction_train=0.5, fraction_evaluate=0.5, seed=1)

    whole = run(case, grid_of(case), 6, strategy=new())
    grid = grid_of(case)
    state = run(case, grid, 3, strategy=new()).state_dict()
    for key, array in state.items():
        assert type(array) is np.ndarray, key
        assert array.dtype.kind in "biuf", key  # numeric, so that numpy and safetensors take it
    second = new()
    second.load_state_dict(state)
    run(case, grid if clients_keep_their_state else grid_of(case), 6, strategy=second)
    if not (clients_keep_their_state or case.stateless_clients):
        # What was theirs is gone: whoever needs it says so when it is first asked, sits out that
        # once, and takes part from then on. The same clients are sampled as ever.
        lines = [line for line in warnings_in(caplog.records) if "start afresh" in line]
        assert lines
        missing: set[int] = set()
        for server_round in (4, 5, 6):
            sampled = set(whole.train_metrics[server_round])
            refused = sampled - set(second.train_metrics.get(server_round, ()))
            assert not refused & missing  # nobody sits out twice
            named = [line for line in lines if line.startswith(f"round {server_round}:")]
            for client in refused:
                assert any(re.search(rf"[\[ ]{client}[,\]]", line) for line in named)
            missing |= refused
        assert missing
        return
    assert sorted(second.train_metrics) == [4, 5, 6]
    assert {r: whole.train_metrics[r] for r in (4, 5, 6)} == second.train_metrics
    assert_same_bits(second.state_dict(), whole.state_dict())


@each_case
def test_a_run_resumed_from_a_folder_is_the_whole_run(case: Case, tmp_path: Path) -> None:
    # Round 4 is trained but not saved: its clients have moved on, and go back.
    def new() -> StatefulStrategy:
        return case.strategy(fraction_train=0.5, fraction_evaluate=0.5, seed=1)

    def start(strategy: StatefulStrategy, **options: Any) -> Result:
        client_class = partial(case.client_class, state_dir=tmp_path / "clients")
        grid = WatchedGrid(client_app(client_fn_of(client_class)), NUM_CLIENTS)
        return strategy.start(
            grid, case.initial_arrays(), 5, checkpoint_dir=tmp_path / "checkpoints", **options
        )

    def interrupt(server_round: int, metrics: Any) -> None:
        if server_round == 4:
            raise InterruptedError

    whole = new()
    expected = whole.start(grid_of(case), case.initial_arrays(), 5)
    with pytest.raises(InterruptedError):
        start(new(), on_round=interrupt)
    second = new()
    result = start(second, resume=True)
    assert_same_bits(second.state_dict(), whole.state_dict())
    assert second.train_metrics == whole.train_metrics
    assert second.evaluate_metrics == whole.evaluate_metrics
    assert result.train_metrics_clientapp == expected.train_metrics_clientapp
    assert result.evaluate_metrics_clientapp == expected.evaluate_metrics_clientapp
    # After a restart more may be sent, to be on the safe side, and is counted.
    for server_round in (1, 2, 3):
        assert second.traffic[server_round] == whole.traffic[server_round]


@each_case
def test_later_rounds_do_not_change_a_saved_state(case: Case) -> None:
    strategy = case.strategy(seed=1)
    saved: list[State] = []
    copies: list[State] = []

    def save(server_round: int, metrics: Any) -> None:
        saved.append(strategy.state_dict())
        copies.append({key: array.copy() for key, array in saved[-1].items()})

    strategy.start(grid_of(case), case.initial_arrays(), 2, on_round=save)
    for state, copy in zip(saved, copies, strict=True):
        assert_same_bits(state, copy)


# --- Messages -----------------------------------------------------------------------------------


@each_case
def test_messages_have_the_layout_of_fedavg(case: Case) -> None:
    grid = grid_of(case)
    strategy = run(case, grid, 2)
    expected = dict(strategy.reply_spec())
    if case.fedavg_clients:
        assert expected == {k: (a.shape, a.dtype) for k, a in case.initial_arrays().items()}
    for message in grid.phase(MessageType.TRAIN, 2):
        arrays, config = message.content["arrays"], message.content["config"]
        assert isinstance(arrays, ArrayRecord)
        assert isinstance(config, ConfigRecord)
        assert next(iter(message.content)) == "arrays"
        if "reply" in config:
            assert config["reply"] == ",".join(expected)
        else:
            assert list(arrays) == list(expected)
        assert config["server-round"] == 2
    for reply in grid.replies(MessageType.TRAIN, 2):
        assert set(reply.content) == {"arrays", "metrics"}
        arrays, metrics = reply.content["arrays"], reply.content["metrics"]
        assert {k: (a.shape, a.dtype) for k, a in arrays.items()} == expected
        assert isinstance(metrics, MetricRecord)
        assert metrics["num-examples"] > 0
    for reply in grid.replies(MessageType.EVALUATE, 2):
        assert set(reply.content) == {"metrics"}
        assert reply.content["metrics"]["num-examples"] > 0


def fedavg_app() -> ClientApp:
    """Return a ClientApp as people write it for FedAvg: it knows nothing of this library."""
    app = ClientApp()

    def received(message: Message) -> torch.nn.Module:
        model = make_model()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        return model

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = received(message)
        data = dataset(int(context.node_config["partition-id"]))
        optimizer = torch.optim.SGD(model.parameters(), lr=message.content["config"].get("lr", 0.1))
        for inputs, labels in DataLoader(data, batch_size=4):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        arrays = ArrayRecord(model.state_dict())
        metrics = MetricRecord({"num-examples": len(data)})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        inputs, labels = dataset(int(context.node_config["partition-id"])).tensors
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(received(message)(inputs), labels)
        metrics = MetricRecord({"loss": loss.item(), "num-examples": len(labels)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.fedavg_clients], ids=lambda case: case.name
)
def test_a_client_app_written_for_fedavg_works(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = run(case, WatchedGrid(fedavg_app(), NUM_CLIENTS), 2)
    assert warnings_in(caplog.records) == []
    # Such an app does not say which partition it has, so a client's id is its node's.
    assert strategy.client_ids == [node_of(client) for client in range(NUM_CLIENTS)]
    assert sorted(strategy.train_metrics[2]) == strategy.client_ids
    assert strategy.evaluate_metrics[2][node_of(0)]["loss"] > 0
    first, last = case.initial_arrays()["head.weight"], strategy.global_arrays["head.weight"]
    assert not np.allclose(last.numpy(), first.numpy(), atol=1e-3)


# --- Several clients on a node ------------------------------------------------------------------


@each_case
def test_it_does_not_matter_how_many_nodes_host_the_clients(case: Case) -> None:
    def host(num_nodes: int) -> StatefulStrategy:
        app = client_app(client_fn_of(case.client_class), num_clients=12)
        strategy = case.strategy(fraction_train=0.5, fraction_evaluate=0.5, seed=1)
        return run(case, WatchedGrid(app, num_nodes), strategy=strategy)

    alone = host(12)
    assert alone.client_ids == list(range(12))
    for num_nodes in (3, 8):  # 8: some nodes host one client, some two
        together = host(num_nodes)
        assert_same_bits(together.state_dict(), alone.state_dict())
        assert together.train_metrics == alone.train_metrics
        assert together.evaluate_metrics == alone.evaluate_metrics


@each_case
@pytest.mark.parametrize("how", ["raises", "is spoilt", "speaks for another"])
def test_a_hosted_client_fails_alone(
    case: Case, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(replies: list[Message]) -> list[Message]:
        for reply in replies:
            if f"metrics@{VICTIM}" in reply.content:
                if how == "is spoilt":
                    reply.content[f"metrics@{VICTIM}"]["num-examples"] = -1
                else:  # the node of clients 3, 4 and 5 uses an id that is another node's
                    for record in ("arrays", "metrics"):
                        reply.content[f"{record}@0"] = reply.content.pop(f"{record}@{VICTIM}")
        return replies

    def on_two_nodes(when: dict[int, list[int]], spoilt: bool) -> WatchedGrid:
        app = client_app(raising_client_fn(case.client_class, when), num_clients=NUM_CLIENTS)
        return WatchedGrid(app, 2, spoil={2: spoil} if spoilt else {})

    grid = on_two_nodes({VICTIM: [2]} if how == "raises" else {}, how != "raises")
    strategy = run(case, grid, 2)
    lines = [line for line in warnings_in(caplog.records) if f"client {VICTIM} " in line]
    assert len(lines) == 1
    assert "round 2" in lines[0]
    expected = run(case, on_two_nodes({}, False), 2, strategy=without(case, VICTIM, 2))
    assert_same_bits(strategy.state_dict(), expected.state_dict())
    assert sorted(strategy.train_metrics[2]) == [0, 1, 2, 4, 5]


# --- Engines and APIs ---------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {"fraction_train": 0.5, "fraction_evaluate": 0.5, "seed": 1}


@each_case
@forks
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_give_the_same_bits(case: Case, workers: int) -> None:
    with grid_of(case, workers=workers) as grid:
        strategy = run(case, grid, strategy=case.strategy(**SETTINGS))
    expected = run(case, grid_of(case), strategy=case.strategy(**SETTINGS))
    assert_same_bits(strategy.state_dict(), expected.state_dict())
    assert strategy.train_metrics == expected.train_metrics


def current_app(case: Case, strategy: StatefulStrategy) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        run(case, grid, strategy=strategy)

    return app


def legacy_app(case: Case, strategy: StatefulStrategy) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        legacy = LegacyContext(
            context=context,
            config=ServerConfig(num_rounds=3),
            strategy=LegacyStrategy(strategy, case.initial_arrays()),
        )
        DefaultWorkflow()(grid, legacy)

    return app


def host(case: Case, api: str, engine: Callable[[ServerApp, ClientApp], Any]) -> StatefulStrategy:
    strategy = case.strategy(**SETTINGS)
    client_fn = client_fn_of(case.client_class)
    if api == "current":
        engine(current_app(case, strategy), client_app(client_fn))
    else:
        engine(legacy_app(case, strategy), ClientApp(client_fn=client_fn))
    return strategy


def in_process(server_app: ServerApp, client_app: ClientApp) -> None:
    run_in_process(server_app, client_app, NUM_CLIENTS)


def on_ray(server_app: ServerApp, client_app: ClientApp) -> None:
    run_on_ray(server_app, client_app, NUM_CLIENTS)


@each_case
def test_the_legacy_api_gives_the_same_bits(case: Case) -> None:
    legacy, expected = host(case, "legacy", in_process), host(case, "current", in_process)
    assert_same_bits(legacy.state_dict(), expected.state_dict())
    assert legacy.train_metrics == expected.train_metrics
    assert legacy.evaluate_metrics == expected.evaluate_metrics


# The other cases run on Ray in test_determinism.py, all in one simulation.
@pytest.mark.parametrize("api", ["current", pytest.param("legacy", marks=pytest.mark.slow)])
def test_ray_gives_the_same_bits(api: str) -> None:
    case = CASES[0]
    strategy, expected = host(case, api, on_ray), host(case, "current", in_process)
    assert_same_bits(strategy.state_dict(), expected.state_dict())
    assert strategy.train_metrics == expected.train_metrics
    assert strategy.evaluate_metrics == expected.evaluate_metrics
