"""The client of FedAPM; the strategy and the paper are in `fl_admm_strategies.FedAPM`."""

from __future__ import annotations

from typing import Any, ClassVar

from numpy.typing import NDArray

from fl_admm_strategies import FedAPM
from fl_admm_strategies.algorithms.fedapm import FedAPMEvaluation, FedAPMInstruction
from fl_admm_strategies.maths.blocks import Arrays, prefixed, under

from ..toolkit.round.mirror import Turn
from ..toolkit.round.proximal import ProximalClient
from ..toolkit.round.split_model import SplitClient, V
from ..toolkit.round.torch_client import BUFFERS
from ..toolkit.solving.objective import LocalObjective, ProximalTerm
from ..toolkit.solving.steps import Evaluation, Minimisation, Scalars, Steps


class FedAPMClient(ProximalClient, SplitClient[Any]):
    """Client of `FedAPM`: steps on its personal v_i and on its copy u_i of the shared block.

    v_i never leaves the client, and its shapes may be this client's own. It starts from the values
    of the model that the client is given: seed it where you build it, so that a run can be
    repeated. Parameters are those of `TorchClient`.

    Examples
    --------
    >>> def client_fn(context: Context):
    ...     torch.manual_seed(0)  # v_i of the first round
    ...     train, test = load_data(context.node_config["partition-id"])
    ...     return FedAPMClient(context, Net(), train, nn.CrossEntropyLoss(),
    ...                         test_loader=test, metrics={"accuracy": accuracy}).to_client()
    """

    strategy = FedAPM
    instruction: ClassVar[Any] = FedAPMInstruction
    resent = False  # the strategy does not have v_i

    def receive(self, message: Any, config: Scalars) -> None:
        """Load the shared arrays of a message, and the client's own v_i, into the model."""
        self.load_split(message.model, message.personal, config)

    def local_steps(self, turn: Turn) -> Steps[tuple[Scalars, Arrays, Arrays]]:
        """Move v and u at once, or in the paper's form v at u_i, then u at the new v_i.

        v <- v - eta [grad_v f_i(v, u) + (sigma/alpha_i) (v - v_i)]. (9) prints f_i without its
        alpha_i; (15) and all proofs have it (docs/methods/fedapm-notes.md, P1).
        """
        message = turn.message
        if message.personal_epochs and (personal := self.trained_parts(message.personal)[0]):
            self.load_block(turn.block.arrays(turn.row.u, copy=False))
            objective = LocalObjective(self.terms(turn), moving=personal)
            yield Minimisation(objective, message.lr, message.personal_epochs)
        metrics, upload, _ = yield from super().local_steps(turn)
        kept = self.kept(message)  # not before: the steps on u move a personal norm's statistics
        return metrics, {n: array for n, array in upload.items() if V + n not in kept}, kept

    def terms(self, turn: Turn) -> list[ProximalTerm]:
        """Add sigma/2 ||v - v_i||^2; a term counts in the steps that move its block."""
        own = self.block(self.trained_parts(turn.message.personal)[0])
        term = ProximalTerm(turn.message.sigma / turn.message.share, own)
        return super().terms(turn) + ([term] if own else [])

    def moving(self, message: Any) -> list[str]:
        """Return the parameters of u, and where v has no epochs alone those of v as well."""
        return self.trained_parts(message.personal if message.personal_epochs else None)[1]

    def test(self, parameters: list[NDArray[Any]], config: Scalars) -> Steps[Evaluation]:
        """Evaluate the client's own (v_i, u_i), the headline, and (v_i, w).

        v_i and u_i are those of its last training that the server accepted, before the first the
        initial ones; arrays that are averaged are the server's in both.
        """
        message = FedAPMEvaluation.decode(parameters, config)
        self.receive(message, config)
        shared = self.arrays()
        turn = self.turn(message, config)
        models = {"personal": shared | turn.block.arrays(turn.row.u), "global": shared}
        return (yield from self.evaluate_models(models))

    def own_model(self, kept: Arrays) -> Arrays:
        """Return v_i and u_i."""
        return super().own_model(kept | prefixed(BUFFERS, under(V, kept)))
