"""AsyncFPFC: FPFC that takes in every reply as it comes, without waiting for slow clients.

Yu, Liu, Wang, Sun, "Clustered Federated Learning based on Nonconvex Pairwise Fusion",
arXiv:2211.04218v3: Algorithm 3 (appendix), section 6.4.3; see docs/methods/async-fpfc.md. Its
equations are those of `FPFC` with one active client a round; the clients are `clients.FPFCClient`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from functools import partial
from typing import Any, ClassVar, Literal

from flwr.app import ConfigRecord, MessageType
from flwr.serverapp import Grid

from ...maths.blocks import Arrays
from ...maths.checks import NotNegative
from ...maths.penalties import Penalty
from ...runtime.algorithm import Phase
from ...runtime.arrivals import ArrivalLink
from ...runtime.messages.records import Metrics
from .fpfc import FPFC
from .path import LambdaPath


class AsyncFPFC(FPFC):
    """FPFC without rounds: the server takes in each client's model as it comes (asyncFPFC).

    A round is one reply here. Its client's model and pairs are updated, and it gets its new zeta_i
    and goes on at once; all others go on with what they have. So `num_rounds`, `evaluate_every`,
    `max_missed_rounds` and the schedules count replies, of which m make about as much work as a
    round of `FPFC` with all m clients.

    Parameters
    ----------
    penalty : Penalty or "auto" (default: "auto")
        As in `FPFC`, but no `LambdaPath`. With "auto" the search for groups is in rounds, as there,
        and so is the one re-check of them; the replies are taken in as they come from then on.
    delay : float or callable, optional
        Simulated seconds from an instruction to its reply, also as a callable of (round that sends
        it, client id), such as `RandomDelay(high=20)`. Replies then come in the order of this
        clock, whenever they really do, and no process sleeps: the same seed gives the same bits on
        every engine. By default replies come when they come, so that two runs differ.
    **settings
        Further parameters of `FPFC`. `fraction_train` is the fraction of the clients that train at
        any time, by default all; whenever one is done, another is drawn from those that are free.

    Notes
    -----
    The metrics of a round of training have ``staleness``, how many replies were taken in between
    the client's instruction and its reply, and ``clock``, the seconds of the training so far;
    ``strategy.staleness`` and ``strategy.clock`` have them by round.

    A reply that is refused or missing does not end a round, nor does a client that fails: it is
    asked again in the next one, with its own omega_i and a new zeta_i. omega_i travels with zeta_i
    always (2 d numbers down, where `FPFC` sends d): what a client holds is certain only between two
    rounds, and here there is no such time.

    In real time clients that are in the midst of a training are not asked to evaluate, save after
    the last round. With a simulated clock all are.

    Examples
    --------
    >>> strategy = AsyncFPFC(SmoothedSCAD(0.6), delay=RandomDelay(high=20))
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=2000)
    >>> seconds, oldest = strategy.clock[strategy.last_round], max(strategy.staleness.values())
    """

    paper: ClassVar = "Yu, Liu, Wang, Sun, arXiv:2211.04218, Algorithm 3"
    in_rounds: ClassVar = False

    penalty: Penalty | Literal["auto"] = field(default="auto", kw_only=False)
    delay: NotNegative | Callable[[int, int], float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.penalty, LambdaPath):
            raise TypeError(
                "AsyncFPFC takes no LambdaPath: the stages of a path are compared round by round. "
                "Choose lambda by FPFC(LambdaPath([...])), and give AsyncFPFC a SmoothedSCAD(lam)."
            )
        delay = self.delay
        self._link: ArrivalLink = ArrivalLink(
            self.min_available_nodes,
            self.node_timeout,
            self.max_clients_per_node,
            self.membership.client_keys,
            self.run,
            delay if delay is None or callable(delay) else lambda server_round, client: delay,
            self._waits_for_all,
        )

    def _train(
        self, grid: Grid, timeout: float, server_round: int, config: ConfigRecord
    ) -> Metrics:
        """Take in the next reply."""
        exchange = partial(self._link.exchange, grid, timeout)
        self._update_membership(grid, server_round, exchange, config)
        sent = self.run.configure_train(server_round, config)
        replies = self._link.train(grid, timeout, server_round, sent)
        return self.run.aggregate_train(server_round, replies) or {}

    def _evaluate(
        self, grid: Grid, timeout: float, server_round: int, config: ConfigRecord
    ) -> Metrics:
        """Evaluate on clients that are not in the midst of a training."""
        if self.fraction_evaluate == 0:
            return {}
        self.membership.mark_uncertain(self._link.refresh(grid))
        self._link.pause(grid, timeout, last=self.run.is_ending)
        sent = self.run.configure_evaluate(server_round, config)
        replies = self._link.exchange(grid, timeout, sent, MessageType.EVALUATE)
        return self.run.aggregate_evaluate(server_round, replies)

    @property
    def title(self) -> str:
        """The method's name as its paper writes it."""
        return super().title.replace("FPFC", "asyncFPFC")

    @property
    def clock(self) -> dict[int, float]:
        """Seconds that the training had taken after each round that took in a reply."""
        return {number: float(value) for number, value in self._measured("clock").items()}

    @property
    def staleness(self) -> dict[int, int]:
        """How many other replies were taken in since the client of a round's reply was asked."""
        return {number: int(value) for number, value in self._measured("staleness").items()}

    def _measured(self, name: str) -> dict[int, Any]:
        means = self.run.record.result.train_metrics_clientapp
        return {number: metrics[name] for number, metrics in means.items()}

    def metrics(self, phase: Phase, clients: Mapping[int, Metrics], means: Metrics) -> Metrics:
        """Add how old a training's reply was, and the clock."""
        if phase == "evaluate":
            return means
        pending = self.run.pending
        return means | {"staleness": pending.staleness, "clock": pending.clock}

    def _waits_for_all(self) -> bool:
        return self.state.source.waits_for_all

    def start_of(self, client: int) -> Arrays:
        """Return omega_i always: while a client trains, its memory is not known here."""
        return {"omega": self.state.pairs.omega[self.membership.row(client)]}
