"""The client's half of Lp-Proj-2 by ADMM.

Zhu, Zeng, Wang, Sun, Li, Yao, Peng, "On ADMM in Heterogeneous Federated Learning: Personalization,
Robustness, and Fairness", arXiv:2407.16397, appendix C: Algorithm 2, equation (185). The server's
half is `fl_admm_strategies.LpProjADMM`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl_admm_strategies.lp_proj import projection
from fl_admm_strategies.wire import split_groups

from .solvers import ProjectedTerm, gradient_descent
from .torch_client import Scalars, TorchClient


class LpProjADMMClient(TorchClient):
    """Client of `LpProjADMM`: H epochs on its loss, its projected model pulled towards w_i.

    Parameters are those of `TorchClient`.
    """

    def fit(
        self, parameters: list[NDArray[Any]], config: Scalars
    ) -> tuple[list[NDArray[Any]], int, Scalars]:
        """Run theta <- theta - eta [grad f_i(theta) + lambda P^T (P theta - w_i)] (185).

        Returns
        -------
        parameters : list of ndarray
            P theta_i.
        num_examples : int
            n_i.
        metrics : dict
            ``loss``: the training loss before the last step (GD) or over the last epoch (SGD).
        """
        if config.get("handshake"):
            return self.shake_hands()
        num_examples = self.train_size()
        groups = split_groups(parameters, config)
        self.load(groups["start"] if "start" in groups else self._own(config))
        names = self.trainable(
            str(config["projected"]).split(","), setting="LpProjADMM(unprojected=...)"
        )
        term = self._term(names, groups["center"][0], config)
        with self.seeded(config):
            loss = gradient_descent(
                self.train_problem,
                [term],
                lr=float(config["lr"]),
                epochs=int(config["local-epochs"]),
                full_batch=self.full_batch,
                optimizer_fn=self.optimizer_fn,
            )
        model = dict(zip(self.model.state_dict(), self.get_parameters({}), strict=True))
        self.memory.keep(config, model)
        return [term.image(self.block(names)).cpu().numpy()], num_examples, {"loss": loss}

    def _term(self, names: Sequence[str], w_i: NDArray[Any], config: Scalars) -> ProjectedTerm:
        size = sum(tensor.numel() for tensor in self.block(names).values())
        seed = int(config["projection-seed"])
        matrix = torch.from_numpy(projection(seed, len(w_i), size, w_i.dtype.name).copy())
        target = torch.from_numpy(np.array(w_i))
        weight = float(config["lam"])
        return ProjectedTerm(weight, matrix.to(self.device), target.to(self.device), names)

    def _own(self, config: Scalars) -> list[NDArray[Any]]:
        own = self.memory.require(config)
        return [own[name] for name in self.model.state_dict()]

    def evaluate(
        self, parameters: list[NDArray[Any]], config: Scalars
    ) -> tuple[float, int, Scalars]:
        """Evaluate the client's own model on the test data; there is no other.

        Returns
        -------
        loss : float
        num_examples : int
        metrics : dict
            ``personal-loss`` and ``personal-METRIC``.
        """
        model = split_groups(parameters, config)["personal"] or self._own(config)
        with self.seeded(config):
            return self.evaluate_models({"personal": model})

    def personal_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the client's model after its last training.

        Raises
        ------
        RuntimeError
            If it has not been trained yet.
        """
        return self.memory.latest()
