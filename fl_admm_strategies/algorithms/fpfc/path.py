"""`FPFC` along a grid of lambdas in one run: the warm-up tuning of its paper.

Section 4.3: the run begins with the smallest lambda, goes on with the next when the validation
metric has come to rest, and from where it is; the first lambda that is worse than the one before is
taken back, and the run ends with the one before. See docs/methods/fpfc.md, "A path of lambdas" and
P7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from logging import INFO
from typing import Any, Literal

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from ...maths.blocks import prefixed, under
from ...maths.checks import Count, NotNegative, check_fields, check_not_negative
from ...maths.pairs import PairwiseStore
from ...maths.penalties import L1, MCP, Penalty
from .messages import VALIDATION, PathInstruction
from .source import FusionStrategy, Messages, PenaltySource, Replies, Round, Variables, scad

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
        If the grid is empty, does not increase or has a bad number, or another parameter is out of
        range.

    Examples
    --------
    >>> strategy = FPFC(LambdaPath([0.0, 0.3, 0.6, 0.9]), lr=0.3)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=300)
    >>> strategy.penalty_in_use  # with the lambda that was chosen
    Rescaled(penalty=SmoothedSCAD(lam=...), unit=...)
    """

    lams: Sequence[float]
    fusion: Literal["scad", "l1", "mcp"] = "scad"
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


@dataclass
class PathTaken:
    """What came of a `LambdaPath` of S lambdas.

    Attributes
    ----------
    values : ndarray of shape (S,)
        The validation metric at the end of every stage; NaN where there was none.
    last_rounds : ndarray of int, shape (S,)
        The last round of every stage; 0 where it has not ended.
    num_groups : ndarray of int, shape (S,)
        The number of clusters at the end of every stage; 0 where it has not ended.
    chosen : int
        The place of the lambda that was chosen; -1 before.
    """

    values: NDArray[np.float64]
    last_rounds: NDArray[np.int64]
    num_groups: NDArray[np.int64]
    chosen: int = -1


@dataclass
class PathState(PathTaken, Variables):
    """How far a run has come on its path.

    Attributes
    ----------
    stage : int
        The place of the present lambda in the grid.
    rounds, calm : int
        Rounds in this stage; those at rest, the last ones in a row.
    value : float
        The metric of the last round.
    validation, kept_validation : dict of int to float
        The metric that each client reported last; likewise, at the end of the stage before.
    """

    stage: int = 0
    rounds: int = 0
    calm: int = 0
    value: float = np.nan
    validation: dict[int, float] = field(default_factory=dict)
    kept_validation: dict[int, float] = field(default_factory=dict)


