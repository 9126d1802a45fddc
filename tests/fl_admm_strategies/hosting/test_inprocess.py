"""InProcessGrid: Flower's own apps run on it unchanged, and its isolation, failures and workers."""

import gc
import os
import signal
import threading
import time
import weakref

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fl_admm_strategies.hosting.inprocess import InProcessGrid, run_in_process
from tests.support.pace import fast
from tests.support.refusals import names, refused


def train_message(node_id: int, **config: float | str) -> Message:
    content = RecordDict({"config": ConfigRecord(dict(config))})
    return Message(content, node_id, MessageType.TRAIN)


def counting_app() -> ClientApp:
    """Count a node's messages in its state, then do as the message's "do" says."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        count = int(context.state.metric_records.get("count", {"n": 0})["n"]) + 1
        context.state["count"] = MetricRecord({"n": count})
        config = message.content["config"]
        match config.get("do"):
            case "raise":
                raise KeyError("no such column")
            case "exit":
                raise SystemExit(3)
            case "die":
                os._exit(1)
            case "sleep":
                time.sleep(60)
            case "change run_config":
                context.run_config["lr"] = 1.0
            case "return nothing":
                return None
            case "change message":
                config["do"] = "changed"
                message.metadata.group_id = "changed"
        reply = MetricRecord({"n": count, "partition": context.node_config["partition-id"]})
        return Message(RecordDict({"metrics": reply, "config": config}), reply_to=message)

    return app


def counts(grid: InProcessGrid) -> list[int]:
    states = [grid.context(node_id).state for node_id in grid.get_node_ids()]
    return [int(state["count"]["n"]) if "count" in state else 0 for state in states]


# --- Flower's apps ------------------------------------------------------------------------------


def drifting_app() -> ClientApp:
    """Move x halfway to the partition's own target, its id, plus what the state has added up."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        i = int(context.node_config["partition-id"])
        steps = int(context.state.metric_records.get("steps", {"n": 0})["n"]) + 1
        context.state["steps"] = MetricRecord({"n": steps})
        (x,) = message.content["arrays"].to_numpy_ndarrays()
        content = RecordDict(
            {
                "arrays": ArrayRecord([(x + i) / 2 + steps]),
                "metrics": MetricRecord({"num-examples": i + 1}),
            }
        )
        return Message(content, reply_to=message)

    return app


def fedavg_app(finals: list[np.ndarray]) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=3)
        result = strategy.start(grid, ArrayRecord([np.zeros(2)]), num_rounds=2)
        finals.extend(result.arrays.to_numpy_ndarrays())
        context.state["rounds"] = MetricRecord({"n": 2})

    return app


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_fedavg_runs_unchanged_and_gives_the_derived_mean(workers: int) -> None:
    # Three nodes, weights (i + 1) / 6. A round maps x to the weighted mean of (x + i) / 2 + t in
    # round t: x / 2 + (0*1 + 1*2 + 2*3) / 6 / 2 + t = x / 2 + 2/3 + t.
    # x_0 = 0, x_1 = 2/3 + 1 = 5/3, x_2 = 5/6 + 2/3 + 2 = 7/2. Needs the state to persist (t).
    finals: list[np.ndarray] = []
    context = run_in_process(fedavg_app(finals), drifting_app(), 3, workers=workers)
    np.testing.assert_allclose(finals, [[3.5, 3.5]], rtol=1e-12)
    assert context.state["rounds"]["n"] == 2


# --- nodes, contexts and isolation --------------------------------------------------------------


def test_nodes_are_fixed_and_know_their_partition() -> None:
    grid = InProcessGrid(counting_app(), 3, run_config={"lr": 0.1})
    assert grid.get_node_ids() == [2, 3, 4]  # 0 and 1 are Flower's own
    assert grid.get_node_ids() == [node.node_id for node in grid.get_nodes()]
    assert [grid.context(n).node_config for n in (2, 3, 4)] == [
        {"partition-id": i, "num-partitions": 3} for i in range(3)
    ]
    assert grid.context(4).run_config == {"lr": 0.1}
    with refused(ValueError, "node 7", "2 to 4"):
        grid.context(7)
    own = InProcessGrid(counting_app(), 2, node_configs=[{"partition-id": 5}, {"site": "b"}])
    assert [own.context(n).node_config for n in (2, 3)] == [{"partition-id": 5}, {"site": "b"}]


