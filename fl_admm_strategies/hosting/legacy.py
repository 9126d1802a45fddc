"""Any of our strategies as a strategy of Flower's legacy API."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from logging import INFO, WARNING
from typing import Any, Self

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common import (
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetPropertiesIns,
    NDArrays,
    Parameters,
    Scalar,
    bytes_to_ndarray,
    log,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow

from ..maths.blocks import Arrays, as_dtype
from ..maths.checks import check_count
from ..runtime.best import KeepBest, KeepBestBy
from ..runtime.callbacks import saving_if_it_raises
from ..runtime.composition import (
    check_clipping,
    check_secure_aggregation,
    check_wrappers,
    overridden,
    strategies_around,
)
from ..runtime.members.discovery import Discovery
from ..runtime.members.owners import Owners
from ..runtime.messages import records as wire
from ..runtime.messages.identity import Identity, check_actor, identity_of
from ..runtime.messages.records import ClientInstruction, ClientReply, RawReply
from ..runtime.reserved import check_user_settings
from ..runtime.strategy import StatefulStrategy
from ..runtime.trust.bound import Bound
from ..runtime.trust.layout import NAMES, answer_in
from .background import in_background

# Seconds that a look waits for answers: in a simulation they come at once.
_ANSWER_WITHIN = 0.05

_LEGACY_HOOKS = {
    "configure_train": "configure_fit",
    "aggregate_train": "aggregate_fit",
    "configure_evaluate": "configure_evaluate",
    "aggregate_evaluate": "aggregate_evaluate",
}
"""What the legacy API calls the hooks of the current one."""

_ZIP = "ValueError: zip() argument"
"""What a mod of Flower's says where an upload has other arrays than the client received."""
_MODS = (
    "If the ClientApp has mods that change uploads: under the legacy API they take every message "
    "for one model. Use client_app(client_fn, mods=[...]) and the current API; "
    "docs/composition.md says which methods go with which mods."
)

_SECAGG = (
    "Its app has secaggplus_mod, which takes every training message for a stage of SecAgg+: run "
    "DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(...)), and clients of this library "
    "(docs/privacy.md)."
)

EvaluateFn = Callable[[int, NDArrays, dict[str, Scalar]], tuple[float, dict[str, Scalar]] | None]
MetricsAggrFn = Callable[[list[tuple[int, dict[str, Scalar]]]], dict[str, Scalar]]


