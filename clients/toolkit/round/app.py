"""Run `NumPyClient`s under Flower's current message API, one or many on a node."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from numpy.typing import NDArray

from fl_admm_strategies.maths.checks import check_choice, listing
from fl_admm_strategies.runtime.common.collector import collector_paused, only_new_collected
from fl_admm_strategies.runtime.common.interrupts import Interrupted
from fl_admm_strategies.runtime.messages import records as wire
from fl_admm_strategies.runtime.messages.identity import is_simulated
from fl_admm_strategies.runtime.messages.packing import pack_replies, unpack_instructions
from fl_admm_strategies.runtime.messages.records import ClientInstruction, RawReply, describe, owned

from ..errors import plain_errors
from ..solving.steps import Choice
from .mods import through
from .residents import Residents

ClientFn = Callable[[Context], Any]
Run = Callable[[NumPyClient, ClientInstruction], RawReply]
Jobs = dict[int, tuple[NumPyClient, ClientInstruction]]
RunAll = Callable[[Jobs], dict[int, RawReply]]

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
        ``generator`` is seeded in every round). Clients of a class of your own are made anew, and
        so are those whose models do not fit into 256 MiB with all others'. It takes `num_clients`.
    may_collect : bool or callable (default: False)
        Whether the server may fetch what its method leaves with a client, the personal model, as
        ``start(collect=True)`` does. A callable gets the node's context, for the site to decide:
        ``lambda context: bool(context.node_config.get("may-collect"))``. In a simulation the server
        always may: there are no sites.
    mods : sequence of callable, optional
        Flower's mods, or your own ``mod(message, context, call_next)``, around every client, the
        first outermost; of hosted clients each gets a message of its own. A mod sees the first
        group of arrays that the client receives, and its upload. Clients with mods train one by
        one. Handlers of your own give them to `answer`. docs/composition.md says which methods go
        with which mods.

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
    if mods and cohort is True:
        raise ValueError(
            "cohort is True beside mods, expected 'auto' or False: a mod calls one client and "
            "waits for its reply, so that clients cannot train together. Leave one of them out."
        )
    app = ClientApp()
    residents = Residents(secrets.token_hex()) if keep_clients else None

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
        allowed = may_collect(context) if callable(may_collect) else may_collect
        if num_clients is None:
            with plain_errors():
                client = _numpy_client(client_fn(context))
            return answer(client, message, may_collect=allowed, mods=mods, context=context)
        clients, total = hosted(context)
        assert clients is not None
        with collector_paused():
            asked = dict(unpack_instructions(message.content))
        if not asked or not asked.keys() <= ({None} if len(clients) == 1 else set(clients)):
            raise ValueError(
                f"The message is for {_named(asked)}, but this node hosts "
                f"{listing(clients)} of {total} clients. Server and nodes must be told the same "
                "number of clients and nodes."
            )
        _check_consent(asked.values(), allowed)
        labels = {clients[0] if label is None else label: label for label in asked}
        choice: Choice = False
        if not mods:
            choice = cohort(context) if callable(cohort) else cohort
            check_choice("cohort", choice, ("auto", True, False))
        if choice is True or (choice == "auto" and total >= LEAST_COHORT):
            run_all, at_once = partial(_driven, run, choice), TOGETHER
        else:
            run_all, at_once = partial(_one_by_one, mods, message, context, run), 1
        instructions = {client: asked[label] for client, label in labels.items()}
        replies: dict[Any, RawReply] = {}
        hosted_replies = run_hosted(
            client_fn, instructions, context, total, run_all, at_once, residents
        )
        with only_new_collected():
            for client_id, reply in hosted_replies:
                replies[labels[client_id]] = reply
        with collector_paused():
            return Message(pack_replies(replies), reply_to=message)

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
        The reply.

    Raises
    ------
    ValueError
        If the message is packed for several clients, or asks for what the client may not give.

    Examples
    --------
    >>> app = client_app()
    >>> @app.train()
    ... def train(msg: Message, context: Context) -> Message:
    ...     train, _ = load_data(context.node_config["partition-id"])
    ...     return answer(FPFCClient(context, Net(), train, nn.CrossEntropyLoss()), msg)
    """
    kind = message.metadata.message_type.partition(".")[0]
    if kind not in (MessageType.TRAIN, MessageType.EVALUATE):
        raise ValueError(f"The message is of type {kind!r}, expected 'train' or 'evaluate'.")
    run = _fit if kind == MessageType.TRAIN else _evaluate
    client = _numpy_client(client, "answer() was given")
    instruction = _only_instruction(message)
    _check_consent([instruction], may_collect)
    mine: Any = context or getattr(client, "context", None)
    with plain_errors():
        reply = through(mods, message, mine, instruction, partial(run, client))
        return Message(pack_replies({None: reply}), reply_to=message)


