"""`FPFC` along a grid of lambdas in one run: the warm-up tuning of its paper, and the separate one.

Warm-up (section 4.3): the run begins with the smallest lambda, goes on with the next when the
validation metric has come to rest, and from where it is; the first lambda that is worse than the
one before is taken back, and the run ends with the one before. Separate: every lambda from the
initial model, as long as the others, and then the best. See docs/methods/fpfc.md, "A path of
lambdas" and P7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from logging import INFO
from typing import Any, Literal

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from ...maths.blocks import Arrays, prefixed, under
from ...maths.checks import Count, NotNegative, check_fields, check_not_negative
from ...maths.pairs import PairwiseStore
from ...maths.penalties import L1, MCP, Penalty
from .messages import VALIDATION, PathInstruction, PathQuestion
from .source import FusionStrategy, Messages, PenaltySource, Replies, Round, Variables, scad

LABELS = "path_labels"
"""The column of the clients' table with the cluster at every lambda; `VALIDATION` is another."""
_WORST = 1e30  # in the place of a metric that is not finite, or larger


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

    def penalty_of(self, stage: int) -> Penalty:
        """Return the penalty at a place of the grid."""
        kinds: dict[str, Callable[[float], Penalty]] = {"scad": scad, "l1": L1, "mcp": MCP}
        return kinds[self.fusion](self.lams[stage])

    def check(self, rho: float) -> None:
        """Raise ValueError where rho is too small for a penalty of the grid."""
        for stage in range(len(self.lams)):
            self.penalty_of(stage).check(rho)

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


@dataclass
class PathState(Variables):
    """How far a run has come on its path.

    Attributes
    ----------
    stage : int
        The place of the present lambda in the grid.
    rounds, calm : int
        Rounds in this stage; those at rest, the last ones in a row.
    chosen, best : int
        The place of the lambda that was chosen, and of the best so far; -1 before.
    offset : int
        See `PenaltySource`.
    reset_round : int
        The round after which all models were last replaced: clients hold others.
    value : float
        The metric of the last round.
    values, last_rounds : ndarray of shape (S,)
        See `PathTaken`.
    """

    values: NDArray[np.float64]
    last_rounds: NDArray[np.int64]
    stage: int = 0
    rounds: int = 0
    calm: int = 0
    chosen: int = -1
    best: int = -1
    offset: int = 0
    reset_round: int = 0
    value: float = np.nan


