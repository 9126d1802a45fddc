"""Run `NumPyClient`s under Flower's current message API, one or many on a node."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.common.constant import ErrorCode
from numpy.typing import NDArray

from fl_admm_strategies.maths.checks import check_choice, listing
from fl_admm_strategies.runtime.common.collector import collector_paused, only_new_collected
from fl_admm_strategies.runtime.common.interrupts import Interrupted
from fl_admm_strategies.runtime.messages import records as wire
from fl_admm_strategies.runtime.messages.identity import is_simulated
from fl_admm_strategies.runtime.messages.packing import pack_replies, unpack_instructions
from fl_admm_strategies.runtime.messages.records import ClientInstruction, RawReply, owned

from ..errors import reported
from ..solving.steps import Choice, Job
from .mods import mods_for, through
from .residents import Residents

ClientFn = Callable[[Context], Any]

LEAST_COHORT = 16
"""Clients of a federation from which on "auto" trains them together (docs/scaling.md)."""
TOGETHER = 256
"""Clients of a cohort that are in memory at a time, with their models and loaders."""


def client_app(
    client_fn: ClientFn | None = None,
    *,
    num_clients: int | Callable[[Context], int] | None = None,
    cohort: Choice | Callable[[Context], Choice] = "auto",
    keep_clients: bool = False,
    may_collect: bool | Callable[[Context], bool] = False,
    mods: Sequence[Mod] = (),
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
    cohort : {"auto"} or bool or callable (default: "auto")
        Whether the clients of a node train together, in one stack of models, where these and their
        losses allow it (docs/scaling.md): equal to rounding, several times faster for small models.
        "auto" does so with 16 clients or more and models that gain by it. It takes `num_clients`.
        A callable gets the node's context.
    keep_clients : bool (default: False)
        Whether a process keeps the hosted clients that `client_fn` made, in place of making them
        anew for every message: the same bits in less time, where `client_fn` gives a client the
        same data in every round, and loaders without random numbers of their own (a train loader's
        ``generator`` is seeded in every round). It takes `num_clients`. Made anew are clients of a
        class of your own, and those with models that do not fit into 256 MiB with all others'.
    may_collect : bool or callable (default: False)
        Whether the server may fetch what its method leaves with a client, the personal model, as
        ``start(collect=True)`` does. A callable gets the node's context, for the site to decide:
        ``lambda context: bool(context.node_config.get("may-collect"))``. In a simulation the server
        always may: there are no sites.
    mods : sequence of callable, optional
        Flower's mods, or your own ``mod(message, context, call_next)``, around a client that has a
        node of its own, the first outermost. They see no handshakes. Handlers of your own give them
        to `answer`. docs/composition.md says which methods go with which mods.

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
    if keep_clients and num_clients is None:
        raise ValueError(
            "keep_clients is True without num_clients: a node that is one client makes it anew for "
            "every message. Give num_clients, or leave keep_clients out."
        )
    if not callable(cohort):
        check_choice("cohort", cohort, ("auto", True, False))
    if mods and client_fn is None:
        raise ValueError(
            "mods are given without a client_fn. Handlers of your own give them to answer(client, "
            "message, mods=[...], context=context)."
        )
    if mods and num_clients is not None:
        raise ValueError(
            "mods are given beside num_clients: a mod takes every message for one client. Run one "
            "client on each node, or leave one of them out."
        )
    app = ClientApp()
    host = _Host(client_fn, num_clients, cohort, may_collect, mods)
    if keep_clients:
        host.residents = Residents(secrets.token_hex())
    app.query()(host.identify)
    if client_fn is not None:
        handle = host.handle_one if num_clients is None else host.handle_several
        app.train()(handle)
        app.evaluate()(handle)
    return app


def answer(
    client: Any,
    message: Message,
    *,
    may_collect: bool = False,
    mods: Sequence[Mod] = (),
    context: Context | None = None,
) -> Message:
    """Answer a train or evaluate message with a client, in a handler of one's own.

    Parameters
    ----------
    client : NumPyClient
        Made with the handler's context.
    message : Message
        The handler's message, for one client.
    may_collect : bool (default: False)
        As in `client_app`.
    mods : sequence of callable, optional
        As in `client_app`.
    context : Context, optional
        The handler's, which mods get. By default the client's own.

    Returns
    -------
    Message
        The reply; where the client raises, one that says what.

    Examples
    --------
    >>> app = client_app()
    >>> @app.train()
    ... def train(msg: Message, context: Context) -> Message:
    ...     train, _ = load_data(context.node_config["partition-id"])
    ...     return answer(FPFCClient(context, Net(), train, nn.CrossEntropyLoss()), msg)
    """
    client = _numpy_client(client, "answer() was given")
    own: Any = context or getattr(client, "context", None)
    host = _Host(lambda _: client, None, False, may_collect, mods)
    return host.handle_one(message, own)


@dataclass
class _Host:
    """The clients of a node, and how they answer messages.

    Attributes are the parameters of `client_app`, and:

    Attributes
    ----------
    residents : Residents or None
        Keeps clients from message to message.
    """

    client_fn: Any
    num_clients: int | Callable[[Context], int] | None
    cohort: Choice | Callable[[Context], Choice]
    may_collect: bool | Callable[[Context], bool]
    mods: Sequence[Mod]
    residents: Residents | None = None

    def identify(self, message: Message, context: Context) -> Message:
        """Say which clients the node hosts."""
        clients, total = self._clients(context)
        identity = ConfigRecord()
        if clients is not None:
            identity[wire.CLIENT_IDS] = clients
            identity[wire.NUM_CLIENTS] = total
        return Message(RecordDict({wire.CONFIG: identity}), reply_to=message)

    def handle_one(self, message: Message, context: Context) -> Message:
        """Have the node's only client do what a message asks for; what it raises is an error reply.

        Raised, it would be logged with the frames of each engine that it comes through.
        """
        before, failed = dict(context.state), dict[Any, RawReply]()
        with _failing_alone(0, failed):
            client, trains = _numpy_client(self.client_fn(context)), _trains(message)
            given = _only_instruction(message, self._may_collect(context))
            if used := mods_for(given, trains, self.mods):

                def innermost(seen: Message, own: Context) -> Message:
                    asked = _only_instruction(seen, self._may_collect(own))
                    reply = _reply(client, asked, trains)
                    return Message(pack_replies({None: reply}), reply_to=seen)

                return through(used, message, context, innermost)
            reply = _reply(client, given, trains)
            return Message(pack_replies({None: reply}), reply_to=message)
        context.state = RecordDict(before)
        failure = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, failed[0].error)
        return Message(failure, reply_to=message)

    def handle_several(self, message: Message, context: Context) -> Message:
        """Have the clients do what a message asks for; one that raises fails alone."""
        clients, total = self._clients(context)
        assert clients is not None
        with collector_paused():
            instructions = dict(unpack_instructions(message.content))
        if list(instructions) == [None] and len(clients) == 1:  # one client needs no label
            by_client: dict[Any, ClientInstruction] = {clients[0]: instructions[None]}
        elif instructions and instructions.keys() <= set(clients):
            by_client = dict(instructions)
        else:
            raise ValueError(
                f"The message is for {_named(instructions)}, but this node hosts "
                f"{listing(clients)} of {total} clients. Server and nodes must be told the same "
                "number of clients and nodes."
            )
        _check_consent(by_client.values(), self._may_collect(context))
        choice = self.cohort(context) if callable(self.cohort) else self.cohort
        together = choice is True or (choice == "auto" and total >= LEAST_COHORT)
        at_once = TOGETHER if together else 1  # no more of them are in memory
        states, waiting, trains = _split_state(context.state), list(by_client), _trains(message)
        replies: dict[Any, RawReply] = {}
        with only_new_collected():
            for start in range(0, len(waiting), at_once):
                here: dict[int, tuple[Any, Context]] = {}
                for client_id in waiting[start : start + at_once]:
                    with _failing_alone(client_id, replies):
                        state = states.get(client_id, {})
                        here[client_id] = self._client(client_id, total, context, state)
                if together:
                    jobs = {
                        client_id: (here[client_id][0], by_client[client_id]) for client_id in here
                    }
                    _train_together(trains, choice, jobs, replies)
                for client_id, (client, own) in here.items():
                    with _failing_alone(client_id, replies):
                        if client_id not in replies:
                            replies[client_id] = _reply(client, by_client[client_id], trains)
                    failed = replies[client_id].error is not None
                    if not failed:
                        for key in states.get(client_id, {}):
                            del context.state[f"{key}@{client_id}"]
                        for key, record in own.state.items():
                            context.state[f"{key}@{client_id}"] = record
                    if self.residents is not None:
                        self.residents.leave(client_id, failed)
        if None in instructions:
            replies = {None: replies[clients[0]]}
        with collector_paused():
            return Message(pack_replies(replies), reply_to=message)

    def _clients(self, context: Context) -> tuple[list[int] | None, int]:
        """Return the ids of a node's clients (None: it cannot tell) and the total."""
        partition = context.node_config.get("partition-id")
        nodes = int(context.node_config.get("num-partitions", 0))
        total = self.num_clients(context) if callable(self.num_clients) else self.num_clients
        if total is None:
            return (None, 0) if partition is None else ([int(partition)], nodes)
        if partition is None or not 0 <= int(partition) < nodes:
            raise ValueError(
                f"node_config says partition-id={partition}, num-partitions={nodes}; hosting "
                f"{total} clients needs 0 <= partition-id < num-partitions."
            )
        node = int(partition)
        return list(range(node * total // nodes, (node + 1) * total // nodes)), total

    def _may_collect(self, context: Context) -> bool:
        return self.may_collect(context) if callable(self.may_collect) else self.may_collect

    def _client(
        self, client_id: int, total: int, node: Context, state: dict[str, Any]
    ) -> tuple[NumPyClient, Context]:
        """Return a client, kept or made, and its context."""
        place = {"partition-id": client_id, "num-partitions": total}
        fields = vars(node) | {"node_config": {**node.node_config, **place}, "state": state}
        if self.residents is not None:
            return self.residents.client(self._made, fields)
        return self._made(fields)

    def _made(self, fields: dict[str, Any]) -> tuple[NumPyClient, Context]:
        context = Context(**fields | {"state": RecordDict(fields["state"])})
        return _numpy_client(self.client_fn(context)), context


@contextmanager
def _failing_alone(client_id: int, replies: dict[Any, RawReply]) -> Iterator[None]:
    """Do a client's work; whatever it raises is the reply of that client alone."""
    try:
        yield
    except Interrupted:
        raise
    except BaseException as error:
        replies[client_id] = RawReply(error=reported(error))


def _train_together(
    trains: bool,
    choice: Choice,
    jobs: dict[int, tuple[Any, ClientInstruction]],
    replies: dict[Any, RawReply],
) -> None:
    """Add the replies of those clients that can train, or be evaluated, together."""
    work: dict[Any, dict[int, Job]] = {}
    for client_id, (client, instruction) in jobs.items():
        driver = client.driver(trains) if hasattr(client, "driver") else None
        if driver is not None and not instruction.config.get(wire.COLLECT):
            given = _received(client, instruction), instruction.full_config()
            work.setdefault(driver, {})[client_id] = client, *given
    for driver, of_clients in work.items():
        results = driver(list(of_clients.values()), choice, not trains)
        for client_id, result in zip(of_clients, results, strict=True):
            with _failing_alone(client_id, replies):
                if isinstance(result, BaseException):
                    raise result
                replies[client_id] = _checked(trains, *jobs[client_id], result)


def _trains(message: Message) -> bool:
    """Return whether a message is for training, and not for an evaluation."""
    return message.metadata.message_type.partition(".")[0] == MessageType.TRAIN


def _check_consent(asked: Iterable[ClientInstruction], may_collect: bool) -> None:
    """Raise ValueError if the server wants personal models that it may not have."""
    if any(one.config.get(wire.COLLECT) for one in asked) and not (may_collect or is_simulated()):
        raise ValueError(
            "The server asks for the personal model, which its method leaves with the client, and "
            "this site does not give it. If it is to: client_app(client_fn, may_collect=True)."
        )


def _only_instruction(message: Message, may_collect: bool) -> ClientInstruction:
    """Return what a message for a node with one client asks for."""
    instructions = dict(unpack_instructions(message.content))
    if list(instructions) != [None]:
        raise ValueError(
            f"The message is for {_named(instructions)}, but this node is one client. "
            "A node that hosts several needs client_app(client_fn, num_clients=...)."
        )
    _check_consent(instructions.values(), may_collect)
    return instructions[None]


def _named(asked: Iterable[int | None]) -> str:
    names = ["its client" if label is None else f"client {label}" for label in asked]
    return ", ".join(names[:6]) or "no client"


def _reply(client: NumPyClient, instruction: ClientInstruction, trains: bool) -> RawReply:
    """Have a client do what it is asked; return what it replies."""
    if trains and instruction.config.get(wire.COLLECT):
        return _personal(client)
    run: Any = client.fit if trains else client.evaluate
    result = run(_received(client, instruction), instruction.full_config())
    return _checked(trains, client, instruction, result)


def _checked(
    trains: bool, client: NumPyClient, instruction: ClientInstruction, result: Any
) -> RawReply:
    """Return what a client's `fit` or `evaluate` returned as a reply."""
    first, num_examples, metrics = result
    numbers = wire.numbers_among(metrics) | {wire.NUM_EXAMPLES: num_examples}
    if not trains:
        return RawReply(None, {"loss": first} | numbers)
    names = instruction.upload_names()
    if len(first) != len(names):
        raise ValueError(
            f"{type(client).__name__}.fit returned {len(first)} arrays, expected {len(names)}: "
            f"{', '.join(names)}."
        )
    return RawReply({n: _numeric(client, n, a) for n, a in zip(names, first, strict=True)}, numbers)


def _received(client: NumPyClient, instruction: ClientInstruction) -> list[NDArray[Any]]:
    """Return the arrays of an instruction; copied for a client that may change what it gets."""
    arrays = instruction.flat()
    return arrays if getattr(client, "only_reads", False) else [array.copy() for array in arrays]


def _numeric(client: NumPyClient, name: str, array: Any) -> NDArray[Any]:
    """Return an array that a client uploads; raise ValueError unless it holds real numbers.

    It is no view of a model that another client goes on training.
    """
    found = np.asarray(array)
    if found.dtype.kind not in "biuf":
        raise ValueError(
            f"{type(client).__name__}.fit returned an array {name!r} of dtype {found.dtype}, "
            "expected real numbers."
        )
    return owned(found)


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
