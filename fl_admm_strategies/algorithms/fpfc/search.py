"""How `FPFC` without a lambda finds its groups, and with them lambda.

Not in FPFC's paper. A run goes through stages, each a few rounds: consensus, probe, refit and score
are the search; then groups are looked at again, train one model each, and are fused by FPFC's own
rounds. What each stage does is in `finding`, `recheck` and `together`; docs/methods/fpfc.md,
"Without a lambda", has the reasons and the evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...maths.blocks import Spec
from ...maths.clienttable import ClientTable
from ...maths.grouping import numbered
from ...maths.penalties import Penalty
from .finding import Consensus, Probe, Refit, Score
from .recheck import Judge, Reprobe, is_due
from .source import (
    NO_FUSION,
    FPFCState,
    Matrix,
    PenaltySource,
    Replies,
    RoundStart,
    Rows,
    Task,
    scad,
)
from .stages import REFIT_ROUNDS, Everybody, Search, Stage, counted_examples
from .together import Fusion, Together

STAGES: tuple[type[Stage], ...] = (Consensus, Probe, Refit, Score, Reprobe, Judge, Together, Fusion)
"""In the order in which a run first comes to them; groups that train are looked at again."""


@dataclass(frozen=True)
class FoundGroups:
    """What the search of `FPFC` without a lambda found.

    Attributes
    ----------
    last_round : int
        The last round of the search.
    labels : dict of int to int
        The settled group of every client that took part in the search.
    num_groups : ndarray of shape (K,)
        Of every grouping in the last comparison.
    losses : ndarray of shape (K,)
        Mean loss on the held-out data, or the corrected training loss.
    against : ndarray of shape (K,)
        By how many standard errors clients prefer a grouping with more groups, at most.
    chosen : int
    smallest_distance : float
        b, between the models of two groups as they came out of the search; NaN for one group.
    lam_needed : float
        The least lambda that can hold these groups together (docs/methods/fpfc-notes.md, P4).
    fused_from, fused_until : int
        The round before the first of FPFC's own, and the last one where they raised the losses and
        were given up; 0 for none, as long as every group trains one model.
    lam_inside : float
        lambda of the pairs inside a group, which holds it; 0 before FPFC's own rounds.
    """

    last_round: int
    labels: dict[int, int]
    num_groups: NDArray[np.int64]
    losses: NDArray[np.float64]
    against: NDArray[np.float64]
    chosen: int
    smallest_distance: float
    lam_needed: float
    fused_from: int
    fused_until: int
    lam_inside: float


class GroupSearch(PenaltySource):
    """The source of the penalty of a run with ``penalty="auto"``.

    Parameters
    ----------
    nu : float or None
        As in `FPFC`; by default half of what was between the two nearest groups.
    found : Search
        The variables, before the first round.
    on_new_stage : callable
        Called when a stage begins.

    Attributes
    ----------
    stage : Stage
        The present one of `STAGES`.
    found : Search
        What the stages so far have found.
    """

    def __init__(self, nu: float | None, found: Search, on_new_stage: Callable[[], None]) -> None:
        super().__init__("auto", nu)
        self._on_new_stage = on_new_stage
        self.stage: Stage = Consensus()
        self.found = found
        # Probe and score take a round each where no reply is lost.
        self.least_rounds = found.consensus_rounds + REFIT_ROUNDS + 2

    def _enter(self, kind: type[Stage]) -> None:
        self.stage, self.found.rounds = kind(), 0
        self._on_new_stage()

    # ------------------------------------------------------------------------------------------
    # The penalty and the clusters
    # ------------------------------------------------------------------------------------------

    @property
    def found_penalty(self) -> Penalty:
        """The paper's penalty; lambda is 0 until the groups are found."""
        return scad(self.found.lam)

    @property
    def lam_inside(self) -> float:
        """That of the pairs inside a group, unless the user has set a penalty."""
        return self.found.lam_inside if self.replacement is None else super().lam_inside

    @property
    def nu(self) -> float:
        """The threshold of the clusters: a lambda/2, 0 until the groups are found."""
        if self._nu is not None or self.replacement is not None:
            return super().nu
        return self.found.lam * NO_FUSION.a / 2

    @property
    def is_searching(self) -> bool:
        """Whether the groups are not found yet."""
        return self.stage.is_search

    @property
    def waits_for_all(self) -> bool:
        """Whether the present stage asks everybody."""
        return self.is_searching or isinstance(self.stage, Everybody)

    def too_short(self, last_round: int) -> str:
        """See `PenaltySource`."""
        return (
            f"After round {last_round} the groups are still searched for, and all clients count as "
            f"one group: the search takes {self.least_rounds} rounds or a few more. If the run is "
            "over, give start() a larger num_rounds, or FPFC fewer consensus_rounds or a penalty "
            "of your own"
        )

    @property
    def outside(self) -> set[int]:  # type: ignore[override]
        """Clients that took no part in the search and have not trained since."""
        return self.found.unplaced

    def labels(self, state: FPFCState, nu: float | None = None) -> NDArray[np.int64]:
        """Return the groups, one for all until they are found; by a nu of the user's, clusters."""
        ids = state.clients.ids
        if self.is_searching:
            return np.zeros(len(ids), dtype=np.int64)
        if nu is None and self._nu is None and self.replacement is None:
            return np.array(numbered([self.found.groups.get(c, -1 - c) for c in ids]))
        alone = [row for row, client in enumerate(ids) if client in self.outside]
        return state.pairs.clusters(self.nu if nu is None else nu, alone)

    def examples(self, clients: ClientTable) -> NDArray[np.float64]:
        """See `PenaltySource`; what the clients say is winsorised."""
        return counted_examples(clients)

    def report(self, clients: ClientTable) -> dict[str, Any]:
        """Return the `FoundGroups`, once there are any."""
        if self.is_searching:
            return {}
        found = self.found
        groups = {c: found.groups[c] for c in found.candidates.labels}
        counts, losses, against = found.table
        return {
            "search": FoundGroups(
                found.last_round,
                dict(zip(groups, numbered(list(groups.values())), strict=True)),
                *(counts.astype(np.int64), losses, against),
                found.chosen,
                found.smallest_distance,
                found.lam_needed,
                found.fused_from,
                found.fused_until,
                found.lam_inside,
            )
        }

    # ------------------------------------------------------------------------------------------
    # A round
    # ------------------------------------------------------------------------------------------

    def tasks(self, start: RoundStart) -> dict[int, Task]:
        """Return what the present stage asks; a stage may be over before its round begins."""
        while following := self.stage.begin_round(self.found, start):
            self._enter(following)
        return self.stage.tasks(self.found, start)

    def holds_omega(self, client: int, last_accepted: int) -> bool:
        """Return whether it uploaded its omega_i: in the consensus, or in FPFC's own rounds."""
        fused = isinstance(self.stage, Fusion) and last_accepted > self.found.fused_from
        return self.is_searching or (fused and client not in self.found.moved)

    def upload_spec(self) -> Spec | None:
        """Return what an upload of the present stage holds."""
        return self.stage.upload_spec(self.found)

    def take_models(self, state: FPFCState, rows: Rows, omega: Matrix) -> None:
        """Let the present stage take in the new omega_i of a round."""
        self.stage.take_models(self.found, state, rows, omega)

    def after_round(self, server_round: int, state: FPFCState, replies: Replies) -> None:
        """Let the present stage take in the replies; go on to the next one if it is over."""
        if following := self.stage.take(self.found, server_round, state, replies):
            self._enter(following)
        if isinstance(self.stage, Together) and is_due(self.found, server_round):
            self._enter(Reprobe)

    # ------------------------------------------------------------------------------------------
    # Clients that come and go; saving
    # ------------------------------------------------------------------------------------------

    def remove(self, clients: Iterable[int], server_round: int = 0) -> None:
        """Forget clients."""
        for client in clients:
            self.found.remove(client)

    def is_finite(self) -> bool:
        """Return whether all models are finite."""
        found, tried = self.found, self.found.candidates
        by_client = (found.probes, found.local)
        parts = [found.center, *tried.models, *(v for by in by_client for v in by.values())]
        return all(bool(np.isfinite(part).all()) for part in parts)

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the variables as plain arrays."""
        stage = np.array(STAGES.index(type(self.stage)))
        return {**super().state_arrays(), "stage": stage, **self.found.state_arrays()}

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned.

        Raises
        ------
        ValueError
            If an array is missing, or they do not fit together.
        """
        self.found = self.found.loaded(arrays)
        super().load_state_arrays(arrays)
        self.stage = STAGES[int(arrays["stage"])]()
