"""The client of the methods of consensus ADMM that descend: one proximal step in a turn."""

from __future__ import annotations

from typing import Any, ClassVar

from fl_admm_strategies.algorithms.shared.consensus import ProximalInstruction
from fl_admm_strategies.maths.blocks import Arrays, Block, prefixed, spec_of, under

from ..data.batches import Loader
from ..solving.objective import LocalObjective, ProximalTerm
from ..solving.solvers import descend_until
from ..solving.steps import MethodSteps, Minimisation, Scalars, Steps
from .mirror import ROW, MirrorClient, Turn
from .torch_client import BUFFERS, TorchClient, read_only


class ProximalClient(MirrorClient, TorchClient[Any]):
    """Minimises f(u) + weight/2 ||u - point||^2, with point and weight of its rule.

    Parameters are those of `TorchClient`.
    """

    instruction: ClassVar[Any] = ProximalInstruction
    block_setting: ClassVar[str] = "averaged"
    """The setting of the strategy that says which arrays have a proximal term."""

    def steps(self, asked: ProximalInstruction, config: Scalars) -> MethodSteps:
        """Upload u, or the change of the client's message."""
        self.receive(asked, config)
        self.trainable(asked.optimised, setting=f"{self.strategy.method}({self.block_setting}=...)")
        turn = self.turn(asked, config)
        metrics, upload, kept = yield from self.local_steps(turn)
        if self.strategy.own:  # type: ignore[attr-defined]
            kept |= prefixed(BUFFERS, turn.block.rest(upload))
        return self.end(turn, upload, kept, config), metrics

    def receive(self, message: Any, config: Scalars) -> None:
        """Load the model of a message."""
        self.load(message.model)

    def local_steps(self, turn: Turn) -> Steps[tuple[Scalars, Arrays, Arrays]]:
        """Take local epochs, or full-gradient steps to a tolerance.

        Return metrics, the upload, and what else the client keeps. Accuracy-tested steps report
        ``residual``, the squared norm of the weighted gradient, ``tolerance`` and ``steps``.
        """
        message, block = turn.message, turn.block
        self.load_block(block.arrays(turn.rule.start(turn.row, turn.w), copy=False))
        objective = LocalObjective(
            self.terms(turn), moving=self.moving(message), wants_step_sum=message.wants_step_sum
        )
        if message.tolerance is None:
            data = self.training_data(message)
            metrics = yield Minimisation(objective, message.lr, message.local_epochs, data)
            return metrics, self.arrays(), {}
        self.refuse_own_steps(
            "the server gives a tolerance, and the accuracy test takes plain full-gradient steps",
            f"give {self.strategy.__name__} no tolerance",
        )
        metrics = descend_until(
            self.train_problem,
            objective,
            tolerance=message.tolerance,
            lr=message.lr,
            max_steps=message.max_steps,
            loss_weight=message.loss_weight,
        )
        return metrics | {"tolerance": message.tolerance}, self.arrays(), {}

    def terms(self, turn: Turn) -> list[ProximalTerm]:
        """Return the proximal terms of these steps: the pull of the rule."""
        point, weight = turn.rule.pull(turn.row, turn.w)
        return [ProximalTerm(weight, read_only(turn.block.arrays(point, copy=False), self.device))]

    def training_data(self, message: Any) -> Loader | None:
        """Return what these steps train on; None: all training data."""
        return None

    def moving(self, message: Any) -> list[str]:
        """Return the parameters that these steps move."""
        return self.trained_names()

    def personal_arrays(self) -> Arrays:
        """Return the client's own model after its last training: a ``state_dict``.

        Raises
        ------
        RuntimeError
            If it has not been trained yet, or its method has a global model alone.
        """
        if not self.strategy.own:  # type: ignore[attr-defined]
            raise RuntimeError(f"{self.strategy.__name__} has no personal model.")
        return self.model_arrays.complete(self.own_model(self.memory.latest()))

    def own_model(self, kept: Arrays) -> Arrays:
        """Return the client's own model as it was kept: a vector of its row, and the rest."""
        rest = under(BUFFERS, kept)
        block = Block(spec_of({n: a for n, a in self.arrays().items() if n not in rest}))
        return rest | block.arrays(kept[ROW + self.strategy.own])  # type: ignore[attr-defined]
