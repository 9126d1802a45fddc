"""The clients of CFL, PACFL and IFCA; the strategies and papers are in `fl_admm_strategies`."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_admm_strategies import CFL, IFCA, PACFL
from fl_admm_strategies.algorithms.ifca import LOSS, TOOK, IFCAEvaluation, IFCAInstruction
from fl_admm_strategies.algorithms.pacfl import PACFLQuestion
from fl_admm_strategies.algorithms.shared.clustered import ClusteredStrategy, ClusterInstruction
from fl_admm_strategies.maths.blocks import Arrays

from ..toolkit.round.torch_client import TorchClient
from ..toolkit.solving.objective import LocalObjective
from ..toolkit.solving.steps import (
    Evaluation,
    Measurement,
    MethodSteps,
    Minimisation,
    Reply,
    Scalars,
    Steps,
)


class CFLClient(TorchClient[ClusterInstruction]):
    """Client of `CFL`: some epochs from its cluster's model. It keeps nothing.

    Parameters are those of `TorchClient`.
    """

    strategy: ClassVar[type[ClusteredStrategy]] = CFL
    instruction = ClusterInstruction

    def steps(self, asked: ClusterInstruction, config: Scalars) -> MethodSteps:
        """Descend on f_i from the model received; upload the result."""
        self.load(asked.model)
        metrics = yield Minimisation(LocalObjective(), asked.lr, asked.local_epochs)
        return self.arrays(), metrics


class PACFLClient(CFLClient):
    """Client of `PACFL`: tells once where its data lie; then as `CFLClient`. It keeps nothing.

    Parameters are those of `TorchClient`. A batch's inputs must be one tensor.
    """

    strategy = PACFL

    def answer_handshake(self, parameters: list[NDArray[Any]], config: Scalars) -> Reply:
        """Return the first left singular vectors of the training data, of each class or of all."""
        asked = PACFLQuestion.decode(parameters, config)
        num_examples = self.train_size()
        self.seed(config)
        batches = list(self.train_problem.batches())
        if not all(isinstance(batch.inputs, Tensor) for batch in batches):
            raise ValueError(
                f"The batches' inputs are {type(batches[0].inputs).__name__}, expected one tensor, "
                "as PACFL compares their directions. Give split_batch."
            )
        rows = torch.cat([batch.inputs.flatten(1) for batch in batches]).cpu().double().numpy()
        if not asked.per_class:
            return [basis_of(rows, asked.num_vectors)], num_examples, {}
        targets = torch.cat([torch.as_tensor(batch.targets) for batch in batches]).cpu()
        if targets.ndim != 1 or targets.is_floating_point():
            raise ValueError(
                f"The targets are {targets.dtype} of shape {tuple(targets.shape)}, expected a "
                "class for each sample. Give PACFL per_class=False."
            )
        classes = targets.numpy()
        parts = [basis_of(rows[classes == c], asked.num_vectors) for c in np.unique(classes)]
        return [np.concatenate(parts, axis=1)], num_examples, {}


class IFCAClient(TorchClient[IFCAInstruction]):
    """Client of `IFCA`: trains the model that suits its training data best. It keeps nothing.

    Parameters are those of `TorchClient`.
    """

    strategy = IFCA
    instruction = IFCAInstruction

    def steps(self, asked: IFCAInstruction, config: Scalars) -> MethodSteps:
        """Descend on f_i from argmin_j f_i(theta_j); upload j and the result."""
        _, metrics = yield from self._taken(asked)
        if asked.local_epochs == 0:
            return {}, metrics
        metrics |= yield Minimisation(LocalObjective(), asked.lr, asked.local_epochs)
        return self.arrays(), metrics

    def test(self, parameters: list[NDArray[Any]], config: Scalars) -> Steps[Evaluation]:
        """Evaluate the model of the least training loss: ``cluster-loss``, ``cluster-METRIC``."""
        model, taken = yield from self._taken(IFCAEvaluation.decode(parameters, config))
        loss, num_examples, metrics = yield from self.evaluate_models({"cluster": model})
        return loss, num_examples, metrics | taken

    def _taken(self, asked: IFCAInstruction | IFCAEvaluation) -> Steps[tuple[Arrays, Scalars]]:
        """Load the model of the least training loss; return its arrays, and what to say of it.

        Of several it is the first; a loss that is no number is the largest.
        """
        models = asked.models()
        measured = yield Measurement(self.train_problem, models)
        losses = [metrics["loss"] for metrics in measured]
        cluster = int(np.nan_to_num(losses, nan=np.inf).argmin())
        self.load(models[cluster])  # buffers too
        took = {f"{TOOK}{k}": int(k == cluster) for k in range(len(models))}
        return models[cluster], {**took, LOSS: losses[cluster]}


def basis_of(rows: NDArray[Any], num_vectors: int) -> NDArray[Any]:
    """Return the first left singular vectors of data with samples as columns, or fewer.

    A vector's sign is what NumPy's decomposition returns, as in the authors' code; of our measures
    "entrywise-signed" alone depends on it.

    Parameters
    ----------
    rows : ndarray of float64, shape (samples, features)
    num_vectors : int

    Returns
    -------
    ndarray of shape (features, vectors)

    Raises
    ------
    ValueError
        If all samples are 0.
    """
    vectors, singular, _ = np.linalg.svd(rows.T, full_matrices=False)
    count = min(num_vectors, int((singular > 1e-10 * singular.max()).sum()))
    if not count:
        raise ValueError("All inputs are 0, which have no direction: leave this client out.")
    return vectors[:, :count]
