"""The base of every strategy here: all that is not mathematics.

An algorithm is a subclass that answers a few questions about its own state: how it starts
(`init_state`), what a client gets (`train_orders`, `evaluate_orders`), what a set of replies
changes (`update`), what it looks like as plain arrays (`state_arrays`, `load_state_arrays`). Who
the clients are, who is sampled, what a message looks like, which reply is believed, what is logged,
when a run stops: that is here, once, and knows no algorithm by name.
"""

from __future__ import annotations

import os
import time
import uuid
from abc import abstractmethod
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import INFO, WARNING
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from . import wire
from .blocks import Spec, prefixed, spec_of, under
from .checkpoints import Checkpoint, Checkpoints, as_text, changed_settings, differences
from .checks import check_count, check_fraction, check_positive, listing
from .nodes import ClientDirectory
from .progress import progress_bar
from .randomness import client_seed, generator_from_array, generator_to_array, sample
from .replies import sort_out, weighted_means
from .wire import Arrays, ClientReply, Order, Reply, Scalar

Metrics = dict[str, float]

StopRule = Callable[[int, Mapping[str, float]], bool]
Exchange = Callable[[dict[int, Order], str], Iterable[ClientReply]]


_DURABLE = "base/durable"
_STATE = "state/"  # before the names of the algorithm's own arrays


class Traffic(NamedTuple):
    """Bytes of arrays that a round of training moved, summed over the clients.

    Attributes
    ----------
    down : int
        Sent to the clients.
    up : int
        Uploaded by them, in replies that were accepted.
    """

    down: int
    up: int


