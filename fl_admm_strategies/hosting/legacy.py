"""Flower's legacy API: its clients as a grid, so that a run has one loop."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future
from inspect import signature
from threading import Thread
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.common import (
    EvaluateIns,
    FitIns,
    GetPropertiesIns,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.constant import ErrorCode
from flwr.server import History, Server, SimpleClientManager
from flwr.server.client_manager import ClientManager
from flwr.serverapp.strategy import Result

from ..runtime.messages import records as wire
from ..runtime.messages.packing import pack_replies, unpack_instructions
from ..runtime.messages.records import RawReply
from ..runtime.strategy import StatefulStrategy
from .grid import LocalGrid

_DEFAULT_TIMEOUT = 3600.0  # seconds, that of `StatefulStrategy.start`


class LegacyServer(Server):
    """Run a strategy of this library in a project on Flower's legacy API.

    The run is that of `StatefulStrategy.start`, whose results are read from the strategy
    afterwards. The clients are run by ``ClientApp(client_fn=...)``, one on each node.

    Parameters
    ----------
    strategy : StatefulStrategy
        The strategy.
    initial_arrays : ArrayRecord
        The initial model, e.g. ``ArrayRecord(model.state_dict())``.
    **options
        Those of `StatefulStrategy.start`, such as ``evaluate_fn`` or ``checkpoint_dir``. The number
        of rounds and the timeout are those of Flower's `ServerConfig`.

    Examples
    --------
    >>> strategy = FPFC(SmoothedSCAD(lam=0.6))
    >>> def server_fn(context: Context) -> ServerAppComponents:
    ...     server = LegacyServer(strategy, ArrayRecord(model.state_dict()))
    ...     return ServerAppComponents(server=server, config=ServerConfig(num_rounds=200))
    """

    def __init__(
        self, strategy: StatefulStrategy, initial_arrays: ArrayRecord, **options: Any
    ) -> None:
        if not isinstance(strategy, StatefulStrategy):
            raise TypeError(
                f"strategy is a {type(strategy).__name__}, expected one of this library, e.g. FPFC."
            )
        super().__init__(client_manager=SimpleClientManager())
        signature(strategy.start).bind(None, initial_arrays, 1, _DEFAULT_TIMEOUT, **options)
        self._of_library = strategy
        self._initial_arrays = initial_arrays
        self._options = options

    def fit(self, num_rounds: int, timeout: float | None) -> tuple[History, float]:
        """Run the strategy over the connected clients.

        Parameters
        ----------
        num_rounds : int
            The rounds, including those of a resumed run.
        timeout : float or None
            Seconds for the replies of a phase; an hour if None.

        Returns
        -------
        tuple of History and float
            The aggregated metrics, and the seconds that the run took.
        """
        began = time.monotonic()
        grid = ProxyGrid(self.client_manager())
        seconds = _DEFAULT_TIMEOUT if timeout is None else timeout
        result = self._of_library.start(
            grid, self._initial_arrays, num_rounds, seconds, **self._options
        )
        return _history(result), time.monotonic() - began


def _history(result: Result) -> History:
    """Return the aggregated metrics of a run as the legacy API has them."""
    history, metrics = History(), dict[str, Any]()
    for server_round, record in result.train_metrics_clientapp.items():
        metrics = dict(record)
        history.add_metrics_distributed_fit(server_round, metrics)
    for server_round, record in result.evaluate_metrics_clientapp.items():
        metrics = dict(record)
        if "loss" in metrics:
            history.add_loss_distributed(server_round, metrics["loss"])
        history.add_metrics_distributed(server_round, metrics)
    for server_round, record in result.evaluate_metrics_serverapp.items():
        metrics = dict(record)
        if "loss" in metrics:
            history.add_loss_centralized(server_round, metrics["loss"])
        history.add_metrics_centralized(server_round, metrics)
    return history


class ProxyGrid(LocalGrid):
    """A grid whose nodes are the proxies of a legacy client manager, one client each.

    Every message has a thread of its own, so that a silent node does not hold up the others.
    """

    def __init__(self, manager: ClientManager) -> None:
        super().__init__()
        self._manager = manager
        self._proxies: dict[int, Any] = {}  # of the nodes that were connected at the last look

    def get_node_ids(self) -> list[int]:
        """Return the ids of the connected nodes."""
        self._proxies = {int(cid): proxy for cid, proxy in self._manager.all().items()}
        return sorted(self._proxies)

    def get_nodes(self) -> Iterable[Any]:
        """Return the connected nodes with their public keys, as the grid below has them."""
        if not self._proxies:
            return []
        # Flower's proxies are of nodes of a grid; its type for them is not public.
        nodes: Iterable[Any] = next(iter(self._proxies.values())).grid.get_nodes()
        return nodes

    def _submit(self, message: Message) -> Future[Message]:
        reply: Future[Message] = Future()
        # A thread that does not keep the process alive, as those of a pool would.
        Thread(target=lambda: reply.set_result(self._reply(message)), daemon=True).start()
        return reply

    def _reply(self, message: Message) -> Message:
        try:
            return Message(self._content(message), reply_to=message)
        except Exception as error:  # whatever the client raises
            return Message(Error(ErrorCode.UNKNOWN, str(error)), reply_to=message)

    def _content(self, message: Message) -> RecordDict:
        """Have a message's client do what it asks for, by the legacy API; return its reply."""
        node = message.metadata.dst_node_id
        proxy, group = self._proxies[node], int(message.metadata.group_id)
        if message.metadata.message_type == MessageType.QUERY:
            found = proxy.get_properties(GetPropertiesIns({}), None, group).properties
            properties: dict[str, Any] = {
                wire.CLIENT_IDS: [found.get(wire.CLIENT_ID, node)],
                wire.NUM_CLIENTS: found.get(wire.NUM_CLIENTS, 0),
            }
            return RecordDict({wire.CONFIG: ConfigRecord(properties)})
        ((_, instruction),) = unpack_instructions(message.content)
        parameters = ndarrays_to_parameters(instruction.flat())
        config = instruction.full_config()
        if message.metadata.message_type == MessageType.TRAIN:
            trained = proxy.fit(FitIns(parameters, config), None, group)
            names, uploaded = instruction.upload_names(), parameters_to_ndarrays(trained.parameters)
            if len(uploaded) != len(names):
                raise ValueError(f"it sent {len(uploaded)} arrays, expected {len(names)}")
            metrics = {**trained.metrics, wire.NUM_EXAMPLES: trained.num_examples}
            arrays = dict(zip(names, uploaded, strict=True))
            return pack_replies({None: RawReply(arrays, wire.numbers_among(metrics))})
        evaluated = proxy.evaluate(EvaluateIns(parameters, config), None, group)
        metrics = {**evaluated.metrics, wire.NUM_EXAMPLES: evaluated.num_examples}
        metrics["loss"] = evaluated.loss
        return pack_replies({None: RawReply(None, wire.numbers_among(metrics))})