class PathProgress(PenaltySource):
    """The source of the penalty of a run on a path.

    Parameters
    ----------
    fpfc : FusionStrategy
    path : LambdaPath
    arrays : Arrays
        The initial model, where every lambda begins that is not begun warm.
    """

    def __init__(self, fpfc: FusionStrategy, path: LambdaPath, arrays: Arrays) -> None:
        super().__init__(fpfc)
        count = len(path.lams)
        self.columns = {VALIDATION: 0.0, LABELS: np.full(count, -1)}
        self.path = path
        self.found = PathState(np.full(count, np.nan), np.zeros(count, dtype=np.int64))
        self._first = {} if path.warm else arrays
        self._kept: dict[str, NDArray[Any]] = {}  # the state at the end of the best stage so far

    @property
    def penalty(self) -> Penalty:
        """That of the present lambda."""
        return self.path.penalty_of(self.found.stage)

    @property
    def offset(self) -> int:  # type: ignore[override]
        """The rounds before this stage, where each begins anew."""
        return self.found.offset

    @property
    def is_settled(self) -> bool:
        """Whether lambda is chosen and its model at rest, or trained as long as the others."""
        return self.found.chosen >= 0 and (not self.path.warm or self._is_calm)

    @property
    def _is_calm(self) -> bool:
        path = self.path
        return self.found.rounds >= path.min_rounds and self.found.calm >= path.calm_rounds

    @property
    def is_searching(self) -> bool:  # type: ignore[override]
        """Whether no lambda is chosen yet."""
        return self.found.chosen < 0

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

    def handshake_instructions(self, client_ids: Sequence[int]) -> Mapping[int, PathQuestion]:
        """See to it that clients can say which lambda suits them."""
        fields = self._fields(client_ids)
        return {client: PathQuestion({}, **fields[client]) for client in client_ids}

    def _fields(self, client_ids: Sequence[int]) -> dict[int, dict[str, Any]]:
        held_out = self.fpfc.hold_out(client_ids)
        return {client: {**held_out[client], "monitor": self.path.monitor} for client in client_ids}

    def messages(self, now: Round) -> Messages:
        """Ask the sampled clients for (5), and for the metric of their uploads."""
        return now.fusion(now.sampled, PathInstruction, self._fields(now.sampled))

    def holds_omega(self, client: int, last_accepted: int) -> bool:
        """Return whether a client has uploaded its omega_i since all models were replaced."""
        return last_accepted > self.found.reset_round

    def after_round(self, server_round: int, replies: Replies) -> None:
        """Take in what clients measured, and go on to the next lambda if it is time to."""
        found, path, table = self.found, self.path, self.state.clients
        name, worst = f"{VALIDATION}-{path.monitor}", _WORST if path.better == "lower" else -_WORST
        for client, reply in replies.items():
            measured = np.nan_to_num(float(reply.metrics.get(name, np.nan)), nan=worst)
            table[client].validation = np.clip(measured, -_WORST, _WORST)
        # A client's model changes only where it takes part, so what it said last holds.
        has_trained = table.column("num_examples") > 0
        value = float(table.column(VALIDATION)[has_trained].mean())
        is_at_rest = found.rounds > 0 and abs(value - found.value) < path.tol
        found.calm = found.calm + 1 if is_at_rest else 0
        found.value = value
        found.rounds += 1
        is_over = found.rounds >= path.max_rounds or (path.warm and self._is_calm)
        if found.chosen < 0 and is_over:
            found.values[found.stage], found.last_rounds[found.stage] = value, server_round
            table.column(LABELS)[:, found.stage] = self.labels()
            self._end_stage(server_round)

    def _end_stage(self, server_round: int) -> None:
        found, path, ended = self.found, self.path, self.found.stage
        is_last, improves = ended == len(path.lams) - 1, self._improves()
        if improves:
            found.best = ended
        if is_last or (path.warm and not improves):
            found.chosen = found.stage = found.best
            if found.best != ended:
                self._put_back(server_round)
            found.offset = 0 if path.warm else server_round - path.max_rounds
            self._first, self._kept = {}, {}
        else:
            found.stage += 1
            if improves:
                self._keep()
            if not path.warm:
                self._start_anew(server_round)
        if found.stage != ended:
            found.rounds = found.calm = 0
        log(
            INFO,
            f"round {server_round}: validation {path.monitor} is {found.values[ended]:.4g} at "
            f"lambda = {path.lams[ended]:g}; the run goes on with lambda = "
            f"{path.lams[found.stage]:g}",
        )

    def _improves(self) -> bool:
        """Return whether the stage that ends is better than the best."""
        if self.found.best < 0:
            return True
        best, now = self.found.values[[self.found.best, self.found.stage]]
        if self.path.warm:  # of equal lambdas the larger, as the warm-up goes on
            return not self.path.is_better(best, now)
        return self.path.is_better(now, best)

    # ------------------------------------------------------------------------------------------
    # The models of another stage
    # ------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        state = self.state
        views = {
            "ids": np.array(state.clients.ids, dtype=np.uint64),
            **prefixed("pairs/", state.pairs.state_arrays()),
            **prefixed("shared/", state.averaged_arrays),
            **prefixed("clients/", state.clients.state_arrays()),
        }
        self._kept = {name: array.copy() for name, array in views.items()}

    def _put_back(self, server_round: int) -> None:
        """Let the state be what `_keep` kept; clients that have come since stay as they are."""
        state = self.state
        ids, kept = state.clients.ids, self._kept["ids"].tolist()
        self.found.reset_round = server_round
        state.averaged_arrays = {n: a.copy() for n, a in under("shared/", self._kept).items()}
        rows = {client: place for place, client in enumerate(kept) if client in set(ids)}
        if not rows:  # all of them have left
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

    def _start_anew(self, server_round: int) -> None:
        """Let the state be that of a run's start."""
        state, block = self.state, self.fpfc.block
        self.found.reset_round = self.found.offset = server_round
        state.averaged_arrays = {n: a.copy() for n, a in block.rest(self._first).items()}
        omega = np.tile(block.vector(self._first), (len(state.clients), 1))
        state.pairs = PairwiseStore(omega, self.penalty, state.pairs.rho)
        row = self.fpfc.buffers.column(self._first)
        for name, column in state.clients.state_arrays().items():
            if name != LABELS:
                column[:] = row.get(name, 0.0)

    # ------------------------------------------------------------------------------------------
    # Results and saving
    # ------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Return the `PathTaken` so far."""
        labels, found = self.state.clients.column(LABELS).copy(), self.found
        return {
            "path": PathTaken(
                np.array(self.path.lams, dtype=np.float64),
                self.path.lams[found.stage],
                None if found.chosen < 0 else found.chosen,
                found.values.copy(),
                found.last_rounds.copy(),
                labels,
                np.array([len(np.unique(column[column >= 0])) for column in labels.T]),
            )
        }

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the variables as plain arrays."""
        return {
            "lams": np.array(self.path.lams, dtype=np.float64),
            **self.found.arrays(),
            **prefixed("first/", self._first),
            **prefixed("kept/", self._kept),
        }

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned."""
        self._first, self._kept = {}, {}
        super().load_state_arrays({n: a for n, a in arrays.items() if "/" not in n})
        if not np.array_equal(arrays["lams"], self.path.lams):
            raise ValueError(
                f"The saved run goes along lams = {arrays['lams'].tolist()}, this one along "
                f"{list(self.path.lams)}. Continue with the former."
            )
        self.found.load(arrays)
        self._first, self._kept = (
            {name: np.array(array) for name, array in under(part, arrays).items()}
            for part in ("first/", "kept/")
        )
