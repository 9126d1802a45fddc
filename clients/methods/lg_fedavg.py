"""The client of LG-FedAvg; the strategy and the paper are in `fl_admm_strategies.LGFedAvg`."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from fl_admm_strategies import LGFedAvg
from fl_admm_strategies.algorithms.lg_fedavg import BEFORE, LGFedAvgInstruction
from fl_admm_strategies.algorithms.shared.split import SplitEvaluation
from fl_admm_strategies.maths.blocks import Arrays, prefixed, under

from ..toolkit.solving.steps import Evaluation, Scalars, Steps
from .fedsim import FedSimClient

U = "u/"


class LGFedAvgClient(FedSimClient):
    """Client of `LGFedAvg`: `FedSimClient`, whose personal layers are the lower ones."""

    strategy = LGFedAvg
    instruction = LGFedAvgInstruction

    def kept(self, asked: LGFedAvgInstruction) -> Arrays:
        """Return v_i, and u_i where the client is evaluated with its own."""
        if asked.score != BEFORE:
            return super().kept(asked)
        shared = {name: array for name, array in self.arrays().items() if name in asked.shared}
        return super().kept(asked) | prefixed(U, shared)

    def test(self, parameters: list[NDArray[Any]], config: Scalars) -> Steps[Evaluation]:
        """Evaluate (u, v_i), or (u_i, v_i) where the client keeps u_i."""
        asked = SplitEvaluation.decode(parameters, config)
        self.load_split(asked.global_, asked.personal, config)
        shared = under(U, self.memory.recall(config) or {})
        return (yield from self.evaluate_models({"personal": self.arrays() | shared}))

    def personal_arrays(self) -> Arrays:
        """Return v_i after the last training, with u_i where the client keeps it."""
        shared = under(U, self.memory.latest())
        return super().personal_arrays() | prefixed(self.model_arrays.prefix, shared)
