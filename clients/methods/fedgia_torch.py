"""FedGiA's client for any PyTorch model, apart from the linear one, which needs no PyTorch."""

from __future__ import annotations

from typing import Any

from fl_admm_strategies.algorithms.fedgia import FedGiAInstruction, FedGiAQuestion
from fl_admm_strategies.maths.blocks import Arrays

from ..toolkit.models.arrays import to_array
from ..toolkit.round.torch_client import TorchClient
from ..toolkit.solving.hessian import largest_curvature
from ..toolkit.solving.steps import Scalars
from .fedgia import GradientClient


class FedGiAClient(GradientClient, TorchClient[FedGiAInstruction]):
    """Client of `FedGiA` with any PyTorch model: H_i = r_i I (FedGiA_D).

    r_i is estimated by `largest_curvature` at the initial model; the loss must be differentiable
    twice. f_i is the loss of the model in evaluation mode, over all samples: FedGiA's rounds need
    one function, so dropout is off, and buffers (a batch norm's running mean) and frozen parameters
    stay as they start. Parameters are those of `TorchClient`, without an optimizer, a schedule or
    clipping: there is one gradient a round, and the steps are a formula; `full_batch` has no use.

    Examples
    --------
    >>> def client_fn(context: Context):
    ...     train, test = load_data(context.node_config["partition-id"])
    ...     return FedGiAClient(context, Net(), train, nn.CrossEntropyLoss(),
    ...                         test_loader=test, metrics={"accuracy": accuracy}).to_client()
    """

    closed_form = GradientClient.closed_form

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.refuse_own_steps(
            f"FedGiA takes none of these: {self.closed_form}",
            "use a method with clients that descend, such as FedADMM",
        )

    def loss_and_gradient(self, model: Arrays) -> tuple[float, Arrays]:
        """Return f_i and its gradient; zero for what the loss does not reach."""
        self.load(model)
        self.model.eval()
        loss = self.train_problem.set_gradient()
        slopes = self.model_arrays.gradients(self.model_arrays.trained)
        return loss, {name: to_array(slope) for name, slope in slopes.items()}

    def measure_curvature(self, asked: FedGiAQuestion, config: Scalars) -> float:
        """Return the estimate of r_i.

        Raises
        ------
        ValueError
            If the server wants the Gram matrix, which is that of a linear model.
        """
        if asked.hessian == "gram":
            raise ValueError(
                "hessian='gram' needs a data matrix; a PyTorch model has none. Use "
                "FedGiA(hessian='diagonal'), or FedGiALinearClient with LeastSquares or Logistic."
            )
        self.load(asked.model)
        self.seed(config)
        return largest_curvature(self.train_problem, int(config["seed"]))
