"""`FPFC` along a grid of lambdas in one run: the warm-up tuning of its paper, and the separate one.

Warm-up (section 4.3): the run begins with the smallest lambda, goes on with the next when the
validation metric has come to rest, and from where it is; the first lambda that is worse than the
one before is taken back, and the run ends with the one before. Separate: every lambda from the
initial model, as long as the others, and then the best. See docs/methods/fpfc.md, "A path of
lambdas" and P7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from logging import INFO, WARNING
from typing import Any, Literal

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from ...maths.blocks import Arrays, Block, check_saved, prefixed, spec_of, under
from ...maths.checks import Count, NotNegative, check_fields, check_not_negative
from ...maths.clienttable import ClientTable, Row
from ...maths.pairs import PairwiseStore
from ...maths.penalties import L1, MCP, Penalty
from ...runtime.messages.records import ClientInstruction
from ..shared.base import OwnBuffers
from .source import FPFCState, HoldOut, PenaltySource, Replies, RoundStart, Task, fusion_tasks, scad

VALIDATION, LABELS = "validation", "path_labels"
"""Columns of the clients' table: the metric as last reported, and the cluster at every lambda."""
_WORST = 1e30  # in the place of a metric that is not finite, or larger
_PROGRESS = ("stage", "_rounds", "_calm", "reset_round", "offset", "chosen", "_best")


@dataclass(frozen=True)
class LambdaPath:
    """A grid of lambdas that one run of `FPFC` goes along, and how it goes.

    Clients measure their own models, as they upload them, on samples that the run never trains on.
    The mean over all clients of what each measured last is the validation metric of a round; it
    costs no message.

    Parameters
    ----------
    lams : sequence of float
        lambda_1 < ... < lambda_S, the first may be 0.
    fusion : {"scad", "l1", "mcp"} (default: "scad")
        The penalty: `SmoothedSCAD`, `L1` or `MCP`, its other parameters at their defaults.
    warm : bool (default: True)
        Begin every lambda where the last one ended (section 4.3); False: begin each at the initial
        model, for `max_rounds` each, and end with the best.
    monitor : str (default: "loss")
        What is measured: the clients' ``loss``, or one of their ``metrics`` by name.
    better : {"lower", "higher"} (default: "lower")
        Which is better; "higher" for an accuracy.
    tol : float (default: 1e-4)
        The metric is at rest in a round that changes it by less (the paper's example).
    calm_rounds : int (default: 3)
        Rounds at rest in a row that end a stage; the paper has one, which chance may bring about
        where few clients take part.
    min_rounds, max_rounds : int (default: 10, 100)
        A stage has at least and at most so many rounds.

    Raises
    ------
    TypeError, ValueError
        If the grid is empty, does not increase or has a number that is none, or another parameter
        is out of range.

    Examples
    --------
    >>> strategy = FPFC(LambdaPath([0.0, 0.3, 0.6, 0.9]), lr=0.3)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=300)
    >>> strategy.penalty_in_use  # with the lambda that was chosen
    SmoothedSCAD(lam=...)
    """

    lams: Sequence[float]
    fusion: Literal["scad", "l1", "mcp"] = "scad"
    warm: bool = True
    monitor: str = "loss"
    better: Literal["lower", "higher"] = "lower"
    tol: NotNegative = 1e-4
    calm_rounds: Count = 3
    min_rounds: Count = 10
    max_rounds: Count = 100

    def __post_init__(self) -> None:
        grid = tuple(self.lams)
        for lam in grid:
            check_not_negative("a number of lams", lam)
        if not grid or any(b <= a for a, b in pairwise(grid)):
            raise ValueError(
                f"lams is {list(grid)}, expected increasing numbers >= 0, one at least. Sort the "
                "grid, and leave out what is there twice."
            )
        object.__setattr__(self, "lams", grid)
        check_fields(self)
        if self.min_rounds > self.max_rounds:
            raise ValueError(
                f"min_rounds is {self.min_rounds}, expected at most max_rounds = {self.max_rounds}."
            )

    def penalty(self, stage: int) -> Penalty:
        """Return the penalty at a place of the grid."""
        kinds: dict[str, Callable[[float], Penalty]] = {"scad": scad, "l1": L1, "mcp": MCP}
        return kinds[self.fusion](self.lams[stage])

    def check(self, rho: float) -> None:
        """Raise ValueError where rho is too small for a penalty of the grid."""
        for stage in range(len(self.lams)):
            self.penalty(stage).check(rho)

    def is_better(self, value: float, than: float) -> bool:
        """Compare two values of the metric."""
        return value < than if self.better == "lower" else value > than


