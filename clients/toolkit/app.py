"""Run `NumPyClient`s under Flower's current message API, one or many on a node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from fl_admm_strategies.maths.checks import listing
from fl_admm_strategies.runtime import messages as wire
from fl_admm_strategies.runtime.interrupts import Interrupted
from fl_admm_strategies.runtime.messages import ClientInstruction, RawReply, describe

from .errors import plain_errors

ClientFn = Callable[[Context], Any]
Run = Callable[[NumPyClient, ClientInstruction], RawReply]


def client_app(
    client_fn: ClientFn | None = None,
    *,
    num_clients: int | Callable[[Context], int] | None = None,
) -> ClientApp:
    """Make a `ClientApp` of the current API out of a `client_fn` of the legacy one.

    Parameters
    ----------
    client_fn : callable, optional
        ``client_fn(context)`` returns a `NumPyClient`, or what its ``to_client()`` returns: the
        same function that ``ClientApp(client_fn=...)`` takes. Without it the app tells the server
        who its client is, and the handlers for train and evaluate messages are yours (`answer`).
    num_clients : int or callable, optional
        Total number of clients, where it is not the number of nodes: node p of P then hosts the
        clients from p * num_clients // P up to the next node's, each with a context of its own
        (``partition-id``, ``num-partitions`` and state). A callable gets the node's context, e.g.
        ``lambda context: context.run_config["num-clients"]``. By default a node is one client.

    Returns
    -------
    ClientApp
        With handlers for query messages and, given a `client_fn`, train and evaluate.

    Notes
    -----
    A hosted client that raises fails alone: its reply says why and its state is that before the
    message. A `MetricRecord` carries numbers, so metrics that are text do not travel.

    Examples
    --------
    >>> app = client_app(client_fn)
    """
    if client_fn is None and num_clients is not None:
        raise ValueError(
            "num_clients is given without a client_fn, but handlers of one's own answer for one "
            "client on each node. Give client_app a client_fn, or leave num_clients out."
        )
    app = ClientApp()

    def hosted(context: Context) -> tuple[list[int] | None, int]:
        """Return the ids of this node's clients (None: it cannot tell) and the total."""
        partition = context.node_config.get("partition-id")
        nodes = int(context.node_config.get("num-partitions", 0))
        total = num_clients(context) if callable(num_clients) else num_clients
        if total is None:
            return (None, 0) if partition is None else ([int(partition)], nodes)
        if partition is None or not 0 <= int(partition) < nodes:
            raise ValueError(
                f"node_config says partition-id={partition}, num-partitions={nodes}; hosting "
                f"{total} clients needs 0 <= partition-id < num-partitions."
            )
        node = int(partition)
        return list(range(node * total // nodes, (node + 1) * total // nodes)), total

    def handle(message: Message, context: Context, run: Run) -> Message:
        assert client_fn is not None
        if num_clients is None:
            instruction = _only_instruction(message)
            with plain_errors():
                return _reply(run(_numpy_client(client_fn(context)), instruction), message)
        clients, total = hosted(context)
        assert clients is not None
        asked = dict(wire.unpack_instructions(message.content))
        own_labels: list[int | None] = [None] if len(clients) == 1 else [*clients]
        if not asked or not set(asked) <= set(own_labels):
            raise ValueError(
                f"The message is for {_named(asked)}, but this node hosts "
                f"{listing(clients)} of {total} clients. Server and nodes must be told the same "
                "number of clients and nodes."
            )
        states = _split_state(context.state)
        replies: dict[int | None, RawReply] = {}
        for label, instruction in asked.items():
            client_id = clients[0] if label is None else label
            own = _own_context(context, client_id, total, states.get(client_id, {}))
            try:
                replies[label] = run(_numpy_client(client_fn(own)), instruction)
            except Interrupted:
                raise
            except BaseException as error:  # a hosted client fails alone, whatever it raises
                replies[label] = RawReply(error=describe(error))
            else:
                for key in states.get(client_id, {}):
                    del context.state[f"{key}@{client_id}"]
                for key, record in own.state.items():
                    context.state[f"{key}@{client_id}"] = record
        return Message(wire.pack_replies(replies), reply_to=message)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        clients, total = hosted(context)
        identity = ConfigRecord()
        if clients is not None:
            identity[wire.CLIENT_IDS] = clients
            identity[wire.NUM_CLIENTS] = total
        return Message(RecordDict({wire.CONFIG: identity}), reply_to=message)

    if client_fn is not None:

        @app.train()
        def train(message: Message, context: Context) -> Message:
            return handle(message, context, _fit)

        @app.evaluate()
        def evaluate(message: Message, context: Context) -> Message:
            return handle(message, context, _evaluate)

    return app


def answer(client: Any, message: Message) -> Message:
    """Answer a train or evaluate message with a client, in a handler of one's own.

    Parameters
    ----------
    client : NumPyClient
        Made with the handler's context.
    message : Message
        The handler's message, for one client.

    Returns
    -------
    Message
        The reply.

    Raises
    ------
    ValueError
        If the message is packed for several clients.

    Examples
    --------
    >>> app = client_app()
    >>> @app.train()
    ... def train(msg: Message, context: Context) -> Message:
    ...     return answer(FPFCClient(context, Net(), load_data(context), loss_fn), msg)
    """
    kind = message.metadata.message_type.partition(".")[0]
    if kind not in (MessageType.TRAIN, MessageType.EVALUATE):
        raise ValueError(f"The message is of type {kind!r}, expected 'train' or 'evaluate'.")
    run = _fit if kind == MessageType.TRAIN else _evaluate
    own = _numpy_client(client, "answer() was given")
    with plain_errors():
        return _reply(run(own, _only_instruction(message)), message)


def _only_instruction(message: Message) -> ClientInstruction:
    """Return what a message for a node with one client asks for."""
    asked = dict(wire.unpack_instructions(message.content))
    if list(asked) != [None]:
        raise ValueError(
            f"The message is for {_named(asked)}, but this node is one client. "
            "A node that hosts several needs client_app(client_fn, num_clients=...)."
        )
    return asked[None]


def _reply(reply: RawReply, message: Message) -> Message:
    return Message(wire.pack_replies({None: reply}), reply_to=message)


def _named(asked: Iterable[int | None]) -> str:
    names = ["its client" if label is None else f"client {label}" for label in asked]
    return ", ".join(names[:6]) or "nobody"


def identity(context: Context) -> dict[str, Any]:
    """Return who a client is, for Flower's legacy API: what `get_properties` answers."""
    partition = context.node_config.get("partition-id")
    if partition is None:
        return {}
    total = context.node_config.get("num-partitions", 0)
    return {wire.CLIENT_ID: int(partition), wire.NUM_CLIENTS: int(total)}


def _fit(client: NumPyClient, instruction: ClientInstruction) -> RawReply:
    if instruction.config.get(wire.COLLECT):
        return _personal(client)
    arrays, num_examples, metrics = client.fit(instruction.flat(), instruction.full_config())
    names = instruction.upload_names()
    if len(arrays) != len(names):
        raise ValueError(
            f"{type(client).__name__}.fit returned {len(arrays)} arrays, expected {len(names)}: "
            f"{', '.join(names)}."
        )
    named = dict(zip(names, arrays, strict=True))
    return RawReply(named, _numbers(metrics) | {wire.NUM_EXAMPLES: num_examples})


def _personal(client: NumPyClient) -> RawReply:
    """Return a client's personal model, as it travels, under the names of its arrays."""
    read = getattr(client, "personal_arrays", None)
    if read is None:
        raise ValueError(
            f"{type(client).__name__} has no personal_arrays(), so there is no personal model to "
            "send. Start the run without collect=True, or give the client one."
        )
    travelling = getattr(client, "travelling", dict)
    return RawReply(travelling(read()), {wire.NUM_EXAMPLES: 1})


def _evaluate(client: NumPyClient, instruction: ClientInstruction) -> RawReply:
    loss, num_examples, metrics = client.evaluate(instruction.flat(), instruction.full_config())
    return RawReply(None, {"loss": loss} | _numbers(metrics) | {wire.NUM_EXAMPLES: num_examples})


def _numbers(metrics: dict[str, Any]) -> dict[str, int | float]:
    return {
        key: int(value) if isinstance(value, bool) else value
        for key, value in metrics.items()
        if isinstance(value, int | float)
    }


def _numpy_client(client: Any, source: str = "client_fn returned") -> NumPyClient:
    client = getattr(client, "numpy_client", client)  # what NumPyClient.to_client() wraps
    if not isinstance(client, NumPyClient):
        raise TypeError(
            f"{source} a {type(client).__name__}, expected a NumPyClient or its to_client()."
        )
    return client


def _split_state(state: RecordDict) -> dict[int, dict[str, Any]]:
    """Return the state of a node's hosted clients by client id; the keys end in ``@ID``."""
    parts: dict[int, dict[str, Any]] = {}
    for key, record in state.items():
        name, _, client_id = key.rpartition("@")
        parts.setdefault(int(client_id), {})[name] = record
    return parts


def _own_context(context: Context, client_id: int, total: int, state: Mapping[str, Any]) -> Context:
    """Return a hosted client's own context: its partition id and its part of the node's state."""
    return Context(
        run_id=context.run_id,
        node_id=context.node_id,
        node_config={
            **context.node_config,
            "partition-id": client_id,
            "num-partitions": total,
        },
        state=RecordDict(dict(state)),
        run_config=context.run_config,
    )