class LegacyStrategy(Strategy):
    """Run a strategy of this library in a project on Flower's legacy API.

    For ``ServerApp(server_fn=...)`` with `ServerAppComponents`, and for `LegacyContext` with
    `DefaultWorkflow`. The clients are run by ``ClientApp(client_fn=...)``, one on each node.

    Parameters
    ----------
    strategy : StatefulStrategy
        The strategy; its results are read from it after the run.
    initial_arrays : ArrayRecord
        The initial model, e.g. ``ArrayRecord(model.state_dict())``.
    train_config, evaluate_config : ConfigRecord, optional
        Settings for the clients, added to what the strategy sends; none that it gives itself.
    evaluate_every : int (default: 1)
        Evaluate on the clients every so many rounds. The legacy API does not tell a strategy which
        round is the last, so choose a divisor of the number of rounds to evaluate the final models.
    evaluate_fn : callable, optional
        ``evaluate_fn(server_round, arrays, config)`` for the global model, as in Flower's `FedAvg`.
        What of it is only on the clients is as in the initial arrays.
    fit_metrics_aggregation_fn, evaluate_metrics_aggregation_fn : callable, optional
        As in Flower's `FedAvg`: the numbers of examples and metrics of the clients in, the
        aggregated metrics out, in place of the strategy's own.
    num_rounds : int, optional
        How many there are, for methods whose last rounds differ (`FPFC` without a lambda): the
        legacy API does not tell a strategy that either.
    checkpoint_dir, checkpoint_every, checkpoint_keep, resume, keep_best
        As in `StatefulStrategy.start`. Flower counts its rounds from 1 in a resumed run as well:
        those before the checkpoint pass without asking anybody, and are missing in its `History`;
        the strategy's own records are complete.

    Examples
    --------
    >>> strategy = FPFC(SmoothedSCAD(lam=0.6))
    >>> legacy = LegacyStrategy(strategy, ArrayRecord(model.state_dict()))
    >>> def server_fn(context: Context) -> ServerAppComponents:
    ...     return ServerAppComponents(strategy=legacy, config=ServerConfig(num_rounds=200))
    """

    def __init__(
        self,
        strategy: StatefulStrategy,
        initial_arrays: ArrayRecord,
        *,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_every: int = 1,
        evaluate_fn: EvaluateFn | None = None,
        fit_metrics_aggregation_fn: MetricsAggrFn | None = None,
        evaluate_metrics_aggregation_fn: MetricsAggrFn | None = None,
        num_rounds: int | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 1,
        checkpoint_keep: int = 3,
        resume: bool = False,
        keep_best: KeepBestBy | None = None,
    ) -> None:
        if not isinstance(strategy, StatefulStrategy):
            raise TypeError(
                f"strategy is a {type(strategy).__name__}, expected one of this library, e.g. FPFC."
            )
        if not strategy.in_rounds:
            raise ValueError(
                f"{type(strategy).__name__} takes in every reply as it comes, and Flower's legacy "
                "API waits for all of a round. Use the current API: strategy.start(grid, ...)."
            )
        if hooks := overridden(type(strategy), StatefulStrategy):
            raise ValueError(
                f"{type(strategy).__name__} has a {hooks[0]}() of its own, which Flower's legacy "
                "API does not call. Derive a class from LegacyStrategy and give it "
                f"{_LEGACY_HOOKS[hooks[0]]}()."
            )
        check_count("evaluate_every", evaluate_every, least=1)
        self.strategy = strategy
        self.initial_arrays = wire.named_arrays(initial_arrays)
        self.train_config = train_config or ConfigRecord()
        self.evaluate_config = evaluate_config or ConfigRecord()
        check_user_settings(strategy, self.train_config, self.evaluate_config)
        self.evaluate_every = evaluate_every
        self.evaluate_fn = evaluate_fn
        if fit_metrics_aggregation_fn is not None:
            strategy.train_metrics_aggr_fn = partial(_by_legacy, fit_metrics_aggregation_fn)
        if evaluate_metrics_aggregation_fn is not None:
            strategy.evaluate_metrics_aggr_fn = partial(_by_legacy, evaluate_metrics_aggregation_fn)
        self.num_rounds = num_rounds
        self._open_checkpoints = partial(
            strategy.run.open_checkpoints,
            folder=checkpoint_dir,
            every=checkpoint_every,
            keep=checkpoint_keep,
            resume=resume,
        )
        self._best = KeepBest(keep_best, strategy.run, strategy.models, checkpoint_dir)
        self._nodes = _ManagedNodes()
        self._discovery = Discovery(strategy.membership.owners)
        self._names: list[str] = []  # of the global model
        self._known: list[bytes] = []  # its arrays, as Flower's server has them
        self._not_connected: list[int] = []  # of the clients that are asked in this phase
        self._secure: dict[str, int] = {}  # what clients are told where uploads are masked

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:
        """Wait for the clients, learn who they are, start the state or put back a saved one."""
        strategy, run, arrays = self.strategy, self.strategy.run, self.initial_arrays
        wrappers = strategies_around(self, Strategy)
        check_wrappers(strategy, wrappers)
        for workflow in strategies_around(self, DefaultWorkflow):
            if isinstance(workflow.fit_workflow, SecAggPlusWorkflow):
                is_private = run.privacy.is_central
                check_secure_aggregation(strategy, strategy.max_norm, is_private=is_private)
                run.bound = Bound(math.inf, "clip")  # nobody sees a single upload
                alike = strategy.counted_by == "uniform"
                weight = max(1, int(workflow.fit_workflow.max_weight)) if alike else 0
                self._secure = {wire.SECURE: weight}
        strategy.summary()
        self._open_checkpoints(arrays)
        wanted, self._nodes = run.prepare(), _ManagedNodes()
        self._discovery = found = Discovery(strategy.membership.owners)
        found.find(
            self._nodes.of(client_manager),
            at_least=strategy.min_available_nodes,
            timeout=strategy.node_timeout,
            wanted=wanted,
            allow_missing=strategy.max_missed_rounds is not None,
        )
        run.begin(arrays, found.connected, found.announced, self._exchange, self.train_config)
        check_clipping(strategy, wrappers, list(run.layout.initial), packed=False)
        self._nodes.has_begun = True
        run.num_rounds = self.num_rounds
        self._first_round = run.last_round + 1
        run.handshake(self._exchange, self.train_config)
        run.close_round(run.last_round, last=run.resume.has_unreported)
        self._best.catch_up()
        self._names = list(arrays)
        return self._given_out(self._global_model() if run.last_round else arrays)

    def _global_model(self) -> Arrays:
        return self.strategy.run.layout.complete(self.strategy.global_model())

    def _given_out(self, model: Arrays) -> Parameters:
        """Return a model for Flower's server, which hands it back before every phase."""
        parameters = ndarrays_to_parameters(list(model.values()))
        if model:
            self._names, self._known = list(model), list(parameters.tensors)
        return parameters

    def _take_back(self, parameters: Parameters) -> None:
        """Adopt the global model as it comes back, where it is another than was given out."""
        if parameters.tensors and parameters.tensors != self._known:
            model, error = _read(parameters, self._names)
            if error:
                raise ValueError(
                    f"{type(self.strategy).__name__} got back another global model than it "
                    f"returned, which cannot be used: {error}."
                )
            self.strategy.run.adopt(model)
            self._known = list(parameters.tensors)

    def _proxy_of(self, client: int) -> ClientProxy | None:
        """Return the proxy of a client's node, None where it is not connected."""
        if not self._discovery.is_connected(client):
            return None
        return self._nodes.proxies[self._discovery.node_of[client]]

    def _client_of(self, cid: str) -> int | None:
        """Return the client that a proxy's node hosts."""
        return next(iter(self._discovery.clients_on(int(cid))), None)

    def _exchange(
        self, asked: dict[int, ClientInstruction], message_type: str
    ) -> list[ClientReply]:
        """Send training instructions to their clients and return what came back."""
        if self._secure and any(NAMES not in ins.config for ins in asked.values()):
            raise ValueError(
                f"SecAggPlusWorkflow is around {type(self.strategy).__name__}, which asks clients "
                "before their first round, and secaggplus_mod takes every training message for one "
                "of its own. Where weights is 'size', give 'uniform'; or take another method "
                "(docs/privacy.md)."
            )

        def ask(client: int) -> ClientReply:
            if (answer := self._ask_about_names(client, asked[client])) is not None:
                return client, answer
            ins = FitIns(*_payload(asked[client]))
            if (proxy := self._proxy_of(client)) is None:
                return client, wire.NOT_CONNECTED
            try:
                res = proxy.fit(ins, timeout=None, group_id=0)
            except Exception as error:  # whatever the client raises
                check_actor(str(error))
                advice = _SECAGG if "secaggplus_configs" in str(error) else _MODS
                return client, RawReply(error=wire.brief(f"{error} {advice}"))
            return client, self._reply(res, asked[client].upload_names())

        with ThreadPoolExecutor() as pool:
            return list(pool.map(ask, asked))

    def _ask_about_names(self, client: int, question: ClientInstruction) -> RawReply | None:
        """Ask about the initial arrays by properties, which pass no mods for training.

        None where that is not the question, or the client is not one of ours.
        """
        proxy = self._proxy_of(client)
        if NAMES not in question.config or proxy is None:
            return None
        ins = GetPropertiesIns({**question.full_config()})
        try:
            found = proxy.get_properties(ins, timeout=None, group_id=0).properties
        except Exception:  # a client of the user's own: the question goes as any other
            return None
        return answer_in(found)

    def _reachable(self, clients: Iterable[int]) -> list[tuple[int, ClientProxy]]:
        """Return the clients of a phase that are connected, with their proxies."""
        proxies = [(client, self._proxy_of(client)) for client in clients]
        self._not_connected = [client for client, proxy in proxies if proxy is None]
        return [(client, proxy) for client, proxy in proxies if proxy is not None]

    def _reply(self, res: FitRes, names: list[str]) -> RawReply:
        arrays, error = _read(res.parameters, names)
        if self._secure:  # the mean, in double precision
            spec = self.strategy.upload_spec()
            arrays = {name: as_dtype(array, spec[name][1]) for name, array in arrays.items()}
        metrics = {**res.metrics, self.strategy.weighted_by_key: res.num_examples}
        return RawReply(None if error else arrays, metrics, error or None)

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Return what each sampled client gets for training."""
        if server_round < self._first_round:
            return []
        self._take_back(parameters)
        self.strategy.run.check_aggregated()
        moved = self._discovery.refresh(self._nodes.of(client_manager))
        gone = self.strategy.run.update_membership(
            server_round,
            self._discovery.connected,
            self._exchange,
            self.train_config,
            announced=self._discovery.announced,
            restarted=moved,
        )
        self._discovery.forget(gone)
        config = {**self.train_config, **self._secure}
        asked = self.strategy.run.configure_train(server_round, config)
        return [(proxy, FitIns(*_payload(asked[c]))) for c, proxy in self._reachable(asked)]

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Check the replies, update the state, return the global model."""
        asked = self.strategy.run.intake.asked
        replies: list[ClientReply] = []
        for proxy, res in results:
            client = self._client_of(proxy.cid)
            names = list(self.strategy.upload_spec())
            if client is not None and client in asked:
                names = asked[client].upload_names()
            replies.append((client, self._reply(res, names)))
        # Nobody tells whether a round follows; where all have answered, this may be the last.
        everybody = len(results) + len(failures) == len(asked)
        replies += self._failures(server_round, replies, failures)
        means = self.strategy.run.aggregate_train(server_round, replies, patient=not everybody)
        if means is None:
            return None, {}
        return self._given_out(self._global_model()), dict(means)

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Return the models that each sampled client evaluates."""
        if server_round < self._first_round:
            return []
        self._take_back(parameters)
        due = server_round % self.evaluate_every == 0
        run, config = self.strategy.run, self.evaluate_config
        asked = run.configure_evaluate(server_round, config) if due else {}
        if not asked:
            self._close_round(server_round)
        return [(proxy, EvaluateIns(*_payload(asked[c]))) for c, proxy in self._reachable(asked)]

    def aggregate_evaluate(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, EvaluateRes]],
        failures: list[tuple[ClientProxy, EvaluateRes] | BaseException],
    ) -> tuple[float | None, dict[str, Scalar]]:
        """Check the replies and return the mean loss and metrics."""
        replies: list[ClientReply] = []
        for proxy, res in results:
            counted = {self.strategy.weighted_by_key: res.num_examples}
            metrics = {"loss": res.loss, **res.metrics, **counted}
            replies.append((self._client_of(proxy.cid), RawReply(None, metrics)))
        replies += self._failures(server_round, replies, failures)
        means = self.strategy.run.aggregate_evaluate(server_round, replies)
        self._close_round(server_round)
        # A function of the user's need not return the loss, which Flower has beside the metrics.
        clients = self.strategy.evaluate_metrics.get(server_round, {})
        loss = means.get("loss", self.strategy.run.intake.means_of(clients).get("loss"))
        return loss, dict(means)

    def evaluate(
        self, server_round: int, parameters: Parameters
    ) -> tuple[float, dict[str, Scalar]] | None:
        """Evaluate the global model on the server, where `evaluate_fn` was given."""
        if self.evaluate_fn is None:
            return None
        given = parameters_to_ndarrays(parameters)
        # Where a part of the model is only on the clients, that is as it was initially.
        whole = self.initial_arrays | dict(zip(self._names, given, strict=False))
        with saving_if_it_raises(self.strategy.run, "evaluate_fn", server_round):
            found = self.evaluate_fn(server_round, list(whole.values()), {})
        # In a resumed run Flower asks about the rounds before, too, and has no models of them.
        if found is not None and server_round >= self.strategy.last_round:
            central = self.strategy.run.record.result.evaluate_metrics_serverapp
            central[server_round] = MetricRecord(_numbers({"loss": found[0], **found[1]}))
        return found

    def _close_round(self, server_round: int) -> None:
        self.strategy.run.close_round(server_round)
        self._best.look(server_round)

    def _failures(
        self, server_round: int, replies: Sequence[ClientReply], failures: Sequence[Any]
    ) -> list[ClientReply]:
        """Return the failures as replies of those who failed.

        The legacy API rarely says who did. Where as many have failed as are missing, all of these
        have. Errors that may be one client's or another's have lines of their own in the log.
        """
        answered = {client for client, _ in replies}
        failed: list[ClientReply] = [(c, wire.NOT_CONNECTED) for c in self._not_connected]
        reasons: list[str] = []
        for failure in failures:
            proxy, reason = None, str(failure)
            if isinstance(failure, tuple):
                proxy, reason = failure[0].cid, failure[1].status.message
            check_actor(reason)
            # A client that lost its state says who it is; one that has replied has not failed.
            client = wire.who_lost(reason) if proxy is None else self._client_of(proxy)
            if _ZIP in reason:
                reason = f"{reason} {_MODS} [{wire.MOD_REFUSED}]"
            if client is None or client in answered:
                reasons.append(reason)
            else:
                failed.append((client, RawReply(error=wire.brief(reason))))
        known = answered | {client for client, _ in failed}
        missing = [client for client in self.strategy.run.intake.asked if client not in known]
        if len(reasons) == len(missing) and len(set(reasons)) == 1:
            return failed + [(c, RawReply(error=wire.brief(reasons[0]))) for c in missing]
        for reason in sorted(reasons):
            log(WARNING, "round %s: a client failed: %s", server_round, wire.brief(reason))
        if reasons and len(reasons) == len(missing):
            text = f"the error is one of those above, e.g. {min(reasons)}"
            failed += [(client, RawReply(error=wire.brief(text))) for client in missing]
        return failed


class _ManagedNodes:
    """The nodes of Flower's client manager, which say in their properties which client they are.

    Attributes
    ----------
    proxies : dict of int to ClientProxy
        Those that are connected, by node id.
    has_begun : bool
        Whether the run has. Before, a client without properties has its node's id.
    """

    def __init__(self) -> None:
        self.proxies: dict[int, ClientProxy] = {}
        self.has_begun = False
        self._asked: dict[int, Future[Identity]] = {}  # nodes that have not answered yet

    def of(self, client_manager: ClientManager) -> Self:
        """Look at this manager's nodes from now on."""
        self._manager = client_manager
        return self

    def connected(self, owners: Owners) -> set[int]:
        """Return the ids of the connected nodes."""
        self._manager.num_available()  # makes Flower's manager look for new nodes
        self.proxies = {int(cid): proxy for cid, proxy in self._manager.all().items()}
        if self.proxies:
            # Flower's proxies are of nodes of a grid; its type for them is not public.
            grid = next(iter(self.proxies.values())).grid  # type: ignore[attr-defined]
            there = owners.connected(grid)
            self.proxies = {node: p for node, p in self.proxies.items() if node in there}
        return set(self.proxies)

    def identify(self, nodes: Collection[int]) -> dict[int, Identity]:
        """Ask those of these nodes that were not asked yet; return the answers that have come."""
        for node in sorted(set(nodes) - self._asked.keys()):
            self._asked[node] = in_background(
                partial(_identity, self.proxies[node], has_begun=self.has_begun)
            )
        wait(self._asked.values(), timeout=_ANSWER_WITHIN)
        done = [node for node, answer in self._asked.items() if answer.done()]
        return {node: self._asked.pop(node).result() for node in done}


