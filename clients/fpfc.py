"""The client's half of FPFC.

Yu, Liu, Wang, Sun, "Clustered Federated Learning based on Nonconvex Pairwise Fusion",
arXiv:2211.04218v3: step 3 of Algorithm 2, equation (5). The server's half is
`fl_admm_strategies.FPFC`.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_admm_strategies.wire import split_groups

from .solvers import ProximalTerm, gradient_descent
from .torch_client import Scalars, TorchClient, to_numpy, to_tensors


class FPFCClient(TorchClient):
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

    def fit(
        self, parameters: list[NDArray[Any]], config: Scalars
    ) -> tuple[list[NDArray[Any]], int, Scalars]:
        """Run (5): omega <- omega - alpha [grad f_i(omega) + rho (omega - zeta_i)], T_i epochs.

        Returns
        -------
        parameters : list of ndarray
            omega_i and the trained shared arrays, in the order of the model.
        num_examples : int
            n_i.
        metrics : dict
            ``loss``: the training loss before the last step (GD) or over the last epoch (SGD).

        Raises
        ------
        ValueError
            If there is nothing to train on, the message does not fit the model, or the client does
            not hold the iterate that the server takes for its own.
        """
        num_examples = self.train_size()
        groups = split_groups(parameters, config)
        self.load(groups["anchor"])
        names = self._clustered(config)
        anchor = self.block(names)
        self.load_block(self._start(names, groups.get("start"), config))
        with self.seeded(config):
            loss = gradient_descent(
                self.train_problem,
                [ProximalTerm(float(config["rho"]), anchor)],
                lr=float(config["lr"]),
                epochs=int(config["local-epochs"]),
                full_batch=self.full_batch,
                optimizer_fn=self.optimizer_fn,
            )
        self.memory.keep(config, to_numpy(self.block(names)))
        return self.get_parameters({}), num_examples, {"loss": loss}

    def evaluate(
        self, parameters: list[NDArray[Any]], config: Scalars
    ) -> tuple[float, int, Scalars]:
        """Evaluate the personal, cluster and global model; add the diagnostics the server asks for.

        Returns
        -------
        loss, num_examples, metrics
            As `TorchClient.evaluate`. Where the message carries (1/m) sum_j v_ij: also
            ``stationarity``, ||grad f_i(omega_i) + (1/m) sum_j v_ij|| (KKT, (11)), and
            ``cluster-gradient-norm``, ||grad f_i(alpha_l)||, both over the clustered block and the
            training data.
        """
        groups = split_groups(parameters, config)
        mean_dual = groups.pop("mean-dual", None)
        with self.seeded(config):
            loss, num_examples, metrics = self.evaluate_models(groups)
            if mean_dual is not None:
                names = self._clustered(config)
                dual = _flat(to_tensors(names, mean_dual, self.device))
                gradient = self._gradient(groups["personal"], names)
                metrics["stationarity"] = float(torch.linalg.vector_norm(gradient + dual))
                gradient = self._gradient(groups["cluster"], names)
                metrics["cluster-gradient-norm"] = float(torch.linalg.vector_norm(gradient))
        return loss, num_examples, metrics

    def _clustered(self, config: Scalars) -> list[str]:
        """Return the names of the clustered block; it must be made of trainable parameters."""
        return self.trainable(str(config["clustered"]).split(","), setting="FPFC(clustered=...)")

    def _start(
        self, names: list[str], received: list[NDArray[Any]] | None, config: Scalars
    ) -> dict[str, Tensor]:
        """Return omega_i: what the server sent along, else the client's own last iterate."""
        if received is not None:
            return to_tensors(names, received, self.device)
        own = self.memory.require(config)
        return to_tensors(names, [own[name] for name in names], self.device)

    def _gradient(self, model: list[NDArray[Any]], names: list[str]) -> Tensor:
        """Return grad f_i over the clustered block at a model, flat, on the training data."""
        self.load(model)
        self.model.eval()
        self.train_problem.set_gradient()
        parameters = dict(self.model.named_parameters())
        gradient = _flat(
            {
                name: torch.zeros_like(parameters[name])
                if (grad := parameters[name].grad) is None
                else grad
                for name in names
            }
        )
        self.model.zero_grad()
        return gradient


def _flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
