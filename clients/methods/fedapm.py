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
    """Client of `FedAPM`: steps on its personal v_i, then on its copy u_i of the shared block.

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
        """Run the v-step at u_i, then the u-step at the new v_i (Gauss-Seidel).

        v <- v - eta [grad_v f_i(v, u_i) + (sigma/alpha_i) (v - v_i)], E_v epochs. (9) prints f_i
        without its alpha_i; (15) and all proofs have it (docs/methods/fedapm-notes.md, P1). Where
        the u-step starts at w, this one is at u_i all the same (P9).
        """
        message = turn.message
        if personal := self.trained_parts(message.personal)[0]:
            self.load_block(turn.block.arrays(turn.row.u, copy=False))
            term = ProximalTerm(message.sigma / message.share, self.block(personal))
            objective = LocalObjective([term], moving=personal)
            yield Minimisation(objective, message.lr, message.personal_epochs)
        metrics, upload, _ = yield from super().local_steps(turn)
        kept = self.kept(message)  # not before: the u-step moves a personal norm's statistics
        shared = {name: array for name, array in upload.items() if V + name not in kept}
        return metrics, shared, kept

    def moving(self, message: Any) -> list[str]:
        """Return the parameters that travel: u_i, and those that are averaged."""
        return self.trained_parts(message.personal)[1]

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