def _identity(proxy: ClientProxy, *, has_begun: bool) -> Identity:
    """Ask a node which client it is."""
    try:
        properties: dict[str, Any] = proxy.get_properties(
            GetPropertiesIns({}), timeout=None, group_id=0
        ).properties
    except Exception as error:  # whatever the client's own get_properties raises
        check_actor(str(error))
        reason = wire.brief(str(error))
        if has_begun:
            return Identity([], trouble=f"could not say which client it is: {reason}")
        log(INFO, "client %s has no properties (%s); its node id is its id", proxy.cid, reason)
        properties = {}
    client = properties.get(wire.CLIENT_ID, int(proxy.cid))
    return identity_of([client], properties.get(wire.NUM_CLIENTS, 0))


def _by_legacy(function: MetricsAggrFn, records: list[RecordDict], key: str) -> MetricRecord:
    """Aggregate the clients' metrics by a function of the legacy API."""
    metrics: list[dict[str, Any]] = [dict(record[wire.METRICS]) for record in records]
    return MetricRecord(_numbers(function([(int(own.pop(key)), own) for own in metrics])))


def _numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers among metrics of the legacy API, which may be texts as well."""
    return {
        name: int(value) if isinstance(value, int | np.integer) else float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float | np.number)
    }


def _payload(instruction: ClientInstruction) -> tuple[Parameters, dict[str, Scalar]]:
    """Return the first group of an instruction as parameters, and the others among the settings."""
    config = instruction.full_config()
    first, *others = instruction.groups
    if beside := {group: instruction.groups[group] for group in others}:
        config[wire.BESIDE] = wire.packed_groups(beside)
    return ndarrays_to_parameters(list(instruction.groups[first].values())), config


def _read(parameters: Parameters, names: list[str]) -> tuple[dict[str, Any], str]:
    """Return the uploaded arrays by name, or why they cannot be read."""
    if len(parameters.tensors) != len(names):
        return {}, f"it sent {len(parameters.tensors)} arrays, expected {len(names)}"
    pairs = zip(names, parameters.tensors, strict=True)
    try:
        return {name: wire.read_array(name, partial(bytes_to_ndarray, t)) for name, t in pairs}, ""
    except ValueError as unreadable:
        return {}, str(unreadable)