def run_hosted(
    client_fn: ClientFn,
    asked: Mapping[int, ClientInstruction],
    context: Context,
    total: int,
    run_all: RunAll,
    at_once: int,
    residents: Residents | None = None,
) -> Iterator[tuple[int, RawReply]]:
    """Have the hosted clients of one message do what they are asked; yield what they reply.

    A client that raises, whatever it raises, fails alone.

    Parameters
    ----------
    client_fn : callable
    asked : mapping of client id to ClientInstruction
        The arrays are read-only views of the message.
    context : Context
        The node's. A client that has not raised leaves its state in it.
    total : int
        Clients of the federation.
    run_all : callable
        Has some clients do their work.
    at_once : int
        How many clients are made at a time; no more of them, and of their replies, are in memory.
    residents : Residents, optional
        Keeps clients for the next message.

    Yields
    ------
    client : int
    reply : RawReply
    """

    def make(fields: dict[str, Any]) -> tuple[NumPyClient, Context]:
        hosted = Context(**fields | {"state": RecordDict(fields["state"])})
        return _numpy_client(client_fn(hosted)), hosted

    states = _split_state(context.state)
    waiting = list(asked.items())
    for start in range(0, len(waiting), at_once):
        jobs: Jobs = {}
        replies: dict[int, RawReply] = {}
        contexts: dict[int, Context] = {}
        some = waiting[start : start + at_once]
        for client_id, instruction in some:
            place = {**context.node_config, "partition-id": client_id, "num-partitions": total}
            fields = vars(context) | {"node_config": place, "state": states.get(client_id, {})}
            made = _alone(make if residents is None else partial(residents.client, make), fields)
            if isinstance(made, RawReply):
                replies[client_id] = made
            else:
                client, contexts[client_id] = made
                jobs[client_id] = client, instruction
        replies |= run_all(jobs)
        for client_id in jobs:
            failed = replies[client_id].error is not None
            if not failed:
                for key in states.get(client_id, {}):
                    del context.state[f"{key}@{client_id}"]
                for key, record in contexts[client_id].state.items():
                    context.state[f"{key}@{client_id}"] = record
            if residents is not None:
                residents.leave(client_id, failed)
        jobs.clear()
        for client_id, _ in some:
            yield client_id, replies.pop(client_id)


T = TypeVar("T")


def _alone(work: Callable[..., T], *given: Any) -> T | RawReply:
    """Do a client's work; where it raises, whatever it raises, that client fails alone."""
    try:
        return work(*given)
    except Interrupted:
        raise
    except BaseException as error:
        return RawReply(error=describe(error))


def _one_by_one(
    mods: Sequence[Mod], message: Message, context: Context, run: Run, jobs: Jobs
) -> dict[int, RawReply]:
    """Have clients do their work through mods, where nothing else can change an upload."""

    def work(client: Any, instruction: ClientInstruction) -> RawReply:
        client.seals = bool(mods)
        own = getattr(client, "context", context)
        return through(mods, message, own, instruction, partial(run, client))

    return {client_id: _alone(work, *job) for client_id, job in jobs.items()}


def _driven(run: Run, choice: Choice, jobs: Jobs) -> dict[int, RawReply]:
    """Have clients train or evaluate: those with one driver together, all others alone."""
    name, reply = ("together", _uploaded) if run is _fit else ("evaluate_together", _evaluated)
    by_driver: dict[Any, list[int]] = {}
    for client_id, (client, instruction) in jobs.items():
        client.seals = False  # type: ignore[attr-defined]
        driver = None if instruction.config.get(wire.COLLECT) else getattr(client, name, None)
        if driver is not None:
            by_driver.setdefault(driver, []).append(client_id)
    found: dict[int, Any] = {}
    for driver, ids in by_driver.items():
        asked = [jobs[client_id] for client_id in ids]
        work = [(client, _received(client, one), one.full_config()) for client, one in asked]
        found |= zip(ids, driver(work, choice), strict=True)
    replies: dict[int, RawReply] = {}
    for client_id, job in jobs.items():
        if client_id not in found:
            replies[client_id] = _alone(run, *job)
        elif isinstance(result := found[client_id], BaseException):
            replies[client_id] = RawReply(error=describe(result))
        else:
            replies[client_id] = _alone(reply, result, *job)
    return replies


def _check_consent(asked: Iterable[ClientInstruction], may_collect: bool) -> None:
    """Raise ValueError if the server wants personal models that it may not have."""
    if any(one.config.get(wire.COLLECT) for one in asked) and not (may_collect or is_simulated()):
        raise ValueError(
            "The server asks for the personal model, which its method leaves with the client, and "
            "this site does not give it. If it is to: client_app(client_fn, may_collect=True)."
        )


def _only_instruction(message: Message) -> ClientInstruction:
    """Return what a message for a node with one client asks for."""
    asked = dict(unpack_instructions(message.content))
    if list(asked) != [None]:
        raise ValueError(
            f"The message is for {_named(asked)}, but this node is one client. "
            "A node that hosts several needs client_app(client_fn, num_clients=...)."
        )
    return asked[None]


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
    result = client.fit(_received(client, instruction), instruction.full_config())
    return _uploaded(result, client, instruction)


def _uploaded(result: Any, client: NumPyClient, instruction: ClientInstruction) -> RawReply:
    """Return what a client's `fit` returned as a reply."""
    arrays, num_examples, metrics = result
    names = instruction.upload_names()
    if len(arrays) != len(names):
        raise ValueError(
            f"{type(client).__name__}.fit returned {len(arrays)} arrays, expected {len(names)}: "
            f"{', '.join(names)}."
        )
    named = {n: _numeric(client, n, a) for n, a in zip(names, arrays, strict=True)}
    return RawReply(named, wire.numbers_among(metrics) | {wire.NUM_EXAMPLES: num_examples})


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


def _evaluate(client: NumPyClient, instruction: ClientInstruction) -> RawReply:
    result = client.evaluate(_received(client, instruction), instruction.full_config())
    return _evaluated(result, client, instruction)


def _evaluated(result: Any, client: NumPyClient, instruction: ClientInstruction) -> RawReply:
    """Return what a client's `evaluate` returned as a reply."""
    loss, num_examples, metrics = result
    return RawReply(
        None, {"loss": loss} | wire.numbers_among(metrics) | {wire.NUM_EXAMPLES: num_examples}
    )


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
