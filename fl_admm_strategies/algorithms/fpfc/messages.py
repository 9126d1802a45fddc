"""What `FPFC` sends, a dataclass for each stage; the method itself is in `fpfc`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, get_args

from numpy.typing import NDArray

from ...maths.blocks import Arrays
from ...runtime.messages.schema import Instruction

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

OPTIMISM, NO_VOTE = "optimism", "held-out-none"
"""Metrics of a probe whose client holds nothing out: by how much its training loss is too low; or,
where it has one sample, that it takes no part in the choice."""

VALIDATION = "validation"
"""``validation-METRIC``: the metric of a path of lambdas, on held-out samples."""


MEAN_DUAL = "mean-dual"
"""The group of an evaluation with (1/m) sum_j v_ij, for the two gradient norms that follow."""
STATIONARITY, CLUSTER_GRADIENT = "stationarity", "cluster-gradient-norm"


@dataclass(frozen=True)
class FPFCMessage(Instruction):
    """Base of the messages for training; `task` is the name of the class."""

    task: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", type(self).__name__)

    @classmethod
    def decode(cls, parameters: Sequence[NDArray[Any]], config: Mapping[str, Any]) -> Self:
        """Read a message of the class that it names."""
        kind: Any = _TASKS.get(config.get("task", ""), cls)
        found: Self = Instruction.decode.__func__(kind, parameters, config)  # type: ignore[attr-defined]
        return found


@dataclass(frozen=True)
class FPFCInstruction(FPFCMessage):
    """A round of FPFC: zeta_i and the shared arrays; omega_i where the client may not hold it.

    With rho = 0 and without `start` the client begins at the anchor: at its group's model, say.
    """

    anchor: Arrays
    start: Arrays | None
    lr: float
    local_epochs: int
    rho: float
    clustered: list[str]


@dataclass(frozen=True)
class HoldOutInstruction(FPFCInstruction):
    """A round in which the client holds out a share of its samples, drawn by a seed of its own."""

    held_out: float
    held_out_seed: int


@dataclass(frozen=True)
class PathInstruction(HoldOutInstruction):
    """A round on a path of lambdas: the client measures its upload on the samples held out."""

    monitor: str


@dataclass(frozen=True)
class LateInstruction(HoldOutInstruction):
    """A client comes after the search: it trains alone, and measures the groups' models.

    They are ``K/NAME``.
    """

    groups: Arrays | None


@dataclass(frozen=True)
class NewcomerInstruction(FPFCInstruction):
    """A client that is new after the run: only the clustered block is trained."""


@dataclass(frozen=True)
class TrialInstruction(FPFCMessage):
    """Train the clustered blocks of several models, one after another, without a pull.

    The first model is the anchor; `more` has the blocks of the others, ``K/NAME``, as the upload
    has those of all.
    """

    anchor: Arrays
    more: Arrays | None
    num_models: int
    lr: float
    local_epochs: int
    clustered: list[str]
    held_out: float
    held_out_seed: int

    def blocks(self) -> Arrays:
        """Return the blocks of all models."""
        first = {f"0/{name}": self.anchor[name] for name in self.clustered}
        return first | (self.more or {})


@dataclass(frozen=True)
class ProbeInstruction(TrialInstruction):
    """Train from one model; a client that holds nothing out cross-validates, in so many folds."""

    folds: int


@dataclass(frozen=True)
class ScoreInstruction(TrialInstruction):
    """Measure the models in place of training them."""


@dataclass(frozen=True)
class RecheckInstruction(ScoreInstruction):
    """Measure them on all training samples too, with the errors of all differences."""


AnyMessage = (
    FPFCInstruction
    | HoldOutInstruction
    | PathInstruction
    | LateInstruction
    | NewcomerInstruction
    | TrialInstruction
    | ProbeInstruction
    | ScoreInstruction
    | RecheckInstruction
)
_TASKS: dict[str, type[AnyMessage]] = {kind.__name__: kind for kind in get_args(AnyMessage)}


@dataclass(frozen=True)
class PathQuestion(Instruction):
    """The handshake of a path of lambdas: whether the client can measure what is monitored."""

    nothing: Arrays
    held_out: float
    held_out_seed: int
    monitor: str


@dataclass(frozen=True)
class FPFCQuestion(Instruction):
    """Which group's model suits a client that is new after the run: they are ``K/NAME``."""

    models: Arrays
    num_groups: int
