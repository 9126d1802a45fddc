"""The setting `penalty` of `FPFC`: a penalty, "auto" or a `LambdaPath`, and what goes with it."""

from __future__ import annotations

import math
from dataclasses import field
from logging import INFO
from typing import Literal

from flwr.common import log

from ...maths.blocks import Arrays, Block
from ...maths.checks import Count, Positive, Share
from ...maths.penalties import L1, MCP, Penalty
from ...runtime.messages.records import ClientInstruction
from ...runtime.sampled import SampledStrategy
from ...runtime.trust.bound import Bound
from ..shared.base import OwnBuffers
from .path import LambdaPath, PathProgress
from .search import GroupSearch
from .source import FixedPenalty, FPFCState, HoldOut, PenaltySource, scad
from .stages import Search

GivenPenalty = Penalty | LambdaPath | Literal["auto"]


def kind_of(penalty: GivenPenalty) -> Penalty:
    """Return a penalty of the kind that FPFC will have."""
    if isinstance(penalty, LambdaPath):
        return penalty.penalty(0)
    return scad(1.0) if penalty == "auto" else penalty


class DeclaredPenalty(SampledStrategy):
    """Declares the setting that is a property of `PenaltySetting`."""

    penalty: GivenPenalty = field(default="auto", kw_only=False)


class PenaltySetting(DeclaredPenalty):
    """The settings by which `FPFC` makes its `PenaltySource`; see there."""

    state: FPFCState = field(init=False)

    rho: Positive = 1.0
    nu: Positive | None = None
    consensus_rounds: Count = 20
    validation_share: Share = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._penalty: GivenPenalty = vars(self)["penalty"]
        self._check(self._penalty)

    def _check(self, penalty: GivenPenalty) -> None:
        """Raise unless FPFC can find its penalty from this, with these settings."""
        if self.validation_share == 1:
            raise ValueError("validation_share is 1, expected less. Nothing is left to train on.")
        if isinstance(penalty, LambdaPath):
            if self.validation_share == 0:
                raise ValueError(
                    "validation_share is 0, but a LambdaPath is chosen by held-out samples. Give "
                    "it a share above 0."
                )
            penalty.check(self.rho)
        elif penalty == "auto" or callable(getattr(penalty, "prox_scale", None)):
            kind_of(penalty).check(self.rho)
        else:
            raise TypeError(
                f"penalty is {penalty!r}, expected SmoothedSCAD(lam), L1(lam), MCP(lam) or 'auto', "
                "or a LambdaPath([...])."
            )

    @property
    def title(self) -> str:
        """The method's name as its paper writes it."""
        return {L1: "FPFC-l1", MCP: "FPFC-MCP"}.get(type(kind_of(self.penalty)), "FPFC")

    @property  # type: ignore[misc]  # the dataclass plugin wants an attribute for an attribute
    def penalty(self) -> GivenPenalty:
        """g, or how its lambda is found.

        Raises
        ------
        TypeError, ValueError
            Where it is set in the course of a run: if it is not one of `SmoothedSCAD`, `L1` and
            `MCP`, does not go with rho, or the run is still finding a lambda itself.
        """
        source = self._source
        replaced = None if source is None else source.replacement
        return self._penalty if replaced is None else replaced

    @penalty.setter  # type: ignore[override]
    def penalty(self, penalty: Penalty) -> None:
        if self._source is None:
            self._check(penalty)
            self._penalty = penalty
        else:
            self._source.replace(penalty, self.rho)

    @property
    def _source(self) -> PenaltySource | None:
        return getattr(getattr(self, "state", None), "source", None)

    @property
    def penalty_in_use(self) -> Penalty:
        """The penalty of the next update; with "auto" lambda is 0 until the groups are found."""
        self._need_state()
        return self.state.source.penalty

    @property
    def nu_in_use(self) -> float:
        """The threshold of `clusters`; with "auto" 0 until the groups are found."""
        self._need_state()
        return self.state.source.nu

    def _new_source(self, block: Block, buffers: OwnBuffers, arrays: Arrays) -> PenaltySource:
        """Return the source of a run from these `arrays`: what was set in an earlier one counts."""
        penalty = self._penalty = self.penalty
        if self.max_norm is None and penalty == "auto":
            self.run.bound = Bound(
                self, "auto", is_loose=self._is_settled, is_free=self._is_of_newcomer
            )
        else:  # a penalty holds far clients off by itself
            self.run.bound = Bound(self, self.max_norm or math.inf)
        hold_out = HoldOut(
            self.validation_share, lambda ids: self.run.sampling.client_seeds(ids, 0)
        )
        if isinstance(penalty, LambdaPath):
            return PathProgress(penalty, self.nu, hold_out, block, buffers, arrays)
        if penalty != "auto":
            return FixedPenalty(penalty, self.nu)
        variables = Search(block, hold_out, self.consensus_rounds, self.in_rounds)
        search = GroupSearch(self.nu, variables, self.run.bound.begin_anew)
        log(
            INFO,
            "The groups of the clients are searched for in the first %s rounds or a few more",
            search.least_rounds,
        )
        return search

    def _is_settled(self) -> bool:
        return not self.state.source.waits_for_all

    def _is_of_newcomer(self, sent: ClientInstruction) -> bool:
        """Return whether an upload is where a client came to on its own, and moves nobody else."""
        return self._is_settled() and "held-out" in sent.config
