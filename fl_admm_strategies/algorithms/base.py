"""What several methods share: how much a client counts, and consensus over a model's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Unpack

from ..maths.blocks import BATCH_NORM, Arrays, Block, compile_pattern
from ..maths.checks import check_choice
from ..runtime.bound import MaxNorm, OnExcess
from ..runtime.membership import Membership
from ..runtime.messages import ClientInstruction, Reply
from ..runtime.sampled import SampledSettings, SampledStrategy
from ..runtime.schema import Instruction

Weights = Literal["uniform", "size"]
Duals = Literal["strategy", "client"]


class WeightedSettings(SampledSettings, total=False):
    """The parameters of `WeightedStrategy`."""

    weights: Weights


class WeightedStrategy(SampledStrategy):
    """Base of the methods that minimise a sum of alpha_i f_i.

    Parameters
    ----------
    weights : {"uniform", "size"} (default: "uniform")
        alpha_i: 1/m, or n_i/n, which a handshake asks for. m and n stay those of the start when
        clients come and go: only the ratios of the alpha_i matter to the minimiser, and nobody's
        step changes.
    **base
        The parameters of `SampledStrategy`.
    """

    def __init__(self, *, weights: Weights = "uniform", **base: Unpack[SampledSettings]) -> None:
        super().__init__(**base)
        check_choice("weights", weights, ("uniform", "size"))
        self.weights = weights

    def handshake_instructions(self, client_ids: Sequence[int]) -> dict[int, ClientInstruction]:
        """Ask for n_i where the clients are weighted by it."""
        if self.weights == "uniform":
            return {}
        return {client: ClientInstruction({"nothing": {}}) for client in client_ids}

    def alpha_of(self, reply: Reply | None) -> float:
        """Return a client's alpha_i, by its reply to the handshake."""
        if self.weights == "uniform" or reply is None:
            return 1 / self.membership.num_initial
        return reply.num_examples / self.membership.initial_examples


class ConsensusSettings(WeightedSettings, total=False):
    """The parameters of `ConsensusStrategy`."""

    duals: Duals
    averaged: str


class ConsensusStrategy(WeightedStrategy):
    """Base of the ADMM methods whose clients agree on a model.

    Parameters
    ----------
    duals : {"strategy", "client"} (default: "strategy")
        Where the clients' variables live. "strategy": the server keeps them and a client that was
        lost can go on. "client", the papers' own placement: the clients keep them and send the
        change of their message, so that the server needs O(d) memory and never sees them. The same
        trajectory up to rounding, the same bytes. With "client" all clients start afresh from the
        global model when one has lost its state or has left: nobody can take its part out of the
        server's sum.
    averaged : str (default: `BATCH_NORM`)
        Regular expression searched in the arrays' names: arrays without a gradient, which are
        averaged over the participants, weighted by their examples, as are all integers.
    **base
        The parameters of `WeightedStrategy`.
    """

    _block: Block
    """What is optimised; `init_state` sets it."""

    def __init__(
        self,
        *,
        duals: Duals = "strategy",
        averaged: str = BATCH_NORM,
        **base: Unpack[WeightedSettings],
    ) -> None:
        super().__init__(**base)
        check_choice("duals", duals, ("strategy", "client"))
        check_bound_of_changes(duals, self.max_norm, self.on_excess)
        self.duals = duals
        self.averaged = averaged
        self._averaged = compile_pattern("averaged", averaged)

    def upload_reference(self, sent: ClientInstruction) -> Arrays:
        """Measure u_i, or theta_i, from the anchor, the change of a message from 0."""
        arrays = super().upload_reference(sent)
        return arrays if self.duals == "strategy" else self._block.rest(arrays)

    def on_state_lost(self, server_round: int, client_ids: Sequence[int]) -> None:
        """Start everybody from the global model where the clients keep their variables."""
        if self.duals == "client":
            self.state.consensus.restart(server_round, len(self.membership))


def check_bound_of_changes(duals: Duals, max_norm: MaxNorm, on_excess: OnExcess) -> None:
    """Raise ValueError if clients' changes would be clipped, of which they would not know.

    A client that keeps its variables goes on from what it sent. Of a refused upload it learns, by
    the round of its last accepted one in the next message.
    """
    if duals == "client" and max_norm is not None and on_excess == "clip":
        raise ValueError(
            "on_excess is 'clip', expected 'refuse' beside duals='client' and a max_norm: clients "
            "send the change of what they keep, and if it were clipped, their variables and the "
            "server's sum would differ from then on. Give on_excess='refuse' or duals='strategy'."
        )


@dataclass(frozen=True)
class OwnModelEvaluation(Instruction):
    """Evaluate the client's own model, and the global one where the method has one.

    `personal` is empty but for a client that has no model of its own yet.
    """

    personal: Arrays
    global_: Arrays | None


def evaluate_own_models(
    membership: Membership,
    client_ids: Sequence[int],
    initial: Arrays,
    global_model: Arrays | None = None,
) -> dict[int, OwnModelEvaluation]:
    """Ask clients to evaluate the models that they keep; new ones start from the initial model."""
    return {
        client: OwnModelEvaluation(initial if membership.is_new(client) else {}, global_model)
        for client in client_ids
    }
