"""What the parameter `penalty` of `FPFC` may be: a penalty, "auto" or a `LambdaPath`."""

from __future__ import annotations

from logging import INFO
from typing import Literal

from flwr.common import log

from ...maths.blocks import Arrays, Block
from ...maths.penalties import Penalty
from ..shared.base import OwnBuffers
from .path import LambdaPath, PathProgress
from .search import GroupSearch
from .source import FixedPenalty, HoldOut, PenaltySource, scad

GivenPenalty = Penalty | LambdaPath | Literal["auto"]


def check_given(penalty: GivenPenalty, rho: float, validation_share: float) -> None:
    """Raise unless FPFC can find its penalty from this.

    Raises
    ------
    TypeError, ValueError
        If it is none of the three, does not go with rho, or needs held-out samples where there
        are none.
    """
    if isinstance(penalty, LambdaPath):
        penalty.check(rho)
        if validation_share == 0:
            raise ValueError(
                "validation_share is 0, but a LambdaPath is chosen by held-out samples. Give it a "
                "share above 0."
            )
        return
    if penalty != "auto" and not callable(getattr(penalty, "prox_scale", None)):
        raise TypeError(
            f"penalty is {penalty!r}, expected SmoothedSCAD(lam), L1(lam), MCP(lam) or 'auto', "
            "or a LambdaPath([...])."
        )
    kind_of(penalty).check(rho)


def kind_of(penalty: GivenPenalty) -> Penalty:
    """Return a penalty of the kind that FPFC will have."""
    if isinstance(penalty, LambdaPath):
        return penalty.penalty(0)
    return scad(1.0) if penalty == "auto" else penalty


def source_of(
    penalty: GivenPenalty,
    *,
    nu: float | None,
    consensus_rounds: int,
    hold_out: HoldOut,
    block: Block,
    buffers: OwnBuffers,
    arrays: Arrays,
) -> PenaltySource:
    """Return the source of the penalty at the start of a run from these `arrays`."""
    if isinstance(penalty, LambdaPath):
        return PathProgress(penalty, nu, hold_out, block, buffers, arrays)
    if penalty != "auto":
        return FixedPenalty(penalty, nu)
    search = GroupSearch(nu, consensus_rounds, hold_out, block)
    log(
        INFO,
        "The groups of the clients are searched for in the first %s rounds or a few more",
        search.least_rounds,
    )
    return search