@dataclass(frozen=True)
class PathTaken:
    """What came of a `LambdaPath`.

    Attributes
    ----------
    lams : ndarray of shape (S,)
    lam : float
        The lambda in use.
    chosen : int or None
        The place of the one that was chosen; None before.
    values : ndarray of shape (S,)
        The validation metric at the end of every stage; NaN where there was none.
    last_rounds : ndarray of int, shape (S,)
        The last round of every stage; 0 where it has not ended.
    labels : ndarray of int, shape (m, S)
        The cluster of every client at the end of every stage; -1 where it was not there.
    num_groups : ndarray of int, shape (S,)
        How many clusters that are; 0 where a stage has not ended.
    """

    lams: NDArray[np.float64]
    lam: float
    chosen: int | None
    values: NDArray[np.float64]
    last_rounds: NDArray[np.int64]
    labels: NDArray[np.int64]
    num_groups: NDArray[np.int64]


class PathProgress(PenaltySource):
    """The source of the penalty of a run on a path: how far it has come.

    Parameters
    ----------
    path : LambdaPath
    nu : float or None
        As in `FPFC`.
    hold_out : HoldOut
    block : Block
        omega_i.
    buffers : OwnBuffers
    arrays : Arrays
        The initial model, where every lambda begins that is not begun warm.

    Attributes
    ----------
    stage : int
        The place of the present lambda in the grid.
    chosen : int
        The place of the lambda that was chosen; -1 before.
    reset_round : int
        The round after which all models were last replaced: clients hold others.
    """

    def __init__(
        self,
        path: LambdaPath,
        nu: float | None,
        hold_out: HoldOut,
        block: Block,
        buffers: OwnBuffers,
        arrays: Arrays,
    ) -> None:
        super().__init__(path, nu)
        self.columns = {VALIDATION: 0.0, LABELS: np.full(len(path.lams), -1)}
        self.path, self._hold_out, self._buffers = path, hold_out, buffers
        self.stage = self._rounds = self._calm = self.reset_round = 0
        self.chosen = self._best = -1
        self._value = np.nan
        self._values = np.full(len(path.lams), np.nan)
        self._ends = np.zeros(len(path.lams), dtype=np.int64)
        self._first: Arrays = {}
        if not path.warm:
            shared = prefixed("shared/", block.rest(arrays))
            self._first = {"omega": block.vector(arrays), **shared}
        self._kept: dict[str, NDArray[Any]] = {}  # the state at the end of the best stage so far

    @property
    def found_penalty(self) -> Penalty:
        """That of the present lambda."""
        return self.path.penalty(self.stage)

    @property
    def is_settled(self) -> bool:
        """Whether lambda is chosen and its model at rest, or trained as long as the others."""
        return self.chosen >= 0 and (not self.path.warm or self._is_calm)

    @property
    def _is_calm(self) -> bool:
        return self._rounds >= self.path.min_rounds and self._calm >= self.path.calm_rounds

    @property
    def is_searching(self) -> bool:
        """Whether no lambda is chosen yet."""
        return self.chosen < 0

    def too_short(self, last_round: int) -> str:
        """See `PenaltySource`."""
        return (
            f"After round {last_round} no lambda of the path is chosen yet, and these are the "
            f"clusters at {self.penalty.lam:g}. If the run is over, give start() a larger "
            "num_rounds, or LambdaPath fewer max_rounds"
        )

    # ------------------------------------------------------------------------------------------
    # A round
    # ------------------------------------------------------------------------------------------

    def handshake_instructions(self, client_ids: Sequence[int]) -> dict[int, ClientInstruction]:
        """See to it that clients can say which lambda suits them."""
        return {
            client: ClientInstruction({"nothing": {}}, {**settings, "monitor": self.path.monitor})
            for client, settings in self._hold_out.settings(client_ids).items()
        }

    def tasks(self, start: RoundStart) -> dict[int, Task]:
        """Ask the sampled clients for (5), and for the metric of their uploads."""
        tasks = fusion_tasks(start)
        for client, settings in self._hold_out.settings(start.sampled).items():
            tasks[client].settings = {**settings, "monitor": self.path.monitor}
        return tasks

    def holds_omega(self, client: int, last_accepted: int) -> bool:
        """Return whether a client has uploaded its omega_i since all models were replaced."""
        return last_accepted > self.reset_round

    def after_round(self, server_round: int, state: FPFCState, replies: Replies) -> None:
        """Take in what clients measured, and go on to the next lambda if it is time to."""
        table, path, name = state.clients, self.path, f"{VALIDATION}-{self.path.monitor}"
        if silent := [client for client, reply in replies.items() if name not in reply.metrics]:
            log(WARNING, "round %s: clients %s did not report %s", server_round, silent, name)
        for client, reply in replies.items():
            bad = _WORST if path.better == "lower" else -_WORST
            measured = np.nan_to_num(float(reply.metrics.get(name, np.nan)), nan=bad)
            table[client].validation = np.clip(measured, -_WORST, _WORST)
        # A client's model changes only where it takes part, so what it said last holds.
        has_trained = table.column("num_examples") > 0
        value = float(table.column(VALIDATION)[has_trained].mean())
        at_rest = self._rounds > 0 and abs(value - self._value) < path.tol
        self._calm = self._calm + 1 if at_rest else 0
        self._value = value
        self._rounds += 1
        over = self._rounds >= path.max_rounds or (path.warm and self._is_calm)
        if self.chosen < 0 and over:
            self._values[self.stage], self._ends[self.stage] = value, server_round
            table.column(LABELS)[:, self.stage] = self.labels(state)
            self._end_stage(server_round, state)

    def _end_stage(self, server_round: int, state: FPFCState) -> None:
        ended, is_last = self.stage, self.stage == len(self.path.lams) - 1
        if improves := self._improves(state):
            self._best = ended
        if is_last or (self.path.warm and not improves):
            self.chosen = self.stage = self._best
            if self._best != ended:
                self._put_back(server_round, state)
            self.offset = 0 if self.path.warm else server_round - self.path.max_rounds
            self._first, self._kept = {}, {}
        else:
            self.stage += 1
            if improves:
                self._keep(state)
            if not self.path.warm:
                self._start_anew(server_round, state)
        if self.stage != ended:
            self._rounds = self._calm = 0
        log(
            INFO,
            "round %s: validation %s is %.4g at lambda = %g; the run goes on with lambda = %g%s",
            server_round,
            self.path.monitor,
            self._values[ended],
            self.path.lams[ended],
            self.path.lams[self.stage],
            "" if self.chosen < 0 else ", to its end",
        )

    def _improves(self, state: FPFCState) -> bool:
        """Return whether the stage that ends is better than the best, by the clients of both."""
        if self._best < 0:
            return True
        best, now = self._values[self._best], self._values[self.stage]
        then, table = under("clients/", self._kept), state.clients
        places = {client: place for place, client in enumerate(self._kept["ids"].tolist())}
        if list(places) != table.ids:  # the means are over other clients
            trained = [c for c in table.ids if table[c].num_examples > 0 and c in places]
            both = [c for c in trained if then["num_examples"][places[c]] > 0]
            if not both:
                return True
            best = then[VALIDATION][[places[client] for client in both]].mean()
            now = table.rows(VALIDATION, both).mean()
        if self.path.warm:  # of equal lambdas the larger, as the warm-up goes on
            return not self.path.is_better(best, now)
        return self.path.is_better(now, best)

    # ------------------------------------------------------------------------------------------
    # The models of another stage
    # ------------------------------------------------------------------------------------------

    def _keep(self, state: FPFCState) -> None:
        views = {
            "ids": np.array(state.clients.ids, dtype=np.uint64),
            **prefixed("pairs/", state.pairs.state_arrays()),
            **prefixed("shared/", state.averaged_arrays),
            **prefixed("clients/", state.clients.state_arrays()),
        }
        self._kept = {name: array.copy() for name, array in views.items()}

    def _put_back(self, server_round: int, state: FPFCState) -> None:
        """Let the state be what `_keep` kept; clients that have come since stay as they are."""
        ids, kept = state.clients.ids, [int(client) for client in self._kept["ids"]]
        self.reset_round = server_round
        state.averaged_arrays = {n: a.copy() for n, a in under("shared/", self._kept).items()}
        rows = {client: place for place, client in enumerate(kept) if client in set(ids)}
        if not rows:  # nobody of then is there
            return
        saved = under("pairs/", self._kept)
        pairs = PairwiseStore(saved["omega"], self.penalty, state.pairs.rho)
        pairs.load_state_arrays(saved)
        pairs.remove([place for place, client in enumerate(kept) if client not in rows])
        new = [place for place, client in enumerate(ids) if client not in rows]
        places = [sum(client < ids[place] for client in rows) for place in new]
        pairs.add(places, state.pairs.omega[new])
        state.pairs = pairs
        here = [place for place, client in enumerate(ids) if client in rows]
        for name, column in under("clients/", self._kept).items():
            if name != LABELS:
                state.clients.column(name)[here] = column[list(rows.values())]

    def _start_anew(self, server_round: int, state: FPFCState) -> None:
        """Let the state be that of a run's start."""
        self.reset_round = self.offset = server_round
        state.averaged_arrays = {n: a.copy() for n, a in under("shared/", self._first).items()}
        omega = np.tile(self._first["omega"], (len(state.clients), 1))
        state.pairs = PairwiseStore(omega, self.penalty, state.pairs.rho)
        row = self._buffers.column(state.averaged_arrays)
        for name, column in state.clients.state_arrays().items():
            if name != LABELS:
                column[:] = row.get(name, 0.0)

    def insert(self, rows: Mapping[int, Row]) -> None:
        """Compare the metric of no round with the one before: it is a mean over other clients."""
        self._value = np.nan

    def remove(self, clients: Iterable[int], server_round: int = 0) -> None:
        """Compare no two rounds, likewise."""
        self._value = np.nan

    # ------------------------------------------------------------------------------------------
    # Results and saving
    # ------------------------------------------------------------------------------------------

    def report(self, clients: ClientTable) -> dict[str, Any]:
        """Return the `PathTaken` so far."""
        labels = clients.column(LABELS).copy()
        return {
            "path": PathTaken(
                np.array(self.path.lams, dtype=np.float64),
                self.path.lams[self.stage],
                None if self.chosen < 0 else self.chosen,
                self._values.copy(),
                self._ends.copy(),
                labels,
                np.array([len(np.unique(column[column >= 0])) for column in labels.T]),
            )
        }

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the variables as plain arrays."""
        return {
            **super().state_arrays(),
            "lams": np.array(self.path.lams, dtype=np.float64),
            "progress": np.array([getattr(self, name) for name in _PROGRESS]),
            "value": np.array([self._value]),
            "values": self._values,
            "last_rounds": self._ends,
            **prefixed("first/", self._first),
            **prefixed("kept/", self._kept),
        }

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned.

        Raises
        ------
        ValueError
            If an array is missing, or it is of another grid.
        """
        own = {name: array for name, array in self.state_arrays().items() if "/" not in name}
        if not np.array_equal(arrays.get("lams", own["lams"]), own["lams"]):
            raise ValueError(
                f"The saved run goes along lams = {arrays['lams'].tolist()}, this one along "
                f"{list(self.path.lams)}. Continue with the former."
            )
        super().load_state_arrays(arrays)
        check_saved(arrays, spec_of({n: own[n] for n in own if n not in ("given", "replacement")}))
        for name, number in zip(_PROGRESS, arrays["progress"].tolist(), strict=True):
            setattr(self, name, number)
        self._value = float(arrays["value"][0])
        self._values = np.array(arrays["values"])
        self._ends = np.array(arrays["last_rounds"])
        self._first, self._kept = (
            {name: np.array(array) for name, array in under(part, arrays).items()}
            for part in ("first/", "kept/")
        )
