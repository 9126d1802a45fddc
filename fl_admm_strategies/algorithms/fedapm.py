"""FedAPM: a model that is partly shared and partly every client's own, by inexact consensus ADMM.

Every client moves its personal parameters v_i and its copy u_i of the shared ones; only the latter
travel. By default both move at once, as one block of consensus ADMM. In the paper's form v_i moves
first: it is FedADMM with a step on v_i in front.

Zhu, Nie, Zeng, Wang, Sun, Yao, Chen, Xu, Yang, "FedAPM: Federated Learning via ADMM with Partial
Model Personalization", KDD 2025: Algorithm 1, equations (8) to (16); see docs/methods/fedapm.md.
The client is `clients.FedAPMClient`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..maths.blocks import Arrays, Pattern, Spec, compile_pattern, optimised, spec_of
from ..maths.checks import Count, Fraction, NotNegative, Positive
from ..runtime.algorithm import OnClient
from ..runtime.messages.schema import Instruction
from .fedadmm import FedADMM, FedADMMRule
from .shared.consensus import ConsensusMethod, ProximalInstruction
from .shared.models import on_client
from .shared.split import SHARED_PART, shared_part


@dataclass(frozen=True)
class FedAPMRule(FedADMMRule):
    """FedADMM's; u_i is kept in both forms, as it is of the client's own model."""

    @classmethod
    def keeps(cls, published: bool) -> dict[str, int]:
        """u_i and pi_i/rho."""
        return {"u": 1, "dual": 0}


@dataclass(frozen=True, kw_only=True)
class FedAPMInstruction(ProximalInstruction):
    """What a client gets: FedADMM's message for the shared arrays, and the settings of v_i."""

    personal: str | None
    sigma: float
    personal_epochs: int
    share: float


@dataclass(frozen=True)
class FedAPMEvaluation(Instruction):
    """What a client needs to evaluate (v_i, u_i) and (v_i, w); it has v_i."""

    model: Arrays
    start: Arrays | None
    rule: str
    optimised: list[str]
    personal: str | None


class FedAPM(FedADMM):
    """Federated learning with partial model personalisation by inexact ADMM (FedAPM).

    Parameters
    ----------
    personal : str or None
        Regular expression searched in the names of the arrays: v_i, which stays with the clients
        and may have other shapes on each of them. `clients.input_layers`, `output_layers` and
        `split_input` write it for the paper's three kinds of personalisation. None: nothing is
        personal, which is `FedADMM`.
    sigma : float (default: 0.1)
        sigma_i, the weight of the proximal term of v, beside the plain loss as `rho` is
        (docs/methods/fedapm-notes.md, P5); 0 switches it off. The descent of
        the augmented Lagrangian needs sigma > 8/15 rho (Lemma 5).
    personal_epochs : int (default: 3)
        E_v, local epochs of the v-step. `local_epochs` is E_u. By default v and u move at once, for
        E_v + E_u epochs.
    tolerance : float, optional
        xi_i^0: the u-step, by default the step on both parts, takes full-gradient steps until the
        accuracy test (16) holds, in place of its epochs. The descent of the paper's form holds from
        the first round on if it is at least ||m alpha_i grad_u f_i(v_i^0, w^0)||^2
        (docs/methods/fedapm-notes.md, P7).
    tolerance_decay : float (default: 0.9)
        mu_i: xi_i <- mu_i xi_i in every round of client i, the first included (10).
    max_steps : int (default: 1000)
        Steps after which the accuracy test is given up; the clients' metric ``residual`` tells.
    **base
        The parameters of `FedADMM`, without `finetune_epochs`.

    Notes
    -----
    The initial arrays are a whole model, any client's: they say which arrays are shared, and start
    them. v_i^0 is what the client's own model holds when it is built. The global model has the
    shared arrays only; the clients alone have the others.

    Examples
    --------
    >>> strategy = FedAPM(output_layers(model, 1), lr=0.1, fraction_train=0.3)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=300)
    """

    method: ClassVar = "FedAPM"
    paper: ClassVar = "Zhu, Nie, Zeng, Wang, Sun, Yao, Chen, Xu, Yang, KDD 2025"
    kinds: ClassVar = {"personal": "personal model", "global": "own part with the shared one"}
    message_type: ClassVar = FedAPMInstruction
    rule: ClassVar = FedAPMRule
    own: ClassVar = "u"

    personal: Pattern | None = field(kw_only=False)
    sigma: NotNegative = 0.1
    personal_epochs: Count = 3
    tolerance: Positive | None = None
    tolerance_decay: Fraction = 0.9
    max_steps: Count = 1000
    finetune_epochs: None = field(default=None, init=False)

    @property
    def seeks_step_sum(self) -> bool:
        """As FedADMM, where the u-step has a number of epochs."""
        return super().seeks_step_sum and self.tolerance is None

    def agreed(self, arrays: Arrays) -> Arrays:
        """Return the shared arrays; of what is optimised some must be personal and some shared."""
        together = optimised(arrays, self.trained, self._averaged)
        return shared_part(arrays, compile_pattern("personal", self.personal), together)

    def upload_spec(self) -> Spec:
        """Return the shared arrays' names, shapes and dtypes."""
        return spec_of(self.global_model())

    def shared_fields(self, server_round: int) -> dict[str, Any]:
        """By default v has no epochs alone: all epochs move both parts at once."""
        given = super().shared_fields(server_round)
        if not self.published and self.personal is not None:
            both = self.local_epochs + self.personal_epochs
            given |= {"local_epochs": both, "personal_epochs": 0}
        return given

    def client_fields(self, client_id: int) -> dict[str, Any]:
        """Add alpha_i m, and xi_i (10) where steps are accuracy-tested."""
        share = self.weight_of(client_id) * self.membership.num_initial
        given = super().client_fields(client_id) | {"share": share}
        if self.tolerance is not None:
            turn = int(self.state.clients[client_id].turns) + 1
            tolerance = self.tolerance * self.tolerance_decay**turn
            given |= {"tolerance": tolerance, "loss_weight": share}
        return given

    def evaluate_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, FedAPMEvaluation]:
        """Send every client w, and its row where it may not hold it; v_i is with the clients."""
        model, names, fields = self.global_model(), self._block.names, ConsensusMethod.client_fields
        return {
            c: FedAPMEvaluation(model, **fields(self, c), optimised=names, personal=self.personal)
            for c in client_ids
        }

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return w, the shared arrays; the clients' own models stay with them."""
        if kind == "personal":
            return on_client(self, SHARED_PART)
        return super().model(kind, client_id)
