"""How `FPFC` without a lambda finds its groups, and with them lambda.

Not in FPFC's paper. The search is a list of stages, each a few rounds of the same run: consensus,
probe, trial, join, refit, score, and then fusion, which are FPFC's own rounds. What each of them
does is in `stages`; docs/methods/fpfc.md, "Without a lambda", has the reasons and the evidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...maths.blocks import Block, Spec
from ...maths.clienttable import ClientTable
from ...maths.grouping import numbered
from ...maths.penalties import Penalty
from .source import NO_FUSION, FPFCState, HoldOut, PenaltySource, Replies, RoundStart, Task, scad
from .stages import (
    REFIT_ROUNDS,
    Consensus,
    Fusion,
    Join,
    Probe,
    Refit,
    Score,
    Search,
    Stage,
    Together,
    Trial,
)


@dataclass(frozen=True)
class FoundGroups:
    """What the search of `FPFC` without a lambda found.

    Attributes
    ----------
    last_round : int
        The last round of the search.
    labels : dict of int to int
        The group of every client that took part in the search.
    num_groups : ndarray of shape (K,)
        Of every grouping that was tried.
    losses : ndarray of shape (K,)
        Mean loss on the held-out data, or the corrected training loss.
    against : ndarray of shape (K,)
        By how many standard errors clients prefer a grouping with more groups, at most.
    chosen : int
    smallest_distance : float
        b, between the models of two groups as they came out of the search; NaN for one group.
    lam_needed : float
        The least lambda that can hold these groups together (docs/methods/fpfc.md, P4).
    """

    last_round: int
    labels: dict[int, int]
    num_groups: NDArray[np.int64]
    losses: NDArray[np.float64]
    against: NDArray[np.float64]
    chosen: int
    smallest_distance: float
    lam_needed: float


class GroupSearch(PenaltySource):
    """The source of the penalty of a run with ``penalty="auto"``.

    Parameters
    ----------
    nu : float or None
        As in `FPFC`; by default half of what was between the two nearest groups.
    consensus_rounds : int
        C.
    hold_out : HoldOut
    block : Block
        omega_i.

    Attributes
    ----------
    stages : list of Stage
        In the order in which a run comes to them.
    stage : Stage
        The present one.
    found : Search
        What the stages so far have found.
    """

    def __init__(
        self, nu: float | None, consensus_rounds: int, hold_out: HoldOut, block: Block
    ) -> None:
        super().__init__("auto", nu)
        consensus = Consensus(consensus_rounds)
        self.stages: list[Stage] = [
            consensus,
            Probe(),
            Trial(),
            Join(),
            Refit(),
            Score(),
            Together(),
            Fusion(),
        ]
        self.stage: Stage = consensus
        self.found = Search(block, hold_out, center=np.zeros(0, block.dtype))
        # Probe, trial, join and score take a round each where no reply is lost.
        self.least_rounds = consensus_rounds + REFIT_ROUNDS + 4

    def _enter(self, kind: type[Stage]) -> None:
        (self.stage,) = (stage for stage in self.stages if type(stage) is kind)
        self.found.rounds = 0

    # ------------------------------------------------------------------------------------------
    # The penalty and the clusters
    # ------------------------------------------------------------------------------------------

    @property
    def found_penalty(self) -> Penalty:
        """The paper's penalty; lambda is 0 until the groups are found."""
        return scad(self.found.lam)

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

    def too_short(self, last_round: int) -> str:
        """See `PenaltySource`."""
        return (
            f"After round {last_round} the groups are still searched for, and all clients count as "
            f"one group: the search takes {self.least_rounds} rounds or a few more. If the run is "
            "over, give start() a larger num_rounds, or FPFC fewer consensus_rounds or a penalty "
            "of your own"
        )

    def labels(self, state: FPFCState, nu: float | None = None) -> NDArray[np.int64]:
        """Return the clusters; one for all until the groups are found."""
        if self.is_searching:
            return np.zeros(len(state.clients), dtype=np.int64)
        return super().labels(state, nu)

    def report(self, clients: ClientTable) -> dict[str, Any]:
        """Return the `FoundGroups`, once there are any."""
        if self.is_searching:
            return {}
        found, labels = self.found, self.found.candidates.labels
        counts, losses, against = found.table
        groups = numbered([of_client[found.chosen] for of_client in labels.values()])
        return {
            "search": FoundGroups(
                found.last_round,
                dict(zip(labels, groups, strict=True)),
                *(counts.astype(np.int64), losses, against),
                found.chosen,
                found.smallest_distance,
                found.lam_needed,
            )
        }

    # ------------------------------------------------------------------------------------------
    # A round
    # ------------------------------------------------------------------------------------------

    def tasks(self, start: RoundStart) -> dict[int, Task]:
        """Return what the present stage asks; a stage may be over before its round begins."""
        while following := self.stage.begin_round(self.found, start):
            self._enter(following)
        if self.replacement is not None and isinstance(self.stage, Together):
            self.found.fused_from = start.round - 1
            self._enter(Fusion)  # what the user has set is for pairs
        return self.stage.tasks(self.found, start)

    def holds_omega(self, last_accepted: int) -> bool:
        """Return whether a client uploaded its omega_i: in the consensus, or since the search."""
        return self.is_searching or last_accepted > self.found.fused_from > 0

    def upload_spec(self) -> Spec | None:
        """Return what an upload of the present stage holds."""
        return self.stage.upload_spec(self.found)

    def take_models(
        self, state: FPFCState, rows: Sequence[int], omega: NDArray[Any], replies: Replies
    ) -> None:
        """Let the present stage take in the new omega_i of a round."""
        self.stage.take_models(self.found, state, rows, omega, replies)

    def after_round(self, server_round: int, state: FPFCState, replies: Replies) -> None:
        """Let the present stage take in the replies; go on to the next one if it is over."""
        if following := self.stage.take(self.found, server_round, state, replies):
            self._enter(following)

    # ------------------------------------------------------------------------------------------
    # Clients that come and go; saving
    # ------------------------------------------------------------------------------------------

    def remove(self, clients: Iterable[int], server_round: int = 0) -> None:
        """Forget clients; a group that loses its last one is out of every count."""
        found = self.found
        for client in clients:
            for rows in (found.probes, found.optimism, found.scores):
                rows.pop(client, None)
            found.candidates.remove(client)
            found.unplaced.discard(client)
            found.groups.pop(client, None)

    def is_finite(self, clients: Iterable[int]) -> bool:
        """Return whether all models are finite."""
        found, tried = self.found, self.found.candidates
        parts = [found.center, *found.probes.values(), *tried.models, *tried.uploads.values()]
        return all(bool(np.isfinite(part).all()) for part in parts)

    @property
    def _by_client(self) -> dict[str, tuple[dict[int, NDArray[Any]], tuple[int, ...], Any]]:
        """What is kept by client, with the shape and the dtype of an entry."""
        found, tried = self.found, self.found.candidates
        count, d, dtype = len(tried), found.block.size, found.block.dtype
        return {
            "probe": (found.probes, (d,), dtype),
            "optimism": (found.optimism, (1,), np.float64),
            "label": (tried.labels, (count,), np.int64),
            "upload": (tried.uploads, (count, d), dtype),
            "score": (found.scores, (2 + count, count), np.float64),
        }

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the variables as plain arrays."""
        found = self.found
        arrays = {
            **super().state_arrays(),
            "stage": np.array(
                [self.stages.index(self.stage), found.rounds, found.last_round, found.fused_from]
            ),
            "lam": np.array([found.lam]),
            "center": found.center,
            "unplaced": np.array(sorted(found.unplaced), np.uint64),
            "settled_ids": np.array(list(found.groups), np.uint64),
            "settled": np.array(list(found.groups.values()), np.int64),
            "table": found.table,
            "result": np.array([found.chosen, found.smallest_distance, found.lam_needed]),
            **{f"models.{k}": models for k, models in enumerate(found.candidates.models)},
        }
        for name, (rows, shape, dtype) in self._by_client.items():
            arrays[f"{name}_ids"] = np.array(list(rows), np.uint64)
            arrays[f"{name}_rows"] = np.array(list(rows.values()), dtype).reshape(len(rows), *shape)
        return arrays

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned.

        Raises
        ------
        ValueError
            If an array is missing, or they do not fit together.
        """
        names = {name for name in self.state_arrays() if not name.startswith("models.")}
        if missing := sorted(names - arrays.keys()):
            raise ValueError(
                f"The saved search for groups lacks {missing}. It was saved by a run with a "
                "penalty of its own, or cut short."
            )
        before = self.found
        self.found = found = Search(before.block, before.hold_out)
        models = [np.array(arrays[f"models.{k}"]) for k in range(len(arrays) - len(names))]
        found.candidates.models, found.center = models, np.array(arrays["center"])
        if (
            any(part.ndim != 2 or part.shape[1] != found.block.size for part in models)
            or found.center.shape not in ((0,), (found.block.size,))
            or arrays["stage"].shape != (4,)
            or any(
                arrays[f"{name}_rows"].shape != (len(arrays[f"{name}_ids"]), *shape)
                for name, (_, shape, _) in self._by_client.items()
            )
        ):
            raise ValueError(
                "The saved search for groups does not fit this model. Continue with the model and "
                "the settings of the saved run."
            )
        super().load_state_arrays(arrays)
        for name, (rows, _, _) in self._by_client.items():
            ids = map(int, arrays[f"{name}_ids"])
            rows |= dict(zip(ids, np.array(arrays[f"{name}_rows"]), strict=True))
        place, found.rounds, found.last_round, found.fused_from = map(int, arrays["stage"])
        settled = zip(arrays["settled_ids"].tolist(), arrays["settled"].tolist(), strict=True)
        found.groups = dict(settled)
        self.stage = self.stages[place]
        found.lam = float(arrays["lam"][0])
        found.unplaced = {int(client) for client in arrays["unplaced"]}
        found.table, (chosen, b, needed) = np.array(arrays["table"]), arrays["result"]
        found.chosen, found.smallest_distance = int(chosen), float(b)
        found.lam_needed = float(needed)
