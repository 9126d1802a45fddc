"""The bridge from NumPyClient to the message API, and clients that share a node."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, MessageType, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from clients import answer, client_app
from fl_admm_strategies import InProcessGrid
from fl_admm_strategies.runtime.messages.packing import pack_instructions, unpack_replies
from fl_admm_strategies.runtime.messages.records import ClientInstruction
from tests.support.refusals import names, refused


class Counting(NumPyClient):
    """Adds the number of its calls, kept in the context, and its partition to the array."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.client = int(context.node_config["partition-id"])

    def fit(self, parameters, config):
        calls = int(self.context.state.metric_records.get("calls", {"n": 0})["n"]) + 1
        self.context.state["calls"] = MetricRecord({"n": calls})
        match config.get("do"):
            case "raise":
                raise KeyError("no such column")
            case "one array more":
                parameters = [*parameters, parameters[0]]
            case "one":
                parameters = parameters[:1]
            case "forget":
                del self.context.state["calls"]
        total = int(self.context.node_config["num-partitions"])
        report = {"calls": calls, "total": total, "name": "text", "done": True}
        return [parameters[0] + calls, *parameters[1:]], 10 + self.client, report

    def evaluate(self, parameters, config):
        return float(parameters[0].sum()), 5, {"accuracy": 0.5}


def send(
    grid: InProcessGrid, node: int, asked: dict[int, ClientInstruction], **kwargs: Any
) -> Message:
    hosted = kwargs.pop("hosted", len(asked) > 1)
    kind = kwargs.pop("kind", MessageType.TRAIN)
    message = Message(pack_instructions(asked, hosted=hosted), node, kind, group_id="1")
    (reply,) = grid.send_and_receive([message])
    return reply


def ask(**config: Any) -> ClientInstruction:
    return ClientInstruction({"model": {"w": np.zeros(2)}}, config)


def replies(message: Message) -> dict[int | None, Any]:
    return dict(unpack_replies(message.content))


@pytest.mark.parametrize("wrap", [False, True])
def test_a_single_client_replies_in_the_layout_of_fedavg(wrap: bool) -> None:
    def client_fn(context: Context) -> Any:
        return Counting(context).to_client() if wrap else Counting(context)

    grid = InProcessGrid(client_app(client_fn), 2)
    reply = send(grid, 3, {1: ask()})
    assert set(reply.content) == {"arrays", "metrics"}
    assert list(reply.content["arrays"]) == ["w"]
    # Text is left out, a truth value is a number, and the examples are there.
    assert dict(reply.content["metrics"]) == {
        "calls": 1,
        "total": 2,
        "done": 1,
        "num-examples": 11,
    }
    assert send(grid, 3, {1: ask()}).content["metrics"]["calls"] == 2  # the state is kept
    two = ClientInstruction(
        {"model": {"w": np.zeros(2)}, "start": {"u": np.ones(2)}}, {"do": "one"}
    )
    assert list(send(grid, 3, {1: two}).content["arrays"]) == ["w"]  # only the first group returns
    reply = send(grid, 3, {1: ask()}, kind=MessageType.EVALUATE)
    assert dict(reply.content["metrics"]) == {"loss": 0.0, "accuracy": 0.5, "num-examples": 5}
    assert set(reply.content) == {"metrics"}


@pytest.mark.parametrize(
    ("num_nodes", "expected"),
    [(1, [[0, 1, 2, 3, 4]]), (2, [[0, 1], [2, 3, 4]]), (5, [[0], [1], [2], [3], [4]])],
)
def test_nodes_share_the_clients_and_say_so(num_nodes: int, expected: list[list[int]]) -> None:
    grid = InProcessGrid(client_app(Counting, num_clients=lambda context: 5), num_nodes)
    queries = [Message(RecordDict(), n, MessageType.QUERY) for n in grid.get_node_ids()]
    answers = [reply.content["config"] for reply in grid.send_and_receive(queries)]
    assert [list(answer["client-ids"]) for answer in answers] == expected
    assert [answer["num-clients"] for answer in answers] == [5] * num_nodes


def test_hosted_clients_have_a_partition_and_a_state_of_their_own() -> None:
    grid = InProcessGrid(client_app(Counting, num_clients=6), 2)  # node 3 hosts 3, 4 and 5
    send(grid, 3, {3: ask(), 5: ask()})
    send(grid, 3, {5: ask()}, hosted=True)
    last = replies(send(grid, 3, {3: ask(), 4: ask(), 5: ask()}))
    for client, calls in ((3, 2), (4, 1), (5, 3)):
        reply = last[client]
        counts = [reply.metrics[name] for name in ("calls", "num-examples", "total")]
        assert (counts, reply.arrays["w"][0]) == ([calls, 10 + client, 6], calls)
    send(grid, 3, {5: ask(do="forget")}, hosted=True)  # a record that it deletes is gone
    assert replies(send(grid, 3, {4: ask(), 5: ask()}))[5].metrics["calls"] == 1


