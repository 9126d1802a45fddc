"""What `FPFC` sends, a dataclass for each stage, and the rule of its rounds.

The method itself is in `fpfc`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from ...maths.blocks import Arrays
from ...runtime.messages.schema import Instruction
from ..shared.consensus import ProximalInstruction
from ..shared.rule import Row, Rule

KINDS = {
    "personal": "personal model",
    "cluster": "cluster model",
    "global": "one global model",
}
"""The models that a run has, and newcomers after it."""

CLUSTER_FIRST = {kind: KINDS[kind] for kind in ("cluster", "personal", "global")}
"""Likewise, of a run that finds its groups itself."""

HELD_OUT_LOSS, TRAINING_LOSS, GRADIENT_NORM = "held-out-loss", "training-loss", "gradient-norm"
"""Metrics of models that a client compares, each followed by ``-K`` for model K."""

ERROR = "error"
"""``LOSS-error-J-K`` is the standard error of the difference of two losses."""

VALIDATION = "validation"
"""``validation-METRIC``: the metric of a path of lambdas, on held-out samples."""

MEAN_DUAL = "mean-dual"
"""The group of an evaluation with (1/m) sum_j v_ij, for the two gradient norms that follow."""
STATIONARITY, CLUSTER_GRADIENT = "stationarity", "cluster-gradient-norm"


@dataclass(frozen=True)
class FPFCRule(Rule):
    """A client's row is omega_i; it is pulled to w, which is zeta_i, by rho."""

    rho: float

    @classmethod
    def keeps(cls, published: bool) -> dict[str, int]:
        """Return that omega_i begins at w."""
        return {"omega": 1}

    def pull(self, row: Row, w: Any) -> tuple[Any, float]:
        """Return zeta_i and rho (5)."""
        return w, self.rho

    def start(self, row: Row, w: Any) -> Any:
        """Return omega_i: (5) goes on from the last iterate."""
        return row.omega

    def move(self, row: Row, u: Any, w: Any) -> Row:
        """Return omega_i = u."""
        return Row(omega=u)


@dataclass(frozen=True, kw_only=True)
class FPFCInstruction(ProximalInstruction):
    """A round of FPFC: zeta_i, the shared arrays and the rule.

    `start` has omega_i where the client may not hold it, and no array for a client that begins at
    `model`. With rho = 0 there is no pull.
    """

    task: str = "FPFCInstruction"
    duals: str = "strategy"
    wants_step_sum: bool = False


@dataclass(frozen=True, kw_only=True)
class HoldOutInstruction(FPFCInstruction):
    """A round in which the client holds out a share of its samples, drawn by a seed of its own."""

    task: str = "HoldOutInstruction"
    held_out: float
    held_out_seed: int


@dataclass(frozen=True, kw_only=True)
class PathInstruction(HoldOutInstruction):
    """A round on a path of lambdas: the client measures its upload on the samples held out."""

    task: str = "PathInstruction"
    monitor: str


@dataclass(frozen=True, kw_only=True)
class LateInstruction(HoldOutInstruction):
    """A client comes after the search: it trains alone, and measures the groups' models.

    They are ``K/NAME``.
    """

    task: str = "LateInstruction"
    groups: Arrays | None


@dataclass(frozen=True, kw_only=True)
class NewcomerInstruction(FPFCInstruction):
    """A client that is new after the run: only the clustered block is trained."""

    task: str = "NewcomerInstruction"


@dataclass(frozen=True, kw_only=True)
class TrialInstruction(Instruction):
    """Train the clustered blocks of several models, one after another, without a pull.

    `model` is the first; `more` has the blocks of the others, ``K/NAME``, as the upload has those
    of all.
    """

    task: str = "TrialInstruction"
    model: Arrays
    more: Arrays | None
    num_models: int
    lr: float
    local_epochs: int
    optimised: list[str]
    held_out: float
    held_out_seed: int


@dataclass(frozen=True, kw_only=True)
class ScoreInstruction(TrialInstruction):
    """Measure the models in place of training them."""

    task: str = "ScoreInstruction"


@dataclass(frozen=True, kw_only=True)
class RecheckInstruction(ScoreInstruction):
    """Measure them on all training samples, and no gradient norms."""

    task: str = "RecheckInstruction"


AnyMessage = FPFCInstruction | TrialInstruction
_TASKS: dict[str, type[AnyMessage]] = {
    kind.__name__: kind
    for kind in (
        FPFCInstruction,
        HoldOutInstruction,
        PathInstruction,
        LateInstruction,
        NewcomerInstruction,
        TrialInstruction,
        ScoreInstruction,
        RecheckInstruction,
    )
}


class FPFCMessage(Instruction):
    """The messages for training: `task` is the name of a message's class."""

    @classmethod
    def decode(cls, parameters: Sequence[NDArray[Any]], config: Mapping[str, Any]) -> Any:
        """Read a message of the class that it names."""
        return _TASKS.get(config.get("task", ""), FPFCInstruction).decode(parameters, config)


@dataclass(frozen=True)
class FPFCQuestion(Instruction):
    """Which group's model suits a client that is new after the run: they are ``K/NAME``."""

    models: Arrays
    num_groups: int
