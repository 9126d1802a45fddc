"""The client of FedAPM; the strategy and the paper are in `fl_admm_strategies.FedAPM`."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fl_admm_strategies import FedAPM
from fl_admm_strategies.algorithms.fedapm import FedAPMEvaluation, FedAPMInstruction
from fl_admm_strategies.maths.blocks import Arrays, under
from fl_admm_strategies.runtime.messages.records import STEP_SUM

from ..toolkit.round.split_model import SplitClient, V
from ..toolkit.round.torch_client import BUFFERS
from ..toolkit.solving.objective import LocalObjective, ProximalTerm
from ..toolkit.solving.solvers import descend_until
from ..toolkit.solving.steps import Evaluation, Minimisation, Scalars, Steps
from .fedadmm import FedADMMClient

U, XI = "u/", "xi"  # prefix of u_i and name of xi_i in the client's memory, beside v_i


class FedAPMClient(FedADMMClient, SplitClient[Any]):
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

    strategy: ClassVar[Any] = FedAPM
    instruction: ClassVar[Any] = FedAPMInstruction

    def local_step(
        self, asked: Any, anchor: dict[str, Tensor], config: Scalars
    ) -> Steps[tuple[Scalars, Arrays]]:
        """Run the v-step at u_i, then the u-step at the new v_i (Gauss-Seidel).

        v <- v - eta [grad_v f_i(v, u_i) + (sigma/alpha_i) (v - v_i)], E_v epochs. (9) prints f_i
        without its alpha_i; (15) and all proofs have it (docs/methods/fedapm-notes.md, P1). Where
        the u-step starts at w, this one is at u_i all the same (P9).

        The u-step is FedADMM's, or full-gradient steps until the accuracy test (16) holds for
        xi_i^{t+1} = mu xi_i^t. Then the metrics have ``residual``, its left side, and ``steps``.
        """
        personal, _ = self.trained_parts(asked.personal)
        weight = asked.loss_weight
        if personal:
            first = self.block(asked.optimised)
            if (u := self._kept_u(asked, config)) is not None:
                self.load_block(u)
            term = ProximalTerm(asked.sigma, self.block(personal))
            objective = LocalObjective([term], loss_weight=weight, moving=personal)
            yield Minimisation(objective, asked.lr, asked.personal_epochs)
            self.load_block(first)
        kept: Arrays = {}
        if asked.tolerance is None:
            metrics, _ = yield from super().local_step(asked, anchor, config)
        else:
            self.refuse_own_steps(
                "the server gives a tolerance, and the accuracy test (16) takes plain "
                "full-gradient steps",
                "give FedAPM no tolerance",
            )
            held = self.memory.recall(config) or {}
            xi = asked.tolerance_decay * float(held.get(XI, asked.tolerance))
            metrics = descend_until(
                self.train_problem,
                self.objective(asked, anchor),
                tolerance=xi,
                lr=asked.lr,
                max_steps=asked.max_steps,
                loss_weight=weight,
            )
            kept[XI] = np.array(xi)
            if asked.wants_step_sum:
                metrics[STEP_SUM] = asked.lr * metrics["steps"]
        # Not before: the u-step moves the running statistics of a personal batch norm.
        return metrics, kept | self.kept(asked)

    def test(self, parameters: list[NDArray[Any]], config: Scalars) -> Steps[Evaluation]:
        """Evaluate the client's own (v_i, u_i), the headline, and (v_i, w).

        v_i and u_i are those of its last training that the server accepted, before the first the
        initial ones; arrays that are averaged are the server's in both.
        """
        asked = FedAPMEvaluation.decode(parameters, config)
        self.receive(asked, asked.global_, config)
        shared = self.arrays()
        if (u := self._kept_u(asked, config)) is not None:
            self.load_block(u)
        return (yield from self.evaluate_models({"personal": self.arrays(), "global": shared}))

    def _kept_u(
        self, asked: FedAPMEvaluation | FedAPMInstruction, config: Scalars
    ) -> Arrays | None:
        """Return u_i, or None before the first training of a client that starts at w."""
        if asked.start is not None:
            return asked.start
        held = self.memory.require_known(config)
        return None if held is None else under(U, held)

    def is_resent(self, asked: Any) -> bool:
        """Return that v_i is with the client alone."""
        return False

    def shared(self, asked: Any) -> list[str]:
        """Return the parameters that travel: u_i, and those that are averaged."""
        return self.trained_parts(asked.personal)[1]

    def receive(self, asked: Any, arrays: Arrays, config: Scalars) -> None:
        """Load the shared arrays of a message, and the client's own v_i, into the model."""
        self.load_split(arrays, asked.personal, config)

    def personal_arrays(self) -> Arrays:
        """Return v_i and u_i, the client's own model after its last training: a ``state_dict``.

        Raises
        ------
        RuntimeError
            If it has not been trained yet.
        """
        latest = self.memory.latest()
        kept = under(BUFFERS, latest) | under(V, latest) | under(U, latest)
        return self.model_arrays.complete(kept)
