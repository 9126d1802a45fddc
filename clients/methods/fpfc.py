"""The client of FPFC; the strategy and the paper are in `fl_admm_strategies.FPFC`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_admm_strategies import FPFC
from fl_admm_strategies.algorithms.fpfc import FPFCEvaluation, FPFCInstruction
from fl_admm_strategies.maths.blocks import Arrays

from ..toolkit.base import Scalars
from ..toolkit.objective import LocalObjective, ProximalTerm
from ..toolkit.torch_client import TorchClient, to_numpy, to_tensors


class FPFCClient(TorchClient[FPFCInstruction]):
    """Client of `FPFC`: T_i epochs of (5) from its own last iterate.

    The clustered block omega_i is pulled towards the server's zeta_i; arrays that are not clustered
    start from the server's and are trained without a proximal term (section 6.1). Parameters are
    those of `TorchClient`.

    Examples
    --------
    >>> def client_fn(context: Context):
    ...     train, test = load_data(context.node_config["partition-id"])
    ...     return FPFCClient(context, Net(), train, nn.CrossEntropyLoss(),
    ...                       test_loader=test, metrics={"accuracy": accuracy}).to_client()
    """

    strategy = FPFC
    instruction = FPFCInstruction

    def train(self, asked: FPFCInstruction, config: Scalars) -> tuple[Arrays, Scalars]:
        """Run (5): omega <- omega - alpha [grad f_i(omega) + rho (omega - zeta_i)], T_i epochs."""
        self.load(asked.anchor)
        names = self._clustered(asked.clustered)
        anchor = {name: asked.anchor[name] for name in names}
        term = ProximalTerm(asked.rho, to_tensors(anchor, self.device))
        self.load_block(to_tensors(asked.start or self.memory.require(config), self.device))
        metrics = self.solve(LocalObjective([term]), lr=asked.lr, epochs=asked.local_epochs)
        self.memory.keep(config, to_numpy(self.block(names)))
        return self.arrays(), metrics

    def test(self, parameters: list[NDArray[Any]], config: Scalars) -> tuple[float, int, Scalars]:
        """Evaluate the personal, cluster and global model; add the diagnostics the server asks for.

        Returns
        -------
        loss, num_examples, metrics
            As `TorchClient.test`. Where the message carries (1/m) sum_j v_ij: also
            ``stationarity``, ||grad f_i(omega_i) + (1/m) sum_j v_ij|| (KKT, (11)), and
            ``cluster-gradient-norm``, ||grad f_i(alpha_l)||, both over the clustered block and the
            training data.
        """
        asked = FPFCEvaluation.decode(parameters, config)
        models = {"personal": asked.personal, "cluster": asked.cluster, "global": asked.global_}
        with self.seeded(config):
            loss, num_examples, metrics = self.evaluate_models(models)
            if asked.mean_dual is not None and self.knows_loss:
                names = self._clustered(asked.clustered)
                dual = _flat(to_tensors(asked.mean_dual, self.device))
                gradient = self._gradient(asked.personal, names)
                metrics["stationarity"] = float(torch.linalg.vector_norm(gradient + dual))
                gradient = self._gradient(asked.cluster, names)
                metrics["cluster-gradient-norm"] = float(torch.linalg.vector_norm(gradient))
        return loss, num_examples, metrics

    def forge(
        self, upload: Arrays, asked: FPFCInstruction, attack: Callable[[Arrays], Arrays]
    ) -> Arrays:
        """Attack omega_i: the clustered block, as the paper does (section 6.4.1)."""
        return upload | attack({name: upload[name] for name in asked.clustered})

    def _clustered(self, names: list[str]) -> list[str]:
        """Return the names of the clustered block; it must be made of trainable parameters."""
        return self.trainable(names, setting="FPFC(clustered=...)")

    def _gradient(self, model: Arrays, names: list[str]) -> Tensor:
        """Return grad f_i over the clustered block at a model, flat, on the training data."""
        self.load(model)
        self.model.eval()
        self.train_problem.set_gradient()
        gradient = _flat(self.model_arrays.gradients(names))
        self.model.zero_grad()
        return gradient


def _flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