class PathProgress(PenaltySource):
    """The source of the penalty of a run on a path.

    Parameters
    ----------
    fpfc : FusionStrategy
    path : LambdaPath
    """

    found: PathState

    def __init__(self, fpfc: FusionStrategy, path: LambdaPath) -> None:
        super().__init__(fpfc)
        none = np.zeros(len(path.lams), dtype=np.int64)
        self.path = path
        self.found = PathState(np.full(len(none), np.nan), none, none.copy())
        self._kept: dict[str, NDArray[Any]] = {}  # the state at the end of the stage before

    @property
    def penalty(self) -> Penalty:
        """That of the present lambda."""
        return self.in_unit(self.path.penalty_of(self.found.stage))

    @property
    def is_settled(self) -> bool:
        """Whether lambda is chosen and its model at rest."""
        return not self.is_searching and self._is_calm

    @property
    def _is_calm(self) -> bool:
        path = self.path
        return self.found.rounds >= path.min_rounds and self.found.calm >= path.calm_rounds

    @property
    def is_searching(self) -> bool:  # type: ignore[override]
        """Whether no lambda is chosen yet."""
        return self.found.chosen < 0

    # ------------------------------------------------------------------------------------------
    # A round
    # ------------------------------------------------------------------------------------------

    def messages(self, now: Round) -> Messages:
        """Ask the sampled clients for (5), and for the metric of their uploads."""
        held_out = self.fpfc.hold_out(now.sampled)
        fields = {c: {**held_out[c], "monitor": self.path.monitor} for c in now.sampled}
        return now.fusion(now.sampled, now.zeta(now.sampled), PathInstruction, fields)

    def after_round(self, server_round: int, replies: Replies) -> None:
        """Take in the clients' metrics, and go on to the next lambda if it is time to."""
        found, path = self.found, self.path
        name, worst = f"{VALIDATION}-{path.monitor}", _WORST if path.better == "lower" else -_WORST
        for client, reply in replies.items():
            measured = np.nan_to_num(float(reply.metrics.get(name, np.nan)), nan=worst)
            found.validation[client] = float(np.clip(measured, -_WORST, _WORST))
        # A client's model changes only where it takes part, so its last report holds.
        value = float(np.mean([metric for _, metric in sorted(found.validation.items())]))
        is_at_rest = found.rounds > 0 and abs(value - found.value) < path.tol
        found.calm = found.calm + 1 if is_at_rest else 0
        found.value = value
        found.rounds += 1
        if self.is_searching and (found.rounds >= path.max_rounds or self._is_calm):
            self._end_stage(server_round)

    def _end_stage(self, server_round: int) -> None:
        found, path, ended = self.found, self.path, self.found.stage
        found.values[ended], found.last_rounds[ended] = found.value, server_round
        found.num_groups[ended] = len(np.unique(self.labels()))
        if ended > 0 and path.is_better(found.values[ended - 1], found.value):
            found.chosen = found.stage = ended - 1
            self._put_back(server_round)
        elif ended == len(path.lams) - 1:
            found.chosen, self._kept = ended, {}
        else:
            found.stage += 1
            self._keep()
        if found.stage != ended:
            found.rounds = found.calm = 0
        log(
            INFO,
            f"round {server_round}: validation {path.monitor} is {found.values[ended]:.4g} at "
            f"lambda = {path.lams[ended]:g}; the run goes on with lambda = "
            f"{path.lams[found.stage]:g}",
        )

    def _keep(self) -> None:
        """Keep the state, to go back to it where the next lambda is worse."""
        state = self.state
        views = {
            "ids": np.array(state.clients.ids, dtype=np.uint64),
            **prefixed("pairs/", state.pairs.state_arrays()),
            **prefixed("shared/", state.averaged_arrays),
            **prefixed("clients/", state.clients.state_arrays()),
        }
        self._kept = {name: array.copy() for name, array in views.items()}
        self.found.kept_validation = dict(self.found.validation)

    def _put_back(self, server_round: int) -> None:
        """Let the state be the kept one; clients that have come since stay as they are."""
        state, ids, kept = self.state, self.state.clients.ids, self._kept["ids"].tolist()
        self.found.validation |= self.found.kept_validation
        state.averaged_arrays = under("shared/", self._kept)
        saved = under("pairs/", self._kept) | {"rho": np.array(state.pairs.rho)}
        pairs = PairwiseStore(saved["omega"], self.penalty, state.pairs.rho)
        pairs.load_state_arrays(saved)
        gone = [row for row, client in enumerate(kept) if client not in ids]
        if len(gone) < len(kept):
            pairs.remove(gone)
            stayed = [client for client in kept if client in ids]
            new = [row for row, client in enumerate(ids) if client not in kept]
            places = np.searchsorted(stayed, [ids[row] for row in new]).tolist()
            pairs.add(places, state.pairs.omega[new])
            state.pairs = pairs
            here = [ids.index(client) for client in stayed]
            for name, column in under("clients/", self._kept).items():
                state.clients.column(name)[here] = np.delete(column, gone, axis=0)
        state.clients.column("moved_in")[:] = server_round
        self._kept = {}

    # ------------------------------------------------------------------------------------------
    # Results and saving
    # ------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Return the `PathTaken` so far."""
        found = self.found
        arrays = found.values.copy(), found.last_rounds.copy(), found.num_groups.copy()
        return {"path": PathTaken(*arrays, found.chosen)}

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the variables, and the kept state, as plain arrays."""
        lams = np.array(self.path.lams, dtype=np.float64)
        return {"lams": lams, **super().state_arrays(), **prefixed("kept/", self._kept)}

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned."""
        self._kept = {}
        super().load_state_arrays({n: a for n, a in arrays.items() if not n.startswith("kept/")})
        if not np.array_equal(arrays["lams"], self.path.lams):
            raise ValueError(
                f"The saved run goes along lams = {arrays['lams'].tolist()}, this one along "
                f"{list(self.path.lams)}. Continue with the former."
            )
        self._kept = {name: np.array(a) for name, a in under("kept/", arrays).items()}
