"""The base of every method here: a Flower strategy around a `Run`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import partial
from logging import INFO
from typing import Any, ClassVar, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from ..maths.blocks import Arrays, Spec
from ..maths.checks import (
    Count,
    Fraction,
    Positive,
    Share,
    WholeNumber,
    check_count,
    check_positive,
)
from ..maths.seeds import short
from .aggregation import MetricsAggrFn
from .algorithm import FINETUNED, Algorithm, FineTuningEvaluation, OnClient
from .callbacks import Callbacks, EvaluateFn, OnRound, StopRule
from .common.interrupts import explaining
from .common.settings import HasSettings, as_text, parameters_of, settings_of
from .composition import check_wrappers, strategies_around
from .link import GridLink
from .members.membership import Membership
from .members.sampling import Sampling
from .messages.records import (
    ClientReply,
    Metrics,
    from_array_record,
    named_arrays,
    to_array_record,
)
from .messages.schema import Instructions
from .messages.stamp import declared_method
from .messages.wire import WireDtype
from .models import Models, collect_personal, gather, model_here
from .outgoing import check_user_settings
from .privacy import ClientDP, Privacy
from .progress import in_short, progress_bar
from .record import Traffic
from .run import Exchange, Run
from .trust.limit import MaxNorm, UploadLimit
from .trust.validation import ReplyValidation

_QUERY_TIMEOUT = 3600.0  # seconds for a handshake, where the caller brings a loop of its own


class StatefulStrategy(HasSettings, Algorithm, Strategy):
    """Base class: a Flower strategy that keeps state for every client.

    State is keyed by a stable client id: the partition id in simulations and wherever a node's
    config has one, the node id otherwise. One node may host many clients; with one client a node,
    "client" and "node" mean the same and the parameters below mean what they mean in `FedAvg`.

    Parameters
    ----------
    fraction_train : float (default: 1.0)
        Fraction of the clients that train in a round, drawn uniformly without replacement.
    min_train_nodes : int (default: 1)
        Train at least so many clients a round, whatever `fraction_train` says. Flower's `FedAvg`
        has 2.
    fraction_evaluate : float (default: 1.0)
        Fraction of the clients that evaluate in an evaluation round. 0 switches evaluation off.
    min_evaluate_nodes : int (default: 1)
        Evaluate on at least so many clients, unless `fraction_evaluate` is 0.
    min_available_nodes : int (default: 2)
        Clients that must be connected before every phase of a round. Before round 1, nodes that
        know the size of their federation (simulated ones do) are waited for in full.
    node_timeout : float (default: 120.0)
        Seconds to wait for these clients. Then the run begins without those that the size of the
        federation announces, and ends, with an error that says what to do, where fewer than
        `min_available_nodes` are there.
    max_clients_per_node : int, optional
        A node that says that it hosts more clients is left out. By default one that has a key
        (SuperNodes; simulated nodes have none) may host 1, and others any number.
    max_missed_rounds : int, optional
        Rounds in a row in which a client is not connected until it has left: from then on it does
        not count in any mean, and should it come back, it is a new client. By default clients
        count as long as the run lasts.
    client_keys : str or mapping of int to str (default: "first")
        Which node may be which client, where nodes have keys (SuperNodes; simulated nodes have
        none). "first": the id belongs to the node that first brought it, in this run and all that
        resume it. A mapping from ids to fingerprints (``ssh-keygen -lf KEY.pub``) says whose these
        are. "any": any node may be any client that is on no other connected node.
    max_norm : float or "auto", optional
        How far an upload may be from what its client was sent, as the Euclidean norm over all of
        its arrays. "auto": 1.5 times the running median. By default an upload is refused, by name,
        that is beyond 10 times the largest running median of the run so far; not so with
        fewer than five clients, ``published=True`` and FPFC's given penalties. ``math.inf``: no
        bound. An upload beyond a `max_norm` is scaled back to that distance; it is refused where
        clients send changes of variables of their own. The round's metrics have how many,
        ``clipped`` or ``refused``. See docs/robustness.md.
    privacy : ClientDP, optional
        Differential privacy of whole clients: uploads are clipped and noised, and the round's
        metrics have ``epsilon``. Every upload counts alike then, and there is no `max_norm` where
        the noise is added at the server. See docs/privacy.md.
    train_metrics_aggr_fn, evaluate_metrics_aggr_fn : callable, optional
        As in Flower's `FedAvg`: ``function(records, "num-examples")`` makes one `MetricRecord` of
        the accepted replies' `RecordDict`. `stop` gets the same. By default the metrics are means,
        in which a single client weighs no more than ten times the median.
    wire_dtype : {"float16"}, optional
        Arrays of 32 and 64 bits travel in half precision: every upload, and what is sent down, but
        for buffers and ``start``. With FedADMM, FedAPM, FLAME and FedMC-ADMM's exact solutions
        nothing of 32 bits is saved downwards, where the duals are in the strategy and clients start
        at the global model (the default): each gets its dual as well then, in every round. See
        docs/scaling.md.
    seed : int (default: 0)
        The one seed of the run: client sampling and, through the messages, the clients' own
        randomness follow from it.

    Attributes
    ----------
    membership : Membership
        Who belongs to the run.
    state : dataclass
        The algorithm's variables; there is none before `start`.
    """

    fraction_train: Fraction = 1.0
    min_train_nodes: Count = 1
    fraction_evaluate: Share = 1.0
    min_evaluate_nodes: WholeNumber = 1
    min_available_nodes: Count = 2
    node_timeout: Positive = 120.0
    max_clients_per_node: Count | None = None
    max_missed_rounds: Count | None = None
    client_keys: str | Mapping[int, str] = "first"
    max_norm: MaxNorm = None
    privacy: ClientDP | None = None
    train_metrics_aggr_fn: MetricsAggrFn | None = None
    evaluate_metrics_aggr_fn: MetricsAggrFn | None = None
    wire_dtype: WireDtype = None
    seed: WholeNumber = 0

    paper: ClassVar[str] = ""
    """Who described the method, and where: authors, venue and year, arXiv number."""
    in_rounds: ClassVar[bool] = True
    """Whether a round takes in the replies of all that it asked."""
    run: Run = field(init=False)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        names = "configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate"
        hooks = [name for name in names if getattr(cls, name) is not vars(StatefulStrategy)[name]]
        if not cls.in_rounds and hooks:
            raise TypeError(
                f"{cls.__name__} has a {hooks[0]}() of its own, which would never be called: its "
                "method takes in every reply as it comes, and knows no rounds. Give on_round= to "
                "start(), or derive the class from a method with rounds, such as FPFC."
            )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.settings().get("finetune_epochs"):
            vars(self)["kinds"] = {FINETUNED: "fine-tuned", **self.kinds}
        self.membership = Membership(self.max_missed_rounds, self.client_keys)
        sampling = Sampling(
            fraction_train=self.fraction_train,
            fraction_evaluate=self.fraction_evaluate,
            min_train=self.min_train_nodes,
            min_evaluate=self.min_evaluate_nodes,
            seed=short(self.seed),  # clients are told seeds that follow from it
        )
        method, privacy = declared_method(type(self)), Privacy(self.privacy, self.seed)
        max_norm = self.default_norm if self.max_norm is None else self.max_norm
        limit = UploadLimit(self, max_norm, clips=self.upload.goes_with("clipping"))
        if self.privacy is not None and privacy.is_central:
            limit = UploadLimit(self, self.privacy.clip, clips=self.upload.kind == "mean")
        validation = ReplyValidation(self.membership, method, self.upload)
        self.run = Run(
            self,
            self.membership,
            sampling,
            validation,
            limit,
            privacy,
            self.train_metrics_aggr_fn,
            self.evaluate_metrics_aggr_fn,
            self.wire_dtype,
        )
        self._collected: dict[int, Arrays] | None = None
        self._known: dict[str, Array] = {}  # the global model, as the hooks' caller has it
        self._link = GridLink(
            self.min_available_nodes,
            self.node_timeout,
            self.max_clients_per_node,
            self.membership.client_keys,
        )

    # ------------------------------------------------------------------------------------------
    # Results
    # ------------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """The method's name as its paper writes it."""
        return type(self).__name__

    @property
    def form(self) -> str:
        """Which form of the method runs, and what it changes against the paper: one sentence.

        Empty where there is one form only. The log, results and captions show it.
        """
        return ""

    @property
    def stage(self) -> str:
        """What the last round was for, in a few words, for the log and the progress bar.

        Empty where all rounds are alike.
        """
        return ""

    @property
    def model_spec(self) -> Spec:
        """Names, shapes and dtypes of a model's arrays as they travel."""
        return self.run.model_spec

    @property
    def trained(self) -> list[str]:
        """Which of them the clients train; the others are their models' buffers."""
        return self.run.trained

    @property
    def client_ids(self) -> list[int]:
        """The clients of the run, sorted; empty before `start`.

        Clients that connect later are asked to train like the others from the next round on, and
        belong to the run once a reply of theirs was accepted.
        """
        return self.membership.ids

    @property
    def last_round(self) -> int:
        """The last round whose replies were taken in; 0 before the first."""
        return self.run.last_round

    @property
    def train_metrics(self) -> Mapping[int, dict[int, Metrics]]:
        """Metrics of every client in every round: ``metrics[server_round][client_id][name]``."""
        return self.run.record.train_metrics

    @property
    def evaluate_metrics(self) -> Mapping[int, dict[int, Metrics]]:
        """The same of the evaluations."""
        return self.run.record.evaluate_metrics

    @property
    def traffic(self) -> dict[int, Traffic]:
        """Bytes of the training messages' arrays by round; round 0 is a handshake."""
        return self.run.record.traffic

    @property
    def global_arrays(self) -> ArrayRecord:
        """The global model as Flower's `ArrayRecord`; empty where the method has none."""
        self._need_state()
        return to_array_record(self.run.layout.complete(self.global_model()))

    def global_model(self) -> Arrays:
        """Return what travels of the global model; empty where the method has none."""
        if "global" not in self.kinds:
            return {}
        model = self.model("global", self.client_ids[0])
        assert not isinstance(model, OnClient)
        return model

    def personal_arrays(self, client_id: int) -> ArrayRecord:
        """Return the personal model of one client; see `model_arrays`."""
        return self.model_arrays("personal", client_id)

    def evaluate_instructions(self, server_round: int, client_ids: Sequence[int]) -> Instructions:
        """Return the models to evaluate on each client, or how to fine-tune the global one there.

        A method with one global model has fine-tuning by the setting `finetune_epochs`, beside
        `lr`. Its name is all that the method says.
        """
        if FINETUNED not in self.kinds:
            return super().evaluate_instructions(server_round, client_ids)
        asked = FineTuningEvaluation.of(self, server_round, global_=self.global_model())
        return dict.fromkeys(client_ids, asked)

    def model_arrays(self, kind: str, client_id: int) -> ArrayRecord:
        """Return a client's model of one of the `kinds` as Flower's `ArrayRecord`.

        Raises
        ------
        KeyError
            If there is no such client.
        ValueError
            If the method has no models of this kind.
        RuntimeError
            If they stay with their clients; the message says how to get them there.
        """
        self._need_state()
        return to_array_record(self.run.layout.complete(model_here(self, kind, client_id)))

    def models(self) -> Models:
        """Return all models of the run, for use or to `Models.save`."""
        self._need_state()
        return gather(self, self._collected)

    def clusters(self) -> NDArray[np.int64] | None:
        """Return the cluster of every client, sorted by id; None where the method has none."""
        return None

    def cluster_arrays(self) -> list[ArrayRecord]:
        """Return the model of every cluster, by its number in `clusters`; here there are none."""
        return []

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return the whole server state as plain numeric arrays.

        Includes the round, the clients, the random generators and the algorithm's own arrays.
        `load_state_dict` of a strategy with the same settings continues from it to the same bits.
        """
        self._need_state()
        return {key: value.copy() for key, value in self.run.state_arrays().items()}

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a `state_dict` at the next `start`.

        `start` compares the clients it finds and the shape of the initial arrays with the state
        before anything happens, and then goes on with the round after the saved one.

        Raises
        ------
        ValueError
            If the state lacks an entry, or one has another shape or dtype than it must.
        """
        self.run.go_on_from(state)

    def settings(self) -> dict[str, Any]:
        """Return the parameters of the constructor with their values, as `get_params` elsewhere."""
        return settings_of(self)

    @property
    def default_norm(self) -> float | None:
        """What bounds uploads without a `max_norm`: infinity for nothing, None for outliers."""
        return None

    def summary(self) -> None:
        """Log the form of the method that runs, and the settings that are not the defaults."""
        defaults = {name: one.default for name, one in parameters_of(type(self)).items()}
        settings = {
            name: value
            for name, value in settings_of(self).items()
            if value != defaults[name]
            if name != "seed" or self.privacy is None  # the noise follows from it
        }
        log(INFO, f"\t└──> {type(self).__name__}: {self.form}".rstrip())
        for position, (name, value) in enumerate(settings.items()):
            branch = "└──" if position == len(settings) - 1 else "├──"
            log(INFO, "\t\t%s %s: %s", branch, name, as_text(value) or "a function")

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
        evaluate_fn: EvaluateFn | None = None,
        *,
        evaluate_every: int = 1,
        stop: StopRule | None = None,
        on_round: OnRound | Sequence[OnRound] | None = None,
        progress: bool | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 1,
        checkpoint_keep: int = 3,
        resume: bool = False,
        collect: bool = False,
    ) -> Result:
        """Run the federation, as Flower's `Strategy.start`, with more options.

        Parameters
        ----------
        grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
            As in Flower's `Strategy.start`. `evaluate_fn` gets the global model, a whole one: where
            a part of it stays with the clients, that is the initial arrays'.
        evaluate_every : int (default: 1)
            Evaluate on the clients every so many rounds, and after the last.
        stop : callable, optional
            ``stop(server_round, metrics) -> bool``, called after every round with the round's
            aggregated metrics: those of the evaluation, as ``train-NAME`` those of the training,
            and as ``server-NAME`` what `evaluate_fn` returned. In the clients' means the largest
            and the smallest tenth of their values, at least one each, are set to the next (of three
            clients or more), so that no single client can end the run. True ends the run. A resumed
            run asks it about the rounds before as well, so that a rule that counts goes on
            counting. One that compares rounds starts anew where ``strategy.membership.version`` has
            changed: clients have joined or left.
        on_round : callable or sequence of callable, optional
            ``on_round(server_round, metrics)``, called when a round is complete, with the same
            metrics, such as `KeepBest`; `train_metrics`, `evaluate_metrics` and the state may be
            read in it. It comes after the round's checkpoint; a resumed run
            reports its last round again.
        progress : bool, optional
            Show a progress bar on standard error. By default where that is a terminal.
        checkpoint_dir : str or path, optional
            Folder of the run's checkpoints, and of the history of what was measured; by default
            there are none. Clients that keep state of their own must keep it in a folder as well
            (``state_dir``) for the run to continue to the same bits.
        checkpoint_every : int (default: 1)
            Save every so many rounds, and after the last.
        checkpoint_keep : int (default: 3)
            Checkpoints to keep. Should the newest be damaged, the run resumes from the one before.
        resume : bool (default: False)
            Continue after the newest checkpoint, with all that was measured before; without one,
            start anew. Algorithm, model, clients and seed must be those of the checkpoint; other
            settings may differ, which is logged. `num_rounds` counts from the first start.
        collect : bool (default: False)
            After the last round, ask for personal models that stay with their clients: `models`. In
            a deployment a client gives its own if its app is ``client_app(..., may_collect=True)``.

        Returns
        -------
        Result
            Flower's result: the global model and the aggregated metrics of every round.

        Raises
        ------
        ValueError
            If an argument is out of range, the arrays do not fit the strategy, or a setting for the
            clients is one that the strategy gives; if `checkpoint_dir` holds checkpoints that
            `resume` does not ask for, those of another run, or damaged ones only.
        TimeoutError
            If too few clients connected within `node_timeout`.
        RuntimeError
            If another process is using `checkpoint_dir`, no client took part in the handshake of an
            algorithm that needs one, not a single reply of the whole run, or of its
            last rounds, was usable, or the model is not finite.
        """
        check_count("num_rounds", num_rounds, least=1)
        check_count("evaluate_every", evaluate_every, least=1)
        check_positive("timeout", timeout)
        train_config = train_config or ConfigRecord()
        evaluate_config = evaluate_config or ConfigRecord()
        for config in (train_config, evaluate_config):
            check_user_settings(self, config)
        if evaluate_fn is not None and "global" not in self.kinds:
            name = type(self).__name__
            raise ValueError(f"evaluate_fn is given, but {name} has no global model: leave it out.")
        if collect and self.run.privacy.is_local:
            raise ValueError(
                "collect is True beside privacy with the noise at the clients, and personal models "
                "come as they are, without noise. Leave collect out."
            )
        began = time.monotonic()
        log(INFO, "Starting %s strategy:", type(self).__name__)
        self.summary()
        arrays = named_arrays(initial_arrays)
        run = self.run
        run.open_checkpoints(
            arrays, checkpoint_dir, every=checkpoint_every, keep=checkpoint_keep, resume=resume
        )
        exchange = partial(self._link.exchange, grid, timeout)
        self._begin(grid, arrays, exchange, train_config)
        run.num_rounds = num_rounds
        run.handshake(exchange, train_config)

        self._known = dict(self.global_arrays or initial_arrays)
        callbacks = Callbacks(run, self._whole_model, evaluate_fn, stop, on_round)
        stopping = callbacks.catch_up()
        with (
            explaining(run.resume.how_to_go_on),
            progress_bar(type(self).__name__, num_rounds, run.last_round, progress) as advance,
        ):
            for server_round in range(run.last_round + 1, num_rounds + 1):
                if stopping:
                    break
                trained = self._train(grid, timeout, server_round, train_config)
                metrics = {f"train-{name}": value for name, value in trained.items()}
                run.is_ending = server_round == num_rounds
                due = server_round % evaluate_every == 0 or run.is_ending
                if due:
                    metrics |= self._evaluate(grid, timeout, server_round, evaluate_config)
                callbacks.evaluate(server_round)
                stopping = callbacks.is_over(server_round, metrics)
                run.is_ending |= bool(stopping)
                if stopping and not due:
                    metrics |= self._evaluate(grid, timeout, server_round, evaluate_config)
                metrics |= run.record.central(server_round)
                note = f" ({self.stage})" if self.stage else ""
                log(INFO, "[ROUND %s/%s] %s%s", server_round, num_rounds, in_short(metrics), note)
                run.close_round(server_round, last=run.is_ending)
                callbacks.report(server_round, metrics)
                advance(server_round, metrics, note)
        if stopping:
            log(INFO, "The stop rule ended the run after round %s", run.last_round)
        run.resume.close()
        run.divergence.check_end(run.last_round, run.validation.last_refusal)
        run.record.result.arrays = self.global_arrays
        self._collected = collect_personal(run, exchange) if collect else None
        log(INFO, "Strategy execution finished in %.2fs", time.monotonic() - began)
        return run.record.result

    # ------------------------------------------------------------------------------------------
    # Flower's abstract methods, for callers that bring a loop of their own
    # ------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one message a node with the instructions of its sampled clients.

        In the first round `arrays` is the initial model. Afterwards it is the global model as it
        comes back: where it is another than `aggregate_train` returned, because a wrapper has added
        noise to it for example, the method goes on from it.

        Raises
        ------
        ValueError
            If it is another one and there is no global model, or no such one; if a strategy that is
            wrapped around this one cannot do what it is there for (docs/composition.md).
        RuntimeError
            If the method knows no rounds.
        """
        if not self.in_rounds:
            raise RuntimeError(
                f"{type(self).__name__} takes in every reply as it comes, which a loop of rounds "
                "cannot. Run it with start(grid, initial_arrays, num_rounds)."
            )
        check_user_settings(self, config)
        exchange = partial(self._link.exchange, grid, _QUERY_TIMEOUT)
        if not self.run.has_begun:
            wrappers = strategies_around(self, Strategy)
            self._begin(grid, named_arrays(arrays), exchange, config)
            names = [name.removeprefix(self.run.layout.prefix) for name in arrays]
            check_wrappers(self, wrappers, names, packed=self._link.discovery.is_packed)
            self._known = dict(arrays)
            self.run.handshake(exchange, config)
        else:
            self._take_back(arrays)
        self.run.check_aggregated()
        self._update_membership(grid, server_round, exchange, config)
        sent = self.run.configure_train(server_round, config)
        return self._link.messages(sent, MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, update the state, return the global model and the mean metrics."""
        metrics = self.run.aggregate_train(server_round, self._replies(replies))
        if metrics is None:
            return None, None
        if model := self.global_arrays:
            self._known = dict(model)
        return model, MetricRecord(dict(metrics))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one message a node with the models to evaluate; `arrays` as `configure_train`."""
        check_user_settings(self, config)
        self._take_back(arrays)
        self.membership.mark_uncertain(self._link.refresh(grid))
        sent = self.run.configure_evaluate(server_round, config)
        return self._link.messages(sent, MessageType.EVALUATE)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Check the replies and return their mean metrics."""
        metrics = self.run.aggregate_evaluate(server_round, self._replies(replies))
        return MetricRecord(dict(metrics)) if metrics else None

    def _take_back(self, arrays: ArrayRecord) -> None:
        """Adopt the global model as it comes back, where it is another than was given out."""
        if arrays and dict(arrays) != self._known:
            self.run.adopt(from_array_record(arrays))
            self._known = dict(arrays)

    def _train(
        self, grid: Grid, timeout: float, server_round: int, config: ConfigRecord
    ) -> Metrics:
        """Train for a round: the messages of `configure_train`, and their replies."""
        messages = self.configure_train(server_round, ArrayRecord(self._known), config, grid)
        replies = grid.send_and_receive(messages, timeout=timeout)
        arrays, metrics = self.aggregate_train(server_round, replies)
        self._take_back(arrays or ArrayRecord())
        means = cast(Metrics, dict(metrics or {}))
        self.run.record.trained(server_round, means)
        return means

    def _evaluate(
        self, grid: Grid, timeout: float, server_round: int, config: ConfigRecord
    ) -> Metrics:
        """Evaluate: the messages of `configure_evaluate`, and their replies."""
        if self.fraction_evaluate == 0:
            return {}
        messages = self.configure_evaluate(server_round, ArrayRecord(self._known), config, grid)
        metrics = self.aggregate_evaluate(
            server_round, grid.send_and_receive(messages, timeout=timeout)
        )
        means = cast(Metrics, dict(metrics or {}))
        self.run.record.evaluated(server_round, means)
        return means

    def _replies(self, replies: Iterable[Message]) -> list[ClientReply]:
        return self._link.replies(replies, self.run.validation.sent)

    def _begin(self, grid: Grid, arrays: Arrays, exchange: Exchange, config: ConfigRecord) -> None:
        """Wait for the clients that the run needs, and begin."""
        wanted, allow_missing = self.run.prepare(), self.max_missed_rounds is not None
        self._link.connect(grid, wanted, allow_missing=allow_missing)
        discovery = self._link.discovery
        self.run.begin(arrays, discovery.client_ids, discovery.announced, exchange, config)

    def _update_membership(
        self, grid: Grid, server_round: int, exchange: Exchange, config: ConfigRecord
    ) -> None:
        """Before a round, find out who came back, who has left and who is new."""
        self.membership.mark_uncertain(self._link.refresh(grid))
        discovery = self._link.discovery
        gone = self.run.update_membership(
            server_round, discovery.connected, exchange, config, announced=discovery.announced
        )
        discovery.forget(gone)

    def _whole_model(self) -> ArrayRecord:
        """Return the global model, with what of it is only on the clients as it was initially."""
        layout = self.run.layout
        return to_array_record(layout.complete(layout.to_send() | self.global_model()))

    def _need_state(self) -> None:
        if not self.run.has_begun:
            raise RuntimeError(
                f"{type(self).__name__} has no state yet: call start(grid, initial_arrays) first."
            )
