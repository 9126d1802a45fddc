"""What the methods share in which a part of the model, v_i, stays and the rest, u, is averaged."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...maths.blocks import Arrays, Spec, compile_pattern, matching, spec_of
from ...maths.checks import Count, listing
from ...maths.schedules import StepSize
from ...runtime.algorithm import OnClient
from ...runtime.messages.schema import Instruction
from ...runtime.uploads import Upload
from .base import Weights
from .models import ModelState, OneModelStrategy, on_client

PERSONAL_HEAD = "^personal_head[.]"
"""v_i of a `clients.TwoHeaded`."""
SHARED_PART = "; global_arrays has the shared part"


@dataclass(frozen=True)
class SplitInstruction(Instruction):
    """What a client gets: u, and how to train it, with v_i beside it."""

    shared: Arrays
    personal: str | None
    lr: float
    local_epochs: int


@dataclass(frozen=True)
class SplitEvaluation(Instruction):
    """What a client needs to evaluate (u, v_i): u; it has v_i."""

    global_: Arrays
    personal: str | None


class SplitStrategy(OneModelStrategy):
    """Base of the methods that average a part of the model, while the rest stays with the clients.

    Parameters
    ----------
    lr : float or callable (default: 0.1)
        eta, the step size of what the method trains together with u.
    local_epochs : int (default: 1)
        tau, local epochs.
    weights : {"size", "uniform"} (default: "size")
        Whether u is the mean of the participants' u_i weighted by their examples, or the plain one.
    **base
        The parameters of `StatefulStrategy`.
    """

    kinds: ClassVar = {"personal": "personal model", "global": "shared part"}
    personal: str | None = field(init=False)
    """Regular expression searched in the names of the arrays: v_i. None: nothing is personal."""
    two_headed: ClassVar[str] = ""
    """The class of the clients' models, where these need two heads."""

    message_type: ClassVar[type[Instruction]] = SplitInstruction

    lr: StepSize = 0.1
    local_epochs: Count = 1
    weights: Weights = "size"

    upload = Upload("mean")

    def init_state(self, arrays: Arrays) -> ModelState:
        """Start with u^0, the shared part of the initial model."""
        if self.two_headed:
            check_two_headed(arrays, self.two_headed)
        pattern = compile_pattern("personal", self.personal)
        return ModelState(shared_part(arrays, pattern, self.trained))

    def shared_fields(self, server_round: int) -> dict[str, Any]:
        """Return u, and what is personal."""
        return {"shared": self.state.model, "personal": self.personal}

    def upload_spec(self) -> Spec:
        """Return the shared arrays' names, shapes and dtypes."""
        return spec_of(self.state.model)

    def evaluate_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, SplitEvaluation]:
        """Send u to all."""
        return dict.fromkeys(client_ids, SplitEvaluation(self.state.model, self.personal))

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return u; v_i stays with its client."""
        return (
            on_client(self, SHARED_PART) if kind == "personal" else super().model(kind, client_id)
        )


def shared_part(
    arrays: Arrays, personal: re.Pattern[str] | None, trained: Collection[str]
) -> Arrays:
    """Return the arrays of a model that are shared: those without a pattern in their names.

    Raises
    ------
    ValueError
        If what is trained is all personal, or none of it.
    """
    if personal is None:
        return arrays
    if all(personal.search(name) for name in trained):
        raise ValueError(
            f"personal={personal.pattern!r} matches all of the model's trained arrays: "
            f"{', '.join(trained)}. Nothing would be shared: give a pattern that names a part of "
            "them, e.g. '^fc2[.]', or take Local, in which nothing is shared."
        )
    matching("personal", personal, trained)
    return {name: array for name, array in arrays.items() if not personal.search(name)}


def check_two_headed(arrays: Arrays, model: str) -> None:
    """Raise ValueError unless initial arrays have two heads; `model` is the class of such."""
    if not any(re.search(PERSONAL_HEAD, name) for name in arrays):
        raise ValueError(
            f"The initial arrays {listing(list(arrays))} are of a model with one head, expected "
            f"one of clients.{model}. Start with ArrayRecord({model}.of(model).state_dict())."
        )
