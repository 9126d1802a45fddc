"""What `FPFC` sends, as dataclasses; the method itself is in `fpfc`."""

from __future__ import annotations

from dataclasses import dataclass

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
"""What clients report in the stage of the scores, each followed by ``-K`` for candidate K."""

ERROR = "error"
"""With the name of a loss before it and ``-J-K`` behind: the standard error of the difference of
two of them."""

OPTIMISM, NO_VOTE = "optimism", "held-out-none"
"""What a client that holds nothing out reports with its probe: how much too low its training loss
is; or, having one sample, that it cannot say, and so has no say in the choice."""


@dataclass(frozen=True)
class FPFCInstruction(Instruction):
    """What a client gets: zeta_i and phi; omega_i where it may not hold it.

    In the search for groups: how many models to train or measure (`candidates`), the first of them
    in the anchor, the blocks of the others in `more`; the share of its samples that the client
    holds out, chosen by a seed of its own; and the `folds` of one that holds none out. On a path of
    lambdas: what it is to `monitor` on those held out.
    `in_full`: it measures on all its samples, too.
    With `others_fixed` only the clustered block is trained.
    """

    anchor: Arrays
    start: Arrays | None
    lr: float
    local_epochs: int
    rho: float
    clustered: list[str]
    more: Arrays | None = None
    candidates: int | None = None
    held_out: float | None = None
    held_out_seed: int | None = None
    folds: int | None = None
    in_full: bool | None = None
    monitor: str | None = None
    others_fixed: bool | None = None


@dataclass(frozen=True)
class FPFCQuestion(Instruction):
    """Which group's model suits a client that is new after the run: they are ``K/NAME``."""

    models: Arrays
    num_groups: int


@dataclass(frozen=True)
class FPFCEvaluation(Instruction):
    """The models to evaluate, and whose loss counts as the client's.

    With (1/m) sum_j v_ij, where the client is to report its gradients.
    """

    personal: Arrays
    cluster: Arrays
    global_: Arrays
    mean_dual: Arrays | None = None
    clustered: list[str] | None = None
    headline: str | None = None
