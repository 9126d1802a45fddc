"""A run: one round after another, without a word about messages.

`StatefulStrategy` drives it.
A round is `update_membership`, `configure_train`, `aggregate_train`, `configure_evaluate`,
`aggregate_evaluate`, `close_round`, in this order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import MessageType
from flwr.common import log
from numpy.typing import NDArray

from ..maths.blocks import Arrays, Spec, as_dtype, prefixed, spec_of, under
from ..maths.checks import in_range, listing
from ..maths.clienttable import Row
from .aggregation import MetricsAggrFn, aggregated_by
from .algorithm import Algorithm, MembersChange
from .common.collector import collector_paused
from .common.settings import as_text, settings_of
from .composition import why_not_another_model
from .members.membership import MOST_ASKED, Membership
from .members.sampling import Sampling
from .messages.records import (
    UPLOAD,
    ClientInstruction,
    ClientReply,
    Metrics,
    Reply,
    to_array_record,
)
from .messages.wire import WireDtype
from .outgoing import Outgoing
from .privacy import Privacy
from .record import Record
from .saving.pending import PENDING, PendingReplies
from .saving.resume import Resume
from .saving.state import (
    BASE,
    Saved,
    arrays_of,
    check_base,
    is_finite,
    load_arrays,
    parts_by_client,
)
from .trust.divergence import DivergenceMonitor
from .trust.layout import Layout
from .trust.limit import UploadLimit
from .trust.means import weighted_means, without_extremes
from .trust.validation import ReplyValidation
from .uploads import OnTheWay

Exchange = Callable[[dict[int, ClientInstruction], str], Iterable[ClientReply]]
"""Sends instructions of a kind to their clients and returns what came back."""

_STATE = "state/"  # before the names of the algorithm's own arrays


@dataclass(eq=False, repr=False)
class Run:
    """A run of an algorithm.

    Parameters
    ----------
    algorithm : Algorithm
        Whose state changes.
    train_metrics_aggr_fn, evaluate_metrics_aggr_fn, wire_dtype
        Settings of the strategy.
    membership, sampling, validation, limit, privacy
        The run's collaborators; `record`, `resume` and `pending` are its own.

    Attributes
    ----------
    layout : Layout
        How the initial arrays travel.
    model_spec : Spec
        Names, shapes and dtypes of a model's arrays as they travel; empty before the start.
    last_round : int
        The last round whose replies were taken in; 0 before the first.
    num_rounds : int or None
        The round that the run is to end with; None where the caller brings a loop of its own.
    is_ending : bool
        Whether no round follows the present one.
    """

    algorithm: Algorithm
    membership: Membership
    sampling: Sampling
    validation: ReplyValidation
    limit: UploadLimit
    privacy: Privacy
    train_metrics_aggr_fn: MetricsAggrFn | None = None
    evaluate_metrics_aggr_fn: MetricsAggrFn | None = None
    wire_dtype: WireDtype = None

    def __post_init__(self) -> None:
        algorithm = self.algorithm
        self.record, self.resume = Record(), Resume()
        self.divergence = DivergenceMonitor(algorithm)
        self.layout, self.pending = Layout(), PendingReplies()
        self.alterations: list[OnTheWay] = []  # between the bound and the noise
        self.outgoing = Outgoing(
            algorithm, self.membership, self.sampling, self.resume, self.validation, self.wire_dtype
        )
        self.model_spec: Spec = {}
        self.last_round = 0
        self.num_rounds: int | None = None
        self.is_ending = False
        self._is_open = False  # whether the replies of a round are still to come
        self._has_rows = False  # whether the initial clients are in the state

    @property
    def trained(self) -> list[str]:
        """Names of the arrays that have a gradient on the clients."""
        return self.layout.trained

    @property
    def has_begun(self) -> bool:
        """Whether there is a state."""
        return bool(self.model_spec)

    # ------------------------------------------------------------------------------------------
    # The start
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

        Parameters and errors are those of `StatefulStrategy.start`; `arrays` is the initial model.
        """
        which = fingerprint(self.algorithm, spec_of(arrays))
        saved = self.resume.open(folder, which, every=every, keep=keep, resume=resume)
        if saved is not None:
            self.go_on_from(saved)

    def prepare(self) -> list[int]:
        """Before the search for clients, load the owners of the ids; return the saved clients."""
        self.membership.client_keys.reset(under(BASE, self.resume.saved or {}))
        return self.resume.saved_clients

    def begin(
        self,
        arrays: Arrays,
        client_ids: Iterable[int],
        announced: int = 0,
        exchange: Exchange | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the state, or put back a saved one, for these clients.

        Parameters
        ----------
        arrays : Arrays
            The initial model.
        client_ids : iterable of int
            The clients that there are.
        announced : int
            The size of their federation; 0 where it is unknown.
        exchange, config
            As in `handshake`, to ask some of them what they train. Without, no client is asked.

        Raises
        ------
        ValueError
            If the arrays are not a usable model, or a saved state belongs to other clients.
        """
        self.layout = layout = Layout.of(arrays)
        found, algorithm, resume = sorted(client_ids), self.algorithm, self.resume
        allow_missing = self.membership.max_missed_rounds is not None
        resume.compare_clients(found, announced, allow_missing=allow_missing)
        self.membership.reset(resume.saved_clients or found, announced)
        self.sampling.reset()
        self.validation.reset()
        self.limit.reset()
        self.privacy.reset()
        self.record.reset(to_array_record(arrays))
        self.divergence.reset()
        self.last_round, self.num_rounds, self._has_rows = 0, None, False
        self.pending = PendingReplies()
        self._is_open = False
        if exchange is not None and algorithm.method is not None:
            complete = partial(self.outgoing.complete, 0, {**(config or {}), "handshake": True})
            chance, ids = (
                np.random.default_rng([self.sampling.seed, *b"layout"]),
                self.membership.ids,
            )
            order = [ids[place] for place in chance.permutation(len(ids))]
            layout.ask(complete, exchange, self.validation, order)
        self.privacy.check(algorithm, layout, self.wire_dtype)
        self._init_state()
        if resume.saved is not None:
            self._enter_initial_clients({})
            self._load(resume.saved)
        self.record.load(resume.begin(self.membership.ids))

    def _init_state(self) -> None:
        algorithm, first = self.algorithm, self.layout.to_send()
        self.model_spec = spec_of(first)
        algorithm.state = algorithm.init_state({n: np.array(a) for n, a in first.items()})

    def handshake(self, exchange: Exchange, config: Mapping[str, Any]) -> None:
        """Ask all clients what the algorithm must know before round 1, unless it knows already.

        Who does not answer usably is asked once more. Then the run begins without it, as if it had
        not been there, and it may join as any other.

        Raises
        ------
        RuntimeError
            If no client answers usably.
        """
        if self._has_rows:
            return
        replies, failed = self._ask(0, self.membership.ids, exchange, config, optional=True)
        if failed:
            more, failed = self._ask(0, failed, exchange, config)
            replies = dict(sorted((replies | more).items()))
        reasons = self._complaints(replies) if replies else {}
        self.validation.refuse(0, reasons)
        unusable = [c for c in replies if c in reasons or not self._may_join(0, c, replies)]
        if failed or unusable:
            self._begin_without({*failed, *unusable})
            replies = {c: reply for c, reply in replies.items() if c in self.membership}
        if replies:
            examples = np.array([reply.num_examples for reply in replies.values()])
            self.membership.initial_examples = float(examples.sum())
        self._enter_initial_clients(replies)

    def _begin_without(self, clients: Collection[int]) -> None:
        """Begin as if some clients had not been there."""
        members = self.membership
        if not (left := [client for client in members.ids if client not in clients]):
            raise RuntimeError(
                f"The handshake before round 1 failed for all clients, {listing(members.ids)}, and "
                f"{type(self.algorithm).__name__} needs their answers. "
                f"{self.validation.last_refusal} "
                "(Where their app has mods, docs/composition.md says which methods go with them.)"
            )
        log(
            WARNING,
            f"the run begins without clients {listing(sorted(clients))}, whose handshake failed; "
            "they may join later",
        )
        members.reset(left, members.announced)
        members.asked_in_vain(clients, 0)
        self._init_state()

    def _enter_initial_clients(self, replies: Mapping[int, Reply]) -> None:
        self._has_rows = True
        rows = self._new_rows({client: replies.get(client) for client in self.membership.ids})
        for part in parts_by_client(self.algorithm.state):
            part.insert(rows)

    def _new_rows(self, clients: Mapping[int, Reply | None]) -> dict[int, Row]:
        return {
            client: self.algorithm.new_client(client, reply) for client, reply in clients.items()
        }

    def _ask(
        self,
        server_round: int,
        clients: Sequence[int],
        exchange: Exchange,
        config: Mapping[str, Any],
        *,
        optional: bool = False,
    ) -> tuple[dict[int, Reply], list[int]]:
        """Shake hands with clients; return the usable replies, and the clients without one."""
        if (handshake := self.algorithm.handshake(clients)) is None:
            return {}, []
        spec, self._complaints = handshake.spec, handshake.check
        sent = self.outgoing.complete(
            0, {**config, "handshake": True}, handshake.instructions, spec
        )
        replies = exchange(sent, MessageType.TRAIN)
        accepted = self.validation.accept(0, replies, spec, optional=optional)
        self.record.count_down(server_round, sent)
        self.record.count_up(server_round, accepted.replies)
        return accepted.replies, sorted(sent.keys() - accepted.replies.keys())

    # ------------------------------------------------------------------------------------------
    # One round
    # ------------------------------------------------------------------------------------------

    def update_membership(
        self,
        server_round: int,
        connected: Iterable[int],
        exchange: Exchange,
        config: Mapping[str, Any],
        *,
        announced: int = 0,
    ) -> list[int]:
        """Drop departed clients and shake hands with new ones, before a round of training.

        Parameters
        ----------
        server_round : int
            The round.
        connected : iterable of int
            The clients that are there.
        exchange : Exchange
            How to ask them.
        config : mapping
            The user's settings.
        announced : int
            The size of the federation, as in `begin`.

        Returns
        -------
        list of int
            Who has left.
        """
        members, here = self.membership, set(connected)
        members.record_connected(server_round, here, announced)
        if gone := members.overdue(server_round):
            log(
                WARNING,
                f"round {server_round}: clients {listing(gone)} have not been connected for "
                f"{members.max_missed_rounds} rounds; they have left the run",
            )
            self._drop_inactive(gone)
        if silent := members.never_heard():
            log(
                WARNING,
                f"round {server_round}: clients {listing(silent)} were asked {MOST_ASKED} times "
                "and never answered usably; they have left the run, and may join it",
            )
            self._drop_inactive(silent)
        if new := members.unknown(here, server_round):
            replies, failed = self._ask(server_round, new, exchange, config)
            for client in new:
                if client in failed or not self._may_join(server_round, client, replies):
                    members.asked_in_vain([client], server_round)
                else:
                    members.joining[client] = replies.get(client)
        return gone + silent

    def _may_join(self, server_round: int, client: int, replies: Mapping[int, Reply]) -> bool:
        """Return whether the algorithm can start with a client as it answered the handshake."""
        try:
            self.algorithm.new_client(client, replies.get(client))
        except ValueError as error:
            self.validation.refuse(server_round, {client: str(error)})
            return False
        return True

    def _drop_inactive(self, gone: Sequence[int]) -> None:
        rows = self.membership.remove(gone)
        change = MembersChange(server_round=self.last_round, left=gone, rows=rows)
        self.algorithm.members_changed(change)
        for part in parts_by_client(self.algorithm.state):
            part.remove(gone, self.last_round)

    @collector_paused()
    def configure_train(
        self, server_round: int, config: Mapping[str, Any]
    ) -> dict[int, ClientInstruction]:
        """Draw the clients of a round and return what each gets."""
        members, algorithm = self.membership, self.algorithm
        pool = sorted([*members.ids, *members.joining])
        self.pending.keep(pool)
        sampled = self.sampling.for_training(pool, self.pending.sent)
        log(INFO, "configure_train: Sampled %s clients (out of %s)", len(sampled), len(pool))
        new = self._new_rows({c: members.joining[c] for c in sampled if c in members.joining})
        for part in parts_by_client(algorithm.state):
            part.add_pending(new)
        instructions = algorithm.train_instructions(server_round, sampled) if sampled else {}
        settings = {**config, **self.privacy.asks(algorithm.upload)}
        spec = algorithm.upload_spec()
        sent = self.outgoing.complete(server_round, settings, instructions, spec)
        uploading = [client for client, message in sent.items() if self._spec_of(spec, message)]
        self.privacy.spend(uploading, len(pool), stateless=algorithm.upload.stateless)
        self._is_open = bool(sent)
        members.mark_uncertain(sent)
        self.record.count_down(server_round, sent)
        return sent

    @collector_paused()
    def aggregate_train(self, server_round: int, replies: Iterable[ClientReply]) -> Metrics | None:
        """Check the replies of a round, then let them change the state; return the mean metrics.

        None where no reply is usable. Where no client could ever train, the run ends after
        `PATIENCE` rounds; at once if all clients are of the wrong kind.
        """
        algorithm, sent = self.algorithm, self.validation.sent
        self._is_open = False
        taken, lost = self.validation.accept(server_round, replies, self.upload_spec_of)
        uploads, unfit = {}, {}
        for client, reply in taken.items():
            try:
                algorithm.check_reply(client, reply)
                self.privacy.check_reply(reply)
            except ValueError as error:
                unfit[client] = str(error)
            else:
                reply.sent = sent[client]
                uploads[client] = reply
        self.validation.refuse(server_round, unfit)
        self.last_round = server_round
        arrived = uploads
        for alteration in (self.limit, *self.alterations, self.privacy):
            arrived, refused = alteration.apply(server_round, arrived)
            self.validation.refuse(server_round, refused)
        accepted = {client: uploads[client] for client in arrived}
        if accepted:
            self._update_state(server_round, arrived)
        else:
            log(WARNING, "round %s: no usable reply, nothing changes", server_round)
            self._on_state_lost(server_round, lost)
            if not lost:
                self.divergence.count_empty_round(
                    self.validation.explain(), hopeless=self.validation.all_failed_alike
                )
            return None
        version, num_rounds = self.membership.version, self.num_rounds or 0
        self.divergence.watch(server_round, accepted, version, num_rounds)
        self.membership.accept(accepted, server_round)
        self.membership.asked_in_vain(sent.keys() - accepted.keys(), server_round)
        local = self.privacy.is_local
        altered = [client for client, reply in arrived.items() if reply.altered or local]
        self.membership.mark_uncertain(altered)  # a client holds what it sent
        self.record.count_up(server_round, accepted)
        self.record.train_metrics[server_round] = {i: r.metrics for i, r in accepted.items()}
        self._on_state_lost(server_round, lost)
        function = self.train_metrics_aggr_fn
        if function is None:
            means = weighted_means(accepted)
        else:
            means = aggregated_by(function, "train_metrics_aggr_fn", accepted)
        clients = {client: reply.metrics for client, reply in accepted.items()}
        means = algorithm.metrics("train", clients, means) | self.limit.measured()
        means |= self.privacy.measured()
        self.record.trained(server_round, means)
        return means

    def upload_spec_of(self, client: int) -> Spec:
        """Return the names, shapes and dtypes of a client's upload in this round."""
        return self._spec_of(self.algorithm.upload_spec(), self.validation.sent[client])

    @staticmethod
    def _spec_of(spec: Spec, sent: ClientInstruction) -> Spec:
        """Return what of an upload a client is asked for."""
        return {name: spec[name] for name in sent.upload_names()} if UPLOAD in sent.config else spec

    def check_aggregated(self) -> None:
        """Count a round without a call of `aggregate_train` as one without a usable reply.

        Raises
        ------
        RuntimeError
            If there were `PATIENCE` of them in a row.
        """
        if self._is_open:
            reason = (
                "its replies were not passed on to aggregate_train, as Flower's privacy wrappers "
                "and SecAgg+ do where a client has failed: the log above says which, and why"
            )
            log(WARNING, "the last round changed nothing: %s", reason)
            self.divergence.count_empty_round(reason, hopeless=False)

    def adopt(self, arrays: Arrays) -> None:
        """Go on from another global model than the method's own, as a hook or wrapper returned it.

        Frozen arrays and second names are not read: they are no part of the state.

        Raises
        ------
        ValueError
            If the method is no mean of models, or these are not such arrays.
        """
        algorithm, name = self.algorithm, type(self.algorithm).__name__
        if reason := why_not_another_model(algorithm):
            raise ValueError(
                f"{name} got back another global model than it returned, and cannot go on from "
                f"one: {reason}. Leave it as it is."
            )
        now: Arrays = algorithm.state.model
        model = self.layout.travelling_part(arrays)
        found = {key: array.shape for key, array in model.items()}
        if found != (shapes := {key: array.shape for key, array in now.items()}):
            raise ValueError(
                f"{name} got back arrays of the shapes {found} as its global model, expected "
                f"{shapes}. Return what aggregate_train returned, with other numbers."
            )
        with np.errstate(all="ignore"):
            fitting = {key: as_dtype(model[key], array.dtype) for key, array in now.items()}
        if not all(map(in_range, fitting.values())):
            raise ValueError(
                f"The global model that {name} got back holds NaN, infinity or numbers too large "
                "for a sum. Look at what was done to it: less noise, a smaller step."
            )
        algorithm.state.model = fitting

    def _update_state(self, server_round: int, replies: dict[int, Reply]) -> None:
        """Let replies change the state."""
        algorithm = self.algorithm
        if joined := [client for client in replies if client in self.membership.joining]:
            self._add_members(server_round, joined)
            log(INFO, "round %s: clients %s belong to the run now", server_round, listing(joined))
        with np.errstate(over="ignore", invalid="ignore"):  # `check_finite` reports a divergence
            algorithm.update(server_round, replies)

    def _add_members(self, server_round: int, clients: Sequence[int]) -> None:
        """Take clients into the run whose first reply was accepted."""
        rows = self._new_rows({client: self.membership.joining[client] for client in clients})
        places = self.membership.admit(clients, server_round)
        for part in parts_by_client(self.algorithm.state):
            part.insert(rows)
        change = MembersChange(server_round=server_round, joined=clients, rows=places)
        self.algorithm.members_changed(change)

    @collector_paused()
    def configure_evaluate(
        self, server_round: int, config: Mapping[str, Any]
    ) -> dict[int, ClientInstruction]:
        """Draw the clients that evaluate and return the models each gets."""
        pool = [c for c in self.membership.ids if c not in self.pending.training]
        if not (sampled := self.sampling.for_evaluation(pool)):
            return {}
        instructions = self.algorithm.evaluate_instructions(server_round, sampled)
        return self.outgoing.complete(server_round, config, instructions, spec=None)

    @collector_paused()
    def aggregate_evaluate(self, server_round: int, replies: Iterable[ClientReply]) -> Metrics:
        """Check the replies of an evaluation and return the mean metrics."""
        any_sent = bool(self.validation.sent)
        failure = self.validation.last_refusal  # that of the training says more
        accepted, lost = self.validation.accept(server_round, replies, spec=None)
        reason, alike = self.validation.explain(), self.validation.all_failed_alike
        self.validation.last_refusal = failure
        self._on_state_lost(server_round, lost)
        # A client without test data says so with 0 examples; it has no say in the means.
        accepted = {i: reply for i, reply in accepted.items() if reply.num_examples > 0}
        if not accepted:
            if any_sent:
                log(WARNING, "round %s: no usable evaluation", server_round)
            if alike and not self.record.evaluate_metrics and not self.is_ending:
                raise RuntimeError(f"No client could be evaluated, so the run ends. {reason}")
            return {}
        clients = {i: reply.metrics for i, reply in accepted.items()}
        self.record.evaluate_metrics[server_round] = clients
        function = self.evaluate_metrics_aggr_fn
        if function is None:
            means = self.algorithm.metrics("evaluate", clients, weighted_means(accepted))
            means = self._with_headline(means)
        else:
            named = {
                client: replace(reply, metrics=self._with_headline(reply.metrics))
                for client, reply in accepted.items()
            }
            means = aggregated_by(function, "evaluate_metrics_aggr_fn", named)
        self.record.evaluated(server_round, means)
        return means

    def _with_headline(self, metrics: Metrics) -> Metrics:
        """Return metrics with those of the headline model under their plain names as well.

        Projects read ``accuracy``, and clients report ``personal-accuracy`` and others.
        """
        headline = f"{next(iter(self.algorithm.kinds))}-"
        plain = {n.removeprefix(headline): v for n, v in metrics.items() if n.startswith(headline)}
        return {**metrics, **{name: v for name, v in plain.items() if name not in metrics}}

    def for_decisions(self, server_round: int, metrics: Mapping[str, float]) -> Metrics:
        """Return the metrics of a round as a rule that ends a run gets them.

        The means are over what clients report `without_extremes`, so that one client cannot end it.
        What a function of the user's has made of it stays as it is.
        """
        found = dict(metrics)
        own = self.train_metrics_aggr_fn is not None
        trained = {} if own else self.record.train_metrics.get(server_round, {})
        plain, robust = map(self.validation.means_of, (trained, without_extremes(trained)))
        for name, mean in plain.items():
            if found.get(f"train-{name}") == mean:  # else the server has measured it itself
                found[f"train-{name}"] = robust[name]
        own = self.evaluate_metrics_aggr_fn is not None
        evaluated = {} if own else self.record.evaluate_metrics.get(server_round, {})
        if evaluated:
            held = without_extremes(evaluated)
            means = self.algorithm.metrics("evaluate", held, self.validation.means_of(held))
            found |= self._with_headline(means)
        return found | self.record.central(server_round)

    def _on_state_lost(self, server_round: int, lost: Sequence[int]) -> None:
        if not lost:
            return
        log(
            WARNING,
            f"round {server_round}: clients {listing(lost)} have lost what they keep between "
            "rounds; they start afresh",
        )
        self.membership.mark_lost(lost)
        self.algorithm.members_changed(MembersChange(server_round=server_round, lost=lost))

    # ------------------------------------------------------------------------------------------
    # Saving
    # ------------------------------------------------------------------------------------------

    def close_round(self, server_round: int, *, last: bool = False) -> None:
        """Save a round, once all of it is over, if it is time to; `last` says that none follows."""
        self.divergence.check_finite(self.algorithm.state, server_round)
        recorded = self.resume.record(self.record.entry(server_round))
        if recorded and (last or self.resume.is_due(server_round)):
            self._save(server_round)

    def _save(self, server_round: int) -> None:
        which, state = fingerprint(self.algorithm, self.layout.given), self.state_arrays()
        self.resume.save(server_round, state, self.membership.last_accepted, which)

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the server's state; the algorithm's arrays may be views of it."""
        state = prefixed(_STATE, arrays_of(self.algorithm.state))
        return {**self._base(), **state, **prefixed(PENDING, self.pending.state_arrays())}

    def _base(self) -> dict[str, NDArray[Any]]:
        arrays = {"round": np.array(self.last_round, dtype=np.int64)}
        arrays |= self.membership.state_arrays() | self.sampling.state_arrays()
        arrays |= self.limit.state_arrays() | self.privacy.state_arrays()
        return prefixed(BASE, arrays)

    def go_on_from(self, state: Saved) -> None:
        """Continue from a state at the next start; refuse what is none of this strategy.

        Raises
        ------
        ValueError
            If an entry is missing, or has another shape or dtype than it must.
        """
        expected = self._base()
        for name in prefixed(BASE, self.limit.state_arrays()).keys() - state.keys():
            del expected[name]  # the saved run had another bound, or none
        if prefixed(BASE, self.privacy.state_arrays()).keys() - state.keys():
            raise ValueError(
                "The saved run had no privacy=..., so nothing bounds what it has given out. Leave "
                "privacy out to go on with it, or start a new run."
            )
        check_base(state, expected)
        self.resume.saved = {key: np.array(value) for key, value in state.items()}

    def _load(self, saved: Saved) -> None:
        state, base = under(_STATE, saved), under(BASE, saved)
        try:
            load_arrays(self.algorithm.state, state, type(self.algorithm).__name__)
            if not is_finite(self.algorithm.state):
                raise ValueError("it is not finite, which no run's is")
            for part in (self.membership, self.sampling, self.limit, self.privacy):
                part.load_state_arrays(base)
            self.pending.load_state_arrays(under(PENDING, saved))
        except Exception as error:  # it may be anything
            raise ValueError(f"The saved state cannot be used: {error}") from error
        self.last_round = int(base["round"])
        self.divergence.ever_usable = any(self.membership.last_accepted.values())


def fingerprint(algorithm: Algorithm, spec: Spec) -> dict[str, Any]:
    """Return which run it is that starts an algorithm from arrays, for JSON."""
    settings = settings_of(algorithm)
    return {
        "algorithm": type(algorithm).__name__,
        "model": {name: f"{dtype} {shape}" for name, (shape, dtype) in spec.items()},
        "seed": settings.pop("seed"),
        "settings": {name: as_text(value) for name, value in settings.items()},
    }