def test_a_hosted_client_that_raises_fails_alone_and_keeps_its_state() -> None:
    grid = InProcessGrid(client_app(Counting, num_clients=6), 2)
    send(grid, 3, {3: ask(), 4: ask()})
    last = replies(send(grid, 3, {3: ask(do="raise"), 4: ask()}))
    assert re.fullmatch(
        r"KeyError: 'no such column' \(test_app.py, line \d+, in fit\)", last[3].error or ""
    )
    assert last[4].metrics["calls"] == 2
    again = replies(send(grid, 3, {3: ask(), 4: ask()}))
    assert again[3].metrics["calls"] == 2  # the call that raised left no trace
    assert again[4].metrics["calls"] == 3


@pytest.mark.parametrize("num_clients", [None, 2])
@pytest.mark.parametrize("returned", [None, "client", Counting])
def test_what_a_client_fn_or_a_client_returns_wrongly_is_told(
    returned: Any, num_clients: int | None
) -> None:
    def reason(client_fn: Any) -> str:
        grid = InProcessGrid(client_app(client_fn, num_clients=num_clients), 2)
        reply = send(grid, 2, {0: ask(do="one array more")})
        return reply.error.reason if reply.has_error() else replies(reply)[None].error

    assert names(reason(lambda context: returned), "client_fn", type(returned).__name__)
    assert names(reason(Counting), "Counting.fit", "2 arrays", "w")


@pytest.mark.parametrize("num_clients", [None, 2])
def test_what_a_client_gets_is_its_own_to_change(num_clients: int | None) -> None:
    class Changing(Counting):
        def fit(self, parameters, config):
            parameters[0] += 1 + self.client
            return parameters, 1, {}

    grid = InProcessGrid(client_app(Changing, num_clients=num_clients), 1 if num_clients else 2)
    if num_clients is None:
        assert replies(send(grid, 3, {1: ask()}))[None].arrays["w"].tolist() == [2, 2]
        return
    found = replies(send(grid, 2, {0: ask(), 1: ask()}))  # both get the same array
    assert [found[client].arrays["w"][0] for client in (0, 1)] == [1, 2]


@pytest.mark.parametrize("upload", [np.array([None]), np.array(["x"]), np.array([1j])], ids=str)
def test_an_upload_that_is_no_array_of_numbers_fails_alone(upload: np.ndarray) -> None:
    class Strange(Counting):
        def fit(self, parameters, config):
            return ([upload] if self.client == 0 else parameters), 1, {}

    grid = InProcessGrid(client_app(Strange, num_clients=2), 1)
    found = replies(send(grid, 2, {0: ask(), 1: ask()}))
    assert names(found[0].error, "Strange.fit", "'w'", upload.dtype)
    assert found[1].error is None


def test_hosting_needs_to_know_the_partition() -> None:
    app = client_app(Counting, num_clients=6)
    query = Message(RecordDict(), 2, MessageType.QUERY)
    for config in ({}, {"partition-id": 3, "num-partitions": 2}, {"partition-id": 0}):
        grid = InProcessGrid(app, 1, node_configs=[config])
        (reply,) = grid.send_and_receive([query])
        assert reply.has_error(), config
        assert names(reply.error.reason, "partition-id", "num-partitions")
    grid = InProcessGrid(client_app(Counting), 1, node_configs=[{}])  # known by its node id
    (reply,) = grid.send_and_receive([query])
    assert "client-ids" not in reply.content["config"]


# --- Handlers of one's own ----------------------------------------------------------------------


def own_handlers(client: Any = Counting) -> ClientApp:
    app = client_app()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return answer(client(context), message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return answer(client(context), message)

    return app


def test_a_packed_message_needs_an_app_that_hosts() -> None:
    reply = send(InProcessGrid(own_handlers(), 2), 3, {1: ask(), 2: ask()})
    assert names(reply.error.reason, "client 1, client 2", "client_app(client_fn, num_clients=...)")


def test_answer_refuses_what_is_no_client() -> None:
    reply = send(InProcessGrid(own_handlers(lambda context: None), 2), 3, {1: ask()})
    assert names(reply.error.reason, "answer()", "NoneType")
    with refused(ValueError, "num_clients", "client_fn"):
        client_app(num_clients=4)


class Sharing(NumPyClient):
    """Trains a model that all clients of the process share, and uploads it as it is."""

    model = np.zeros(2)

    def fit(self, parameters, config):
        self.model += 1
        return [self.model], 1, {}


def test_an_upload_stays_what_it_was_where_clients_share_a_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Sharing, "model", np.zeros(2))
    grid = InProcessGrid(client_app(lambda context: Sharing(), num_clients=3), 1)
    found = replies(send(grid, 2, {c: ask() for c in range(3)}))
    assert [found[c].arrays["w"].tolist() for c in range(3)] == [[1, 1], [2, 2], [3, 3]]