@pytest.mark.parametrize("workers", fast([0], [0, 2]))
def test_state_persists_for_participants_only_and_replies_keep_the_order(workers: int) -> None:
    with InProcessGrid(counting_app(), 3, workers=workers) as grid:
        a, _, c = grid.get_node_ids()
        grid.send_and_receive([train_message(c), train_message(a)])
        # Two messages to one node in a batch: one after another, on the state the first has left.
        replies = grid.send_and_receive([train_message(c), train_message(c), train_message(a)])
        assert [reply.content["metrics"]["n"] for reply in replies] == [2, 3, 2]
        assert [reply.content["metrics"]["partition"] for reply in replies] == [2, 2, 0]
        assert [reply.metadata.src_node_id for reply in replies] == [c, c, a]
        assert len({reply.metadata.message_id for reply in replies}) == 3
        assert counts(grid) == [2, 0, 3]


@pytest.mark.parametrize("workers", fast([0], [0, 1]))
def test_a_client_cannot_reach_the_servers_objects_or_another_client(workers: int) -> None:
    shared = RecordDict({"config": ConfigRecord({"do": "change message"})})
    kept: list[Message] = []
    app = counting_app()

    def keeping(message: Message, context: Context) -> Message:
        kept.append(app(message, context))
        return kept[-1]

    with InProcessGrid(keeping, 2, workers=workers) as grid:
        messages = [Message(shared, node_id, MessageType.TRAIN) for node_id in grid.get_node_ids()]
        replies = grid.send_and_receive(messages)
        assert [reply.content["config"]["do"] for reply in replies] == ["changed", "changed"]
        assert shared["config"]["do"] == "change message"
        assert [message.metadata.group_id for message in messages] == ["", ""]
        for message in kept:  # what the client held back is not what the server got
            message.content["config"]["do"] = "later"
        assert replies[0].content["config"]["do"] == "changed"


# --- failures -----------------------------------------------------------------------------------


FAILURES = {
    "raise": "KeyError: 'no such column'",
    "exit": "SystemExit: 3",
    "change run_config": "ValueError: the client changed context.run_config",
    "return nothing": "TypeError: the ClientApp must return Message",
}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failing_client_says_why_and_leaves_no_trace(workers, caplog):
    with InProcessGrid(counting_app(), 2, workers=workers, run_config={"lr": 0.1}) as grid:
        a, b = grid.get_node_ids()
        grid.send_and_receive([train_message(a)])
        for number, (do, reason) in enumerate(FAILURES.items(), start=1):
            bad, good = grid.send_and_receive([train_message(a, do=do), train_message(b)])
            assert bad.error.code == 2
            assert bad.error.reason.startswith(reason)
            assert bad.metadata.src_node_id == a
            assert good.content["metrics"]["n"] == number
            assert counts(grid) == [1, number]
            assert grid.context(a).run_config == {"lr": 0.1}
    # Which line it was; a worker's copy has none of the text (cloudpickle leaves the file out).
    assert any(", in train\n" in text and FAILURES["raise"] in text for text in caplog.messages)


# --- workers ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_clients_run_in_processes_of_their_own() -> None:
    data = {"loaded": [1]}

    def where(message: Message, context: Context) -> Message:
        time.sleep(0.05)
        data["loaded"].append(1)  # a copy of this process's
        return Message(RecordDict({"m": MetricRecord({"pid": os.getpid()})}), reply_to=message)

    def pids(workers: int) -> set[int]:
        with InProcessGrid(where, 4, workers=workers) as grid:
            messages = [train_message(n) for n in grid.get_node_ids()]
            return {reply.content["m"]["pid"] for reply in grid.send_and_receive(messages)}

    workers = pids(2)
    assert data == {"loaded": [1]}
    assert len(workers) == 2
    assert os.getpid() not in workers
    for pid in workers:
        assert not exists(pid)  # close() has ended and reaped them
    assert pids(0) == {os.getpid()}
    assert data == {"loaded": [1] * 5}