class StatefulStrategy(Strategy):
    """Base class: a Flower strategy that keeps state for every client.

    State is keyed by a stable client id: the partition id in simulations and wherever a node's
    config has one, the node id otherwise. One node may host many clients; with one client a node,
    "client" and "node" mean the same and the parameters below mean what they mean in `FedAvg`.

    Parameters
    ----------
    fraction_train : float (default: 1.0)
        Fraction of the clients that train in a round, drawn uniformly without replacement.
    fraction_evaluate : float (default: 1.0)
        Fraction of the clients that evaluate in an evaluation round. 0 switches evaluation off.
    min_train_nodes : int (default: 1)
        Train at least so many clients a round, whatever `fraction_train` says.
    min_evaluate_nodes : int (default: 1)
        Evaluate on at least so many clients, unless `fraction_evaluate` is 0.
    min_available_nodes : int (default: 2)
        Clients that must be connected before every phase of a round. Before round 1, nodes that
        know the size of their federation (all simulated ones do) are waited for in full in any
        case.
    node_timeout : float (default: 120.0)
        Seconds to wait for these clients before the run ends with an error that says what to do.
    forget_after : int, optional
        Rounds in a row in which a client is not connected until it has left: from then on it does
        not count in any mean, and should it come back, it is a new client. By default clients
        count as long as the run lasts.
    weighted_by_key : str (default: "num-examples")
        The metric of a reply that holds its number of examples.
    seed : int (default: 0)
        The one seed of the run: client sampling and, through the messages, the clients' own
        randomness follow from it.

    Attributes
    ----------
    client_ids : list of int
        The clients of the run, sorted. Empty before `start`. Clients that connect later are asked
        to train like the others from the next round on, and belong to the run once a reply of
        theirs was accepted.
    num_founders : int
        How many clients the run began with. It stands for m (or p, n) wherever that is a mere scale
        of the objective, so that nobody's step changes when clients come and go; means are over
        those that belong to the run.
    train_metrics, evaluate_metrics : dict of int to dict of int to dict of str to float
        Metrics of every client in every round: ``metrics[server_round][client_id][name]``.
    traffic : dict of int to Traffic
        Bytes of the training messages' arrays by round; round 0 is a hand-shake, where there was
        one. Evaluation is not counted: it is not part of any algorithm.
    accepted_in : dict of int to int
        By client, the round of its last accepted upload; 0 before the first.
    """

    def __init__(
        self,
        *,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 1,
        min_evaluate_nodes: int = 1,
        min_available_nodes: int = 2,
        node_timeout: float = 120.0,
        forget_after: int | None = None,
        weighted_by_key: str = wire.NUM_EXAMPLES,
        seed: int = 0,
    ) -> None:
        check_fraction("fraction_train", fraction_train, zero=False)
        check_fraction("fraction_evaluate", fraction_evaluate, zero=True)
        check_count("min_train_nodes", min_train_nodes, least=1)
        check_count("min_evaluate_nodes", min_evaluate_nodes, least=0)
        check_count("min_available_nodes", min_available_nodes, least=1)
        check_positive("node_timeout", node_timeout)
        if forget_after is not None:
            check_count("forget_after", forget_after, least=1)
        check_count("seed", seed, least=0)
        self.fraction_train = fraction_train
        self.fraction_evaluate = fraction_evaluate
        self.min_train_nodes = min_train_nodes
        self.min_evaluate_nodes = min_evaluate_nodes
        self.min_available_nodes = min_available_nodes
        self.node_timeout = node_timeout
        self.forget_after = forget_after
        self.weighted_by_key = weighted_by_key
        self.seed = seed

        self.client_ids: list[int] = []
        self.num_founders = 0
        self.accepted_in: dict[int, int] = {}
        self.traffic: dict[int, Traffic] = {}
        self.train_metrics: dict[int, dict[int, Metrics]] = {}
        self.evaluate_metrics: dict[int, dict[int, Metrics]] = {}
        self._round = 0  # the last round whose training was aggregated
        self._ever_usable = False
        self._shaken = False  # whether a hand-shake is over, or was before the state was saved
        self._last_refusal = ""
        self._restored: dict[str, NDArray[Any]] | None = None
        self._checkpoints: Checkpoints | None = None
        self._resumed: Checkpoint | None = None
        self._run = ""  # names the run to its clients, through all resumptions
        self._durable: deque[dict[int, int]] = deque()  # accepted_in of every checkpoint kept
        self._past_rounds: list[int] = []  # those before this process, where there is a record
        self._result = Result()
        self._lost: list[int] = []
        self._index: dict[int, int] = {}  # the row of every client in the state
        self._present_in: dict[int, int] = {}  # the last round that found a client connected
        self._newcomers: dict[int, Reply] = {}  # with what they replied to the hand-shake
        self._announced = 0  # the size of the federation as its nodes know it
        self._spec: Spec = {}
        self._in_sync: set[int] = set()
        self._train_rng, self._evaluate_rng = np.random.default_rng(seed).spawn(2)
        self._directory = ClientDirectory({})
        self._asked: dict[int, Order] = {}

    # ------------------------------------------------------------------------------------------
    # The questions an algorithm answers
    # ------------------------------------------------------------------------------------------

    @abstractmethod
    def init_state(self, arrays: Arrays) -> None:
        """Start the state for the clients in `client_ids` from the initial arrays.

        What the state keeps for every client is in the order of `client_ids`; `_index` has the row
        of each.

        Raises
        ------
        ValueError
            If the arrays do not fit the algorithm's settings; the message says how.
        """

    @abstractmethod
    def train_orders(self, server_round: int, client_ids: Sequence[int]) -> dict[int, Order]:
        """Return what each of the sampled clients gets for training."""

    @abstractmethod
    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Change the state by the checked replies of a round, given in the order of client ids.

        It is called once a round, only with at least one reply. Nothing else changes what
        `state_arrays` returns but `handshake`, `start_afresh`, `add_clients` and `remove_clients`.
        """

    @abstractmethod
    def evaluate_orders(self, server_round: int, client_ids: Sequence[int]) -> dict[int, Order]:
        """Return the models to evaluate on each client as groups; the first is the headline."""

    @abstractmethod
    def global_model(self) -> Arrays:
        """Return the global model."""

    @abstractmethod
    def personal_model(self, client_id: int) -> Arrays:
        """Return the model of one client as the server knows it."""

    @abstractmethod
    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the algorithm's state as plain arrays; views will do, `state_dict` copies them."""

    @abstractmethod
    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned; `init_state` has been called before.

        Shapes and dtypes have been compared with those of the present state, except of arrays that
        `may_grow`.
        """

    @abstractmethod
    def hyperparameters(self) -> dict[str, Any]:
        """Return the algorithm's settings for the log, in the order of the constructor."""

    # What most algorithms leave as it is

    def may_grow(self, name: str) -> bool:
        """Return whether a state array's shape follows from the run, not from model and clients."""
        return False

    def reply_spec(self) -> Spec:
        """Return the names, shapes and dtypes of an upload: those of the initial arrays."""
        return self._spec

    def handshake_orders(self, client_ids: Sequence[int]) -> dict[int, Order]:
        """Return what to ask clients before their first round; by default nothing.

        For what the server must know of clients at the start: their numbers of examples, the
        curvature of their losses. It is a training message of round 0 with ``handshake`` set, so
        that it works under both of Flower's APIs. Clients that come later are asked as well.
        """
        return {}

    def handshake_spec(self) -> Spec:
        """Return the names, shapes and dtypes of the arrays in a hand-shake's replies."""
        return {}

    def handshake(self, replies: Mapping[int, Reply]) -> None:
        """Change the state by the checked replies of all clients to the hand-shake."""

    def start_afresh(self, server_round: int, lost: Sequence[int]) -> None:
        """Change the state where clients have lost what they keep themselves.

        From here on they are taken for clients without an accepted upload, and are sent what such
        clients are sent, or what the state holds of them. An algorithm whose state holds something
        of theirs that it can neither send nor take back must make both sides agree here.
        """

    def newcomer_orders(
        self, server_round: int, newcomers: Mapping[int, Reply]
    ) -> dict[int, Order]:
        """Return what sampled clients get for training that do not belong to the run yet.

        `newcomers` has their replies to the hand-shake, without content where there is none. The
        state does not know of them until a reply of theirs was accepted. By default they get what
        the others get, which will do where the state keeps nothing for each client.
        """
        return self.train_orders(server_round, list(newcomers))

    def add_clients(self, newcomers: Mapping[int, Reply], places: Sequence[int]) -> None:
        """Take new clients into the state; `update` with their first replies follows.

        `newcomers` is as in `newcomer_orders`, `places` has for each of them the row before which
        its row goes, as `numpy.insert` counts. `client_ids` and `_index` have them already.
        """

    def remove_clients(self, indices: Sequence[int]) -> None:
        """Take clients with these rows out of the state; `client_ids` is without them already."""

    def round_metrics(self) -> Metrics:
        """Return what only the server can measure of the round that `update` has just taken in.

        Added to the means of the clients' training metrics: a norm of a sum over all clients is no
        mean of theirs.
        """
        return {}

    # ------------------------------------------------------------------------------------------
    # Results
    # ------------------------------------------------------------------------------------------

    @property
    def last_round(self) -> int:
        """The last round whose replies were taken in; 0 before the first."""
        return self._round

    @property
    def global_arrays(self) -> ArrayRecord:
        """The global model as Flower's `ArrayRecord`."""
        self._need_state()
        return wire.to_array_record(self.global_model())

    def personal_arrays(self, client_id: int) -> ArrayRecord:
        """Return the model of one client as Flower's `ArrayRecord`."""
        self._need_state()
        if client_id not in self.client_ids:
            raise KeyError(
                f"There is no client {client_id}; the run knows {listing(self.client_ids)}."
            )
        return wire.to_array_record(self.personal_model(client_id))

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return the whole server state as plain numeric arrays.

        Includes the round, the clients, the shapes of the model, the random generators and the
        algorithm's own arrays. `load_state_dict` of a strategy with the same settings continues
        from it to the same bits.
        """
        return {key: value.copy() for key, value in self._state().items()}

    def _state(self) -> dict[str, NDArray[Any]]:
        """Return the server state; the algorithm's arrays may be views of it."""
        self._need_state()
        state = {
            "base/round": np.array(self._round, dtype=np.int64),
            "base/client_ids": np.array(self.client_ids, dtype=np.uint64),
            "base/num_founders": np.array(self.num_founders, dtype=np.int64),
            "base/announced": np.array(self._announced, dtype=np.int64),
            "base/accepted_in": np.array(list(self.accepted_in.values()), dtype=np.int64),
            "base/present_in": np.array(list(self._present_in.values()), dtype=np.int64),
            "base/train_rng": generator_to_array(self._train_rng),
            "base/evaluate_rng": generator_to_array(self._evaluate_rng),
        }
        return state | prefixed(_STATE, self.state_arrays())

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a `state_dict` at the next `start`.

        `start` compares the clients it finds and the shape of the initial arrays with the state
        before anything happens, and then goes on with the round after the saved one.

        Raises
        ------
        ValueError
            If the state lacks an entry, or one has another shape or dtype than it must.
        """
        clients = np.zeros(np.size(state.get("base/client_ids", ())), np.int64)
        number = np.zeros((), np.int64)
        needed = {
            "base/round": number,
            "base/client_ids": clients.astype(np.uint64),
            "base/num_founders": number,
            "base/announced": number,
            "base/accepted_in": clients,
            "base/present_in": clients,
            "base/train_rng": generator_to_array(self._train_rng),
            "base/evaluate_rng": generator_to_array(self._evaluate_rng),
        }
        if missing := sorted(needed.keys() - state.keys()):
            raise ValueError(
                f"This is not a state of {type(self).__name__}.state_dict(): it lacks {missing}."
            )
        _check_saved(state, needed)
        known = state["base/client_ids"]
        if not len(known) or np.any(known[1:] <= known[:-1]):
            raise ValueError(f"The saved clients are {listing(known.tolist())}, not sorted ids.")
        if negative := [name for name in needed if np.any(state[name] < 0)]:
            raise ValueError(f"The saved {negative} hold numbers below 0: no run has these.")
        self._restored = {key: np.array(value) for key, value in state.items()}

    # ------------------------------------------------------------------------------------------
    # One run
    # ------------------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        *,
        evaluate_every: int = 1,
        stop: StopRule | None = None,
        on_round: Callable[[int, Mapping[str, float]], None] | None = None,
        progress: bool | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 1,
        checkpoint_keep: int = 3,
        resume: bool = False,
    ) -> Result:
        """Run the federation, as Flower's `Strategy.start`, with more options.

        Parameters
        ----------
        grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
            As in Flower's `Strategy.start`. `evaluate_fn` gets the global model.
        evaluate_every : int (default: 1)
            Evaluate on the clients every so many rounds, and after the last.
        stop : callable, optional
            ``stop(server_round, metrics) -> bool``, called after every round with the round's
            aggregated metrics: those of the evaluation, and as ``train-NAME`` those of the
            training. True ends the run. A resumed run asks it about the rounds before as well, so
            that a rule that counts goes on counting.
        on_round : callable, optional
            ``on_round(server_round, metrics)``, called when a round is complete, with the same
            metrics; `train_metrics`, `evaluate_metrics` and the state may be read in it. It comes
            before the round's checkpoint, so a run that was killed in between reports the round
            again when it is resumed.
        progress : bool, optional
            Show a progress bar on standard error. By default where that is a terminal.
        checkpoint_dir : str or path, optional
            Folder of the run's checkpoints; by default there are none. Clients that keep state of
            their own must keep it in a folder as well (``state_dir``) for the run to continue to
            the same bits.
        checkpoint_every : int (default: 1)
            Save every so many rounds, and after the last.
        checkpoint_keep : int (default: 3)
            Checkpoints to keep. Should the newest be damaged, the run resumes from the one before.
        resume : bool (default: False)
            Continue after the newest checkpoint, with all that was measured before; without one,
            start anew. Algorithm, model, clients and seed must be those of the checkpoint; other
            settings may differ, which is logged. `num_rounds` counts from the first start.

        Returns
        -------
        Result
            Flower's result: the global model and the aggregated metrics of every round.

        Raises
        ------
        ValueError
            If an argument is out of range or the arrays do not fit the strategy, if
            `checkpoint_dir` holds checkpoints that `resume` does not ask for, those of another run,
            or damaged ones only.
        TimeoutError
            If too few clients connected within `node_timeout`.
        RuntimeError
            If another process is using `checkpoint_dir`, a client did not take part in the
            hand-shake of an algorithm that needs one, or not a single reply of the whole run was
            usable.
        """
        check_count("num_rounds", num_rounds, least=1)
        check_count("evaluate_every", evaluate_every, least=1)
        check_positive("timeout", timeout)
        began = time.monotonic()
        log(INFO, "Starting %s strategy:", type(self).__name__)
        self.summary()
        arrays = named_arrays(initial_arrays)
        self.open_checkpoints(
            arrays, checkpoint_dir, every=checkpoint_every, keep=checkpoint_keep, resume=resume
        )
        client_ids = self._connect(grid)
        self.begin(arrays, client_ids, self._directory.announced)
        result = self._result
        train_config = train_config or ConfigRecord()
        evaluate_config = evaluate_config or ConfigRecord()
        exchange = self._exchange(grid, timeout)
        self.shake_hands(exchange, train_config)

        def evaluate(server_round: int) -> Metrics:
            if self.fraction_evaluate == 0:
                return {}
            self._look_around(grid)
            orders = self.plan_evaluate(server_round, evaluate_config)
            replies = exchange(orders, MessageType.EVALUATE)
            metrics = self.absorb_evaluate(server_round, replies)
            if metrics:
                result.evaluate_metrics_clientapp[server_round] = MetricRecord(dict(metrics))
            return metrics

        def evaluate_centrally(server_round: int) -> None:
            if evaluate_fn is None or server_round in result.evaluate_metrics_serverapp:
                return
            if (central := evaluate_fn(server_round, self.global_arrays)) is not None:
                result.evaluate_metrics_serverapp[server_round] = central

        def stopping_at(server_round: int, metrics: Metrics) -> bool:
            return stop is not None and stop(server_round, metrics)

        evaluate_centrally(self._round)
        self.close_round(self._round)
        stopping = False
        for server_round in self._past_rounds:
            stopping = stopping_at(server_round, self._measured(server_round))
        with progress_bar(type(self).__name__, num_rounds, self._round, progress) as advance:
            for server_round in range(self._round + 1, num_rounds + 1):
                if stopping:
                    break
                self._look_around(grid)
                self._meet(server_round, exchange, train_config)
                orders = self.plan_train(server_round, train_config)
                replies = exchange(orders, MessageType.TRAIN)
                trained = self.absorb_train(server_round, replies)
                if trained:
                    result.train_metrics_clientapp[server_round] = MetricRecord(dict(trained))
                metrics = {f"train-{name}": value for name, value in trained.items()}
                due = server_round % evaluate_every == 0 or server_round == num_rounds
                if due:
                    metrics = {**metrics, **evaluate(server_round)}
                stopping = stopping_at(server_round, metrics)
                if stopping and not due:
                    metrics = {**metrics, **evaluate(server_round)}
                evaluate_centrally(server_round)
                log(INFO, "[ROUND %s/%s] %s", server_round, num_rounds, metrics)
                if on_round:
                    on_round(server_round, metrics)
                self.close_round(server_round, last=stopping or server_round == num_rounds)
                advance(server_round, metrics)
        if stopping:
            log(INFO, "The stop rule ended the run after round %s", self._round)
        if self._checkpoints is not None:
            self._checkpoints.unlock()
        if not self._ever_usable:
            raise RuntimeError(
                f"{type(self).__name__} ended without a single usable reply, so the model is "
                f"still the initial one. The last refusal: {self._last_refusal}"
            )
        result.arrays = self.global_arrays
        log(INFO, "Strategy execution finished in %.2fs", time.monotonic() - began)
        return result

    def summary(self) -> None:
        """Log the settings of the strategy."""
        log(INFO, "\t├──> Sampling:")
        log(
            INFO,
            "\t│\t├── Fraction: train (%.2f) | evaluate (%.2f)",
            self.fraction_train,
            self.fraction_evaluate,
        )
        log(
            INFO,
            "\t│\t├── Minimum clients: train (%d) | evaluate (%d) | available (%d)",
            self.min_train_nodes,
            self.min_evaluate_nodes,
            self.min_available_nodes,
        )
        log(INFO, "\t│\t└── Seed: %d", self.seed)
        log(INFO, "\t└──> %s:", type(self).__name__)
        settings = list(self.hyperparameters().items())
        for position, (name, value) in enumerate(settings):
            branch = "└──" if position == len(settings) - 1 else "├──"
            log(INFO, "\t\t%s %s: %s", branch, name, value)

    # ------------------------------------------------------------------------------------------
    # Flower's abstract methods, for callers that bring a loop of their own
    # ------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one message a node with the orders of its sampled clients."""
        if not self._spec:
            client_ids = self._connect(grid)
            self.begin(named_arrays(arrays), client_ids, self._directory.announced)
            self.shake_hands(self._exchange(grid, timeout=3600), config)
        self._look_around(grid)
        self._meet(server_round, self._exchange(grid, timeout=3600), config)
        return self._directory.messages(self.plan_train(server_round, config), MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, update the state, return the global model and the mean metrics."""
        metrics = self.absorb_train(server_round, self._directory.replies(replies, self._asked))
        if not metrics:
            return None, None
        return self.global_arrays, MetricRecord(dict(metrics))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one message a node with the models to evaluate."""
        self._look_around(grid)
        return self._directory.messages(
            self.plan_evaluate(server_round, config), MessageType.EVALUATE
        )

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Check the replies and return their mean metrics."""
        metrics = self.absorb_evaluate(server_round, self._directory.replies(replies, self._asked))
        return MetricRecord(dict(metrics)) if metrics else None

    # ------------------------------------------------------------------------------------------
    # The round, without a word about messages: what LegacyStrategy uses as well
    # ------------------------------------------------------------------------------------------

    def _connect(self, grid: Grid) -> list[int]:
        """Wait for the clients that the run needs; return their ids."""
        self._directory = ClientDirectory.find(
            grid,
            at_least=self.min_available_nodes,
            timeout=self.node_timeout,
            wanted=self.saved_clients,
            lenient=self.forget_after is not None,
        )
        return self._directory.client_ids

    @property
    def saved_clients(self) -> list[int]:
        """The clients of the saved state that the coming run goes on from, if there is one."""
        if self._restored is None:
            return []
        return [int(client) for client in self._restored["base/client_ids"]]

    def _look_around(self, grid: Grid) -> None:
        """Before a phase, see who is connected and who came back, and wait where it is too few."""
        restarted = self._directory.refresh(
            grid, at_least=self.min_available_nodes, timeout=self.node_timeout
        )
        self._in_sync.difference_update(restarted)

    def _meet(self, server_round: int, exchange: Exchange, config: Mapping[str, Any]) -> None:
        here, announced = self._directory.connected, self._directory.announced
        self.meet(server_round, here, exchange, config, announced=announced)

    def begin(self, arrays: Arrays, client_ids: Iterable[int], announced: int = 0) -> None:
        """Start the state, or put back a loaded one, for these clients.

        Parameters
        ----------
        arrays : Arrays
            The initial model.
        client_ids : iterable of int
            The clients that there are.
        announced : int
            The size of their federation; 0 where nobody knows it.

        Raises
        ------
        ValueError
            If the arrays are not a usable model, or a loaded state belongs to other clients.
        """
        _check_initial_arrays(arrays)
        found = sorted(client_ids)
        if self._restored is not None:
            self._compare_clients(found, announced)
        self.accepted_in, self._present_in = {}, {}
        self._set_clients(self.saved_clients or found, server_round=0)
        self.num_founders, self._announced = len(self.client_ids), announced
        self._newcomers = {}
        self._spec = spec_of(arrays)
        self._in_sync = set()
        self.train_metrics, self.evaluate_metrics, self.traffic = {}, {}, {}
        self._round, self._ever_usable, self._last_refusal = 0, False, "nobody was asked"
        self._shaken = False
        self._train_rng, self._evaluate_rng = np.random.default_rng(self.seed).spawn(2)
        self._run, self._past_rounds, self._lost = uuid.uuid4().hex, [], []
        self._durable.clear()
        self._result = Result(arrays=wire.to_array_record(arrays))
        self.init_state({name: np.array(array) for name, array in arrays.items()})
        if self._restored is not None:
            self._restore(self._restored)
            self._restored = None
        if self._resumed is not None:
            self._restore_record(self._resumed)
            self._resumed = None

    def _compare_clients(self, found: Sequence[int], announced: int) -> None:
        """Refuse to go on from a saved state with another federation than its own."""
        assert self._restored is not None
        saved, known = self.saved_clients, int(self._restored["base/announced"])
        missing, more = set(saved).difference(found), set(found).difference(saved)
        # More clients than the saved run knew of could be new ones, were it not for their word
        # that the federation is larger: in a simulation all of them then have other data.
        if (more and announced > known) or (missing and self.forget_after is None):
            raise ValueError(
                f"The saved state belongs to clients {listing(saved)}, but the federation has "
                f"clients {listing(found)}. Continue with the same clients, or start anew without "
                "the saved state."
            )
        if missing:
            log(WARNING, "clients %s of the saved run are not connected", listing(sorted(missing)))

    def _restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        own = under(_STATE, state)
        expected = self.state_arrays()
        if missing := sorted(expected.keys() - own.keys()):
            raise ValueError(
                f"The saved state lacks {missing}, which {type(self).__name__} needs. It was saved "
                "by another algorithm or with other settings."
            )
        _check_saved(own, {n: a for n, a in expected.items() if not self.may_grow(n)})
        self.load_state_arrays(own)
        rounds = state["base/accepted_in"].tolist()
        self.accepted_in = dict(zip(self.client_ids, rounds, strict=True))
        present_in = state["base/present_in"].tolist()
        self._present_in = dict(zip(self.client_ids, present_in, strict=True))
        self.num_founders = int(state["base/num_founders"])
        self._announced = max(self._announced, int(state["base/announced"]))
        self._round, self._shaken = int(state["base/round"]), True
        self._train_rng = generator_from_array(state["base/train_rng"])
        self._evaluate_rng = generator_from_array(state["base/evaluate_rng"])
        self._ever_usable = any(rounds)

    # ------------------------------------------------------------------------------------------
    # Checkpoints
    # ------------------------------------------------------------------------------------------

    def open_checkpoints(
        self,
        arrays: Arrays,
        folder: str | os.PathLike[str] | None,
        *,
        every: int,
        keep: int,
        resume: bool,
    ) -> None:
        """Prepare to save the rounds of the coming run, and to continue a saved one.

        Parameters
        ----------
        arrays : Arrays
            The initial model.
        folder, every, keep, resume
            As `checkpoint_dir`, ... in `start`; without a folder nothing is saved.

        Raises
        ------
        ValueError, RuntimeError
            As in `start`.
        """
        self._checkpoints = self._resumed = None
        if folder is None:
            if resume:
                raise ValueError("resume=True needs a checkpoint_dir to resume from.")
            return
        checkpoints = Checkpoints(folder, every=every, keep=keep)
        checkpoints.lock()
        if not resume and (rounds := checkpoints.rounds()):
            raise ValueError(
                f"{checkpoints.folder} holds checkpoints of a run, the last of round {rounds[-1]}. "
                "Continue it with resume=True, or give another checkpoint_dir."
            )
        self._checkpoints = checkpoints
        self._durable = deque(maxlen=keep)
        if not resume:
            return
        if (saved := checkpoints.newest()) is None:
            log(INFO, "No checkpoint in %s: starting anew", checkpoints.folder)
            return
        own = self._fingerprint(spec_of(arrays))
        if found := differences(saved.fingerprint, own):
            raise ValueError(
                f"{saved.path} is of another run: {'; '.join(found)}. Resume with the algorithm, "
                "the model and the seed of that run, or give another checkpoint_dir."
            )
        if changed := changed_settings(saved.fingerprint, own):
            log(WARNING, "Resuming with other settings: %s", "; ".join(changed))
        log(INFO, "Resuming after round %s from %s", saved.server_round, saved.path)
        self.load_state_dict(saved.arrays)
        versions = saved.arrays.get(_DURABLE, np.zeros(0))
        size = (versions.shape[:1] or (0,)) + saved.arrays["base/client_ids"].shape
        _check_saved({_DURABLE: versions}, {_DURABLE: np.zeros(size, np.int64)})
        self._resumed = saved

    def _fingerprint(self, spec: Spec) -> dict[str, Any]:
        names = ["fraction_train", "fraction_evaluate", "min_train_nodes", "min_evaluate_nodes"]
        names += ["forget_after"]
        settings = {name: getattr(self, name) for name in names} | self.hyperparameters()
        return {
            "algorithm": type(self).__name__,
            "model": {name: f"{dtype} {shape}" for name, (shape, dtype) in spec.items()},
            "seed": self.seed,
            "settings": {name: as_text(value) for name, value in settings.items()},
        }

    def close_round(self, server_round: int, *, last: bool = False) -> None:
        """Save a round, once all of it is over, if it is time to; `last` says that none follows."""
        if self._checkpoints is None or not self._checkpoints.record(self._record(server_round)):
            return
        if not last and (server_round == 0 or server_round % self._checkpoints.every):
            return
        self._durable.append(dict(self.accepted_in))
        versions = [[then.get(i, 0) for i in self.client_ids] for then in self._durable]
        self._checkpoints.save(
            server_round,
            self._state() | {_DURABLE: np.array(versions, dtype=np.int64)},
            self._fingerprint(self._spec) | {"run": self._run},
        )

    def _record(self, server_round: int) -> dict[str, Any]:
        """Return what was measured in a round, for JSON."""
        return {
            "round": server_round,
            "traffic": self.traffic.get(server_round),
            "train": self.train_metrics.get(server_round),
            "evaluate": self.evaluate_metrics.get(server_round),
            "result": [dict(means.get(server_round, {})) for means in self._result_means()],
        }

    def _restore_record(self, saved: Checkpoint) -> None:
        """Put back what was measured up to a checkpoint, and which run it is."""
        self._run = saved.fingerprint["run"]
        for versions in saved.arrays[_DURABLE].tolist():
            self._durable.append(dict(zip(self.client_ids, versions, strict=True)))
        for entry in saved.history:
            server_round = entry["round"]
            self._past_rounds += [server_round] if server_round > 0 else []
            if entry["traffic"] is not None:
                self.traffic[server_round] = Traffic(*entry["traffic"])
            for name in ("train", "evaluate"):
                if entry[name] is not None:
                    metrics = {int(client): own for client, own in entry[name].items()}
                    getattr(self, f"{name}_metrics")[server_round] = metrics
            for means, values in zip(self._result_means(), entry["result"], strict=True):
                if values:
                    means[server_round] = MetricRecord(values)

    def _result_means(self) -> tuple[dict[int, MetricRecord], ...]:
        result = self._result
        return (
            result.train_metrics_clientapp,
            result.evaluate_metrics_clientapp,
            result.evaluate_metrics_serverapp,
        )

    def _measured(self, server_round: int) -> Metrics:
        """Return the aggregated metrics of a past round as the stop rule got them."""
        trained, evaluated, _ = self._record(server_round)["result"]
        return {**{f"train-{name}": value for name, value in trained.items()}, **evaluated}

    def _exchange(self, grid: Grid, timeout: float) -> Exchange:
        """Return what sends orders to their clients and returns what came back."""

        def exchange(orders: dict[int, Order], message_type: str) -> Iterable[ClientReply]:
            messages = self._directory.messages(orders, message_type)
            replies = grid.send_and_receive(messages, timeout=timeout)
            return self._directory.replies(replies, orders)

        return exchange

    def shake_hands(self, exchange: Exchange, config: Mapping[str, Any]) -> None:
        """Ask all clients what the algorithm must know before round 1, unless it knows already.

        Raises
        ------
        RuntimeError
            If a client does not answer, or not usably.
        """
        if self._shaken:
            return
        self._shaken = True
        replies, failed = self._ask(0, self.client_ids, exchange, config)
        if failed:
            raise RuntimeError(
                f"The hand-shake before round 1 failed for clients {listing(failed)}; "
                f"{type(self).__name__} needs every client's answer. {self._last_refusal}"
            )
        if replies:
            self.handshake(replies)

    def _ask(
        self,
        server_round: int,
        clients: Sequence[int],
        exchange: Exchange,
        config: Mapping[str, Any],
    ) -> tuple[dict[int, Reply], list[int]]:
        """Shake hands with clients; return the replies, and who did not reply usably."""
        if not (orders := self.handshake_orders(clients)):
            return {}, []
        spec = self.handshake_spec()
        asked = self._complete(0, {**config, "handshake": True}, orders, spec)
        replies = self._accept(0, exchange(asked, MessageType.TRAIN), spec=spec)
        self._count(server_round, down=_bytes_down(asked), up=_bytes_up(replies))
        return replies, sorted(asked.keys() - replies.keys())

    # ------------------------------------------------------------------------------------------
    # Clients that come and go
    # ------------------------------------------------------------------------------------------

    def meet(
        self,
        server_round: int,
        connected: Iterable[int],
        exchange: Exchange,
        config: Mapping[str, Any],
        *,
        announced: int = 0,
        restarted: Iterable[int] = (),
    ) -> None:
        """Before a round of training, let go who has left, and get to know who is new.

        Parameters
        ----------
        server_round : int
            The round.
        connected : iterable of int
            The clients that are there.
        exchange : Exchange
            Sends orders and returns what came back.
        config : mapping
            The user's settings.
        announced : int
            The size of the federation, as in `begin`.
        restarted : iterable of int
            Clients that may have lost what they keep.
        """
        self._in_sync.difference_update(restarted)
        here = set(connected)
        self._announced = max(self._announced, announced)
        self._present_in |= {c: server_round for c in self.client_ids if c in here}
        self._let_go(server_round)
        self._newcomers = {c: reply for c, reply in self._newcomers.items() if c in here}
        if new := sorted(here.difference(self._index, self._newcomers)):
            replies, failed = self._ask(server_round, new, exchange, config)
            blank = Reply({}, 0.0, {})
            self._newcomers |= {c: replies.get(c, blank) for c in new if c not in failed}

    def _let_go(self, server_round: int) -> None:
        """Take clients that have been away for too long out of the run; somebody must be left."""
        if self.forget_after is None:
            return
        gone = [
            c for c, last in self._present_in.items() if server_round - last >= self.forget_after
        ]
        if not gone or len(gone) == len(self.client_ids):
            return
        log(
            WARNING,
            "round %s: clients %s have not been connected for %s rounds; they have left the run",
            server_round,
            listing(gone),
            self.forget_after,
        )
        indices = [self._index[client] for client in gone]
        self._directory.forget(gone)
        self._set_clients(set(self.client_ids).difference(gone), server_round)
        self._in_sync.difference_update(gone)
        self.remove_clients(indices)

    def _admit(self, server_round: int, clients: Sequence[int]) -> None:
        """Take clients into the run whose first reply was accepted."""
        log(INFO, "round %s: clients %s belong to the run now", server_round, listing(clients))
        newcomers = {client: self._newcomers.pop(client) for client in clients}
        places = [bisect(self.client_ids, client) for client in clients]
        self._set_clients([*self.client_ids, *clients], server_round)
        self.add_clients(newcomers, places)

    def _set_clients(self, clients: Iterable[int], server_round: int) -> None:
        """Let the run have these clients; what is kept by client goes in the order of their ids."""
        self.client_ids = sorted(clients)
        self._index = {client: index for index, client in enumerate(self.client_ids)}
        self.accepted_in = {c: self.accepted_in.get(c, 0) for c in self.client_ids}
        self._present_in = {c: self._present_in.get(c, server_round) for c in self.client_ids}

    def in_sync(self, client_id: int) -> bool:
        """Return whether a client surely holds what the server knows of it.

        Not before its first accepted upload, nor after one that was lost or refused, nor after a
        restart: then the server sends along what the client needs.
        """
        return client_id in self._in_sync

    def plan_train(self, server_round: int, config: Mapping[str, Any]) -> dict[int, Order]:
        """Draw the clients of a round and return what each gets."""
        pool = sorted([*self.client_ids, *self._newcomers])
        sampled = sample(self._train_rng, pool, self.fraction_train, self.min_train_nodes)
        log(INFO, "configure_train: Sampled %s clients (out of %s)", len(sampled), len(pool))
        members = [client for client in sampled if client in self._index]
        orders = self.train_orders(server_round, members) if members else {}
        if new := {c: self._newcomers[c] for c in sampled if c not in self._index}:
            orders |= self.newcomer_orders(server_round, new)
        asked = self._complete(server_round, config, orders, self.reply_spec())
        self._in_sync.difference_update(asked)
        self._count(server_round, down=_bytes_down(asked))
        return asked

    def _count(self, server_round: int, *, down: int = 0, up: int = 0) -> None:
        before = self.traffic.get(server_round, Traffic(0, 0))
        self.traffic[server_round] = Traffic(before.down + down, before.up + up)

    def absorb_train(self, server_round: int, replies: Iterable[ClientReply]) -> Metrics:
        """Check the replies of a round, then let them change the state; return the mean metrics."""
        accepted = self._accept(server_round, replies, spec=self.reply_spec())
        self._round = server_round
        if not accepted:
            log(WARNING, "round %s: no usable reply, nothing changes", server_round)
            self._forget_lost(server_round)
            return {}
        self._ever_usable = True
        if joined := [client for client in accepted if client in self._newcomers]:
            self._admit(server_round, joined)
        self.update(server_round, accepted)
        self.accepted_in |= dict.fromkeys(accepted, server_round)
        self._in_sync.update(accepted)
        self._count(server_round, up=_bytes_up(accepted))
        self.train_metrics[server_round] = {i: reply.metrics for i, reply in accepted.items()}
        self._forget_lost(server_round)
        return weighted_means(accepted) | self.round_metrics()

    def plan_evaluate(self, server_round: int, config: Mapping[str, Any]) -> dict[int, Order]:
        """Draw the clients that evaluate and return the models each gets."""
        if self.fraction_evaluate == 0:
            return {}
        least = self.min_evaluate_nodes
        sampled = sample(self._evaluate_rng, self.client_ids, self.fraction_evaluate, least)
        orders = self.evaluate_orders(server_round, sampled)
        return self._complete(server_round, config, orders, spec=None)

    def absorb_evaluate(self, server_round: int, replies: Iterable[ClientReply]) -> Metrics:
        """Check the replies of an evaluation and return the mean metrics."""
        anybody = bool(self._asked)
        accepted = self._accept(server_round, replies, spec=None)
        self._forget_lost(server_round)
        # A client without test data says so with 0 examples; it has no say in the means.
        accepted = {i: reply for i, reply in accepted.items() if reply.num_examples > 0}
        if not accepted:
            if anybody:
                log(WARNING, "round %s: no usable evaluation", server_round)
            return {}
        self.evaluate_metrics[server_round] = {i: reply.metrics for i, reply in accepted.items()}
        return weighted_means(accepted)

    def _forget_lost(self, server_round: int) -> None:
        """Let the clients that said in a phase that they lost their state start afresh."""
        if not (lost := self._lost):
            return
        self._lost = []
        log(
            WARNING,
            "round %s: clients %s have lost what they keep between rounds; they start afresh",
            server_round,
            listing(lost),
        )
        self.accepted_in |= dict.fromkeys(lost, 0)
        self._in_sync.difference_update(lost)
        self.start_afresh(server_round, lost)

    def _need_state(self) -> None:
        if not self._spec:
            raise RuntimeError(
                f"{type(self).__name__} has no state yet: call start(grid, initial_arrays) first."
            )

    def _complete(
        self,
        server_round: int,
        config: Mapping[str, Any],
        orders: Mapping[int, Order],
        spec: Spec | None,
    ) -> dict[int, Order]:
        """Add to the orders what every client is told, whatever the algorithm.

        The user's settings, the round, the client's own seed, the run, which of its states the
        server takes it to be in and could go back to, and the names of the arrays to upload where
        they are not those it received.
        """
        self._asked = {}
        for client, order in sorted(orders.items()):
            own: dict[str, Scalar] = {
                **config,
                "server-round": server_round,
                "seed": client_seed(self.seed, client, server_round),
                "version": self.accepted_in.get(client, 0),
                "run": self._run,
            }
            if self._checkpoints is not None:
                versions = {accepted_in.get(client, 0) for accepted_in in self._durable}
                own["durable"] = ",".join(str(version) for version in sorted(versions))
            if spec is not None and list(spec) != list(next(iter(order.groups.values()))):
                own["reply"] = ",".join(spec)
            self._asked[client] = Order(order.groups, own | order.config)
        return self._asked

    # ------------------------------------------------------------------------------------------
    # Replies: nothing that comes from a client is believed before it was checked
    # ------------------------------------------------------------------------------------------

    def _accept(
        self,
        server_round: int,
        replies: Iterable[ClientReply],
        *,
        spec: Spec | None,
    ) -> dict[int, Reply]:
        """Return the usable replies by client id; one log line for every other client.

        `spec` says which arrays they must hold; None: those of an evaluation hold none.
        """
        accepted, refused, strangers = sort_out(
            replies, self._asked, spec, weighted_by_key=self.weighted_by_key
        )
        for who, reason in strangers:
            self._last_refusal = f"{who}: {reason}"
            log(WARNING, "round %s: reply of %s refused: %s", server_round, who, reason)
        for client, reason in refused.items():
            self._last_refusal = f"client {client}: {reason}"
            if wire.who_lost(reason) is not None and self.accepted_in.get(client, 0) > 0:
                self._lost.append(client)
                continue
            log(WARNING, "round %s: client %s refused: %s", server_round, client, reason)
        self._asked = {}
        return accepted


def _check_saved(saved: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]]) -> None:
    """Raise unless saved arrays have the shapes and dtypes of those that a run has itself."""
    for name, own in expected.items():
        found = saved[name]
        if (found.shape, found.dtype) != (own.shape, own.dtype):
            raise ValueError(
                f"The saved '{name}' has shape {found.shape}, this run's {own.shape} (as "
                f"{found.dtype} and {own.dtype}). Continue with the model and the settings (such "
                "as `duals`) that the state was saved with."
            )


def named_arrays(record: ArrayRecord) -> Arrays:
    """Return the initial model as named arrays; raise TypeError unless it is an `ArrayRecord`."""
    if not isinstance(record, ArrayRecord):
        raise TypeError(
            f"initial_arrays is a {type(record).__name__}, expected a flwr.app.ArrayRecord, e.g. "
            "ArrayRecord(model.state_dict())."
        )
    return wire.from_array_record(record)


def _check_initial_arrays(arrays: Arrays) -> None:
    if not arrays:
        raise ValueError("The initial arrays are empty; give the model's parameters.")
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise ValueError(f"Array '{name}' has dtype {array.dtype}, expected real numbers.")
        if not np.isfinite(array).all():
            raise ValueError(f"Array '{name}' of the initial model holds NaN or infinity.")


def _bytes_down(orders: Mapping[int, Order]) -> int:
    return sum(array.nbytes for order in orders.values() for array in order.flat())


def _bytes_up(replies: Mapping[int, Reply]) -> int:
    return sum(array.nbytes for reply in replies.values() for array in reply.arrays.values())