def exists(pid: int) -> bool:
    """Return whether there is a process, be it one that has ended and was not waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_app_that_cannot_be_sent_to_workers_is_refused() -> None:
    lock = threading.Lock()

    def locking(message: Message, context: Context) -> Message:
        with lock:
            return Message(RecordDict(), reply_to=message)

    with refused(TypeError, "lock", "workers=0"):
        InProcessGrid(locking, 1, workers=1)


@pytest.mark.slow
def test_a_dead_worker_costs_one_message_and_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    with InProcessGrid(counting_app(), 6, workers=2) as grid:
        messages = [train_message(n, do="die" if n == 4 else "") for n in grid.get_node_ids()]
        with caplog.at_level("ERROR", logger="flwr"):
            replies = grid.send_and_receive(messages)
        assert [reply.has_error() for reply in replies] == [n == 4 for n in grid.get_node_ids()]
        assert replies[2].error.code == 0
        assert names(replies[2].error.reason, "worker process", "exit code 1")
        assert len(caplog.records) == 1
        assert counts(grid) == [1, 1, 0, 1, 1, 1]
        again = grid.send_and_receive([train_message(n) for n in grid.get_node_ids()])
        assert [reply.content["metrics"]["n"] for reply in again] == [2, 2, 1, 2, 2, 2]


def pid_app(message: Message, context: Context) -> Message:
    return Message(RecordDict({"m": MetricRecord({"pid": os.getpid()})}), reply_to=message)


def pid_of_a_worker(grid: InProcessGrid) -> int:
    (reply,) = grid.send_and_receive([train_message(2)])
    return int(reply.content["m"]["pid"])


@pytest.mark.slow
def test_a_worker_that_dies_between_two_rounds_costs_nothing() -> None:
    with InProcessGrid(pid_app, 1, workers=1) as grid:
        pid = pid_of_a_worker(grid)
        os.kill(pid, signal.SIGKILL)
        while not grid._workers[0].has_died():
            time.sleep(0.01)
        assert pid_of_a_worker(grid) != pid
        assert not exists(pid)


@pytest.mark.slow
def test_a_late_client_is_killed_has_no_reply_and_leaves_no_trace() -> None:
    with InProcessGrid(counting_app(), 5, workers=2) as grid:
        workers = [worker.pid for worker in grid._workers]
        assert len(workers) == 2
        a, *others = grid.get_node_ids()
        start = time.monotonic()
        replies = grid.send_and_receive(
            [train_message(a, do="sleep"), *map(train_message, others), train_message(a)],
            timeout=1.0,
        )
        assert 1.0 <= time.monotonic() - start < 10
        assert [reply.metadata.src_node_id for reply in replies] == others
        assert counts(grid) == [0, 1, 1, 1, 1]
        assert sorted(map(exists, workers)) == [False, True]
        replies = grid.send_and_receive(map(train_message, grid.get_node_ids()), timeout=60)
        assert [reply.content["metrics"]["n"] for reply in replies] == [1, 2, 2, 2, 2]


def test_a_reply_to_another_message_is_refused() -> None:
    other = train_message(2)
    grid = InProcessGrid(lambda message, context: Message(RecordDict(), reply_to=other), 1)
    (reply,) = grid.send_and_receive([train_message(2)])
    assert reply.error.code == 2
    assert "reply_to=message" in reply.error.reason


@pytest.mark.parametrize("workers", [0, 2])
def test_push_and_pull(workers: int) -> None:
    with InProcessGrid(counting_app(), 3, workers=workers) as grid:
        message_ids = grid.push_messages(map(train_message, [*grid.get_node_ids(), 99]))
        replies: list[Message] = []
        deadline = time.monotonic() + 30
        while len(replies) < 4 and time.monotonic() < deadline:
            replies += grid.pull_messages(message_ids)
            time.sleep(0.01)
        answered = sorted(int(reply.metadata.reply_to_message_id) for reply in replies)
        assert answered == sorted(map(int, message_ids))
        assert grid.pull_messages(message_ids) == []
        assert counts(grid) == [1, 1, 1]
        (unknown,) = [reply for reply in replies if reply.has_error()]
        assert unknown.error.code == 5
        assert names(unknown.error.reason, "node 99")


@pytest.mark.slow  # PyTorch is imported in each worker
def test_a_worker_uses_one_torch_thread_and_does_not_hang() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.ones(400, 400)
        (x @ x).exp().sum()  # starts a pool of threads

        def torch_app(message: Message, context: Context) -> Message:
            metrics = MetricRecord({"y": float((x @ x).sum()), "threads": torch.get_num_threads()})
            return Message(RecordDict({"m": metrics}), reply_to=message)

        with InProcessGrid(torch_app, 2, workers=2) as grid:
            replies = grid.send_and_receive(map(train_message, [2, 3]), timeout=60)
            # 400 products of ones in each of 400 * 400 entries
            assert [dict(r.content["m"]) for r in replies] == [{"y": 400.0**3, "threads": 1}] * 2
    finally:
        torch.set_num_threads(before)


# --- constructor and life cycle -----------------------------------------------------------------


@pytest.mark.parametrize("workers", fast([0], [0, 1]))
def test_a_closed_grid_keeps_its_contexts_and_refuses_messages(workers: int) -> None:
    with InProcessGrid(counting_app(), 1, workers=workers) as grid:
        grid.send_and_receive([train_message(2)])
    assert counts(grid) == [1]
    with refused(RuntimeError, "closed"):
        grid.send_and_receive([train_message(2)])
    grid.close()


@pytest.mark.parametrize("workers", fast([0], [0, 1]))
def test_a_grid_keeps_no_reply_that_was_fetched(workers: int) -> None:
    with InProcessGrid(counting_app(), 1, workers=workers) as grid:
        replies = grid.send_and_receive([train_message(2)])
        fetched = weakref.ref(replies[0])
        replies.clear()
        deadline = time.monotonic() + 10  # its thread may not have ended yet
        while fetched() is not None and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        assert fetched() is None


@pytest.mark.slow
def test_a_grid_with_waiting_clients_can_be_closed_twice() -> None:
    # Ctrl-C does it: once from its handler, once as the run leaves the grid.
    grid = InProcessGrid(counting_app(), 2, workers=1)
    grid.push_messages([train_message(node, do="sleep") for node in grid.get_node_ids()])
    grid.close()
    grid.close()
    with refused(RuntimeError, "closed"):
        grid.push_messages([train_message(2)])


def test_the_bytes_of_arrays_are_shared_and_all_else_is_copied() -> None:
    seen: list[Array] = []

    def app(message: Message, context: Context) -> Message:
        array = message.content.array_records["arrays"].pop("w")
        seen.append(array)
        seen.append(Array(array.numpy() + 1))
        return Message(RecordDict({"arrays": ArrayRecord({"w": seen[1]})}), reply_to=message)

    sent = Array(np.zeros(100, np.float32))
    message = train_message(2)
    message.content["arrays"] = ArrayRecord({"w": sent})
    (reply,) = InProcessGrid(app, 1).send_and_receive([message])
    received = reply.content.array_records["arrays"]["w"]
    assert seen[0].data is sent.data  # bytes, which nobody can change
    assert received.data is seen[1].data
    assert seen[0] is not sent
    assert received is not seen[1]
    assert list(message.content.array_records["arrays"]) == ["w"]  # though the client took it out
