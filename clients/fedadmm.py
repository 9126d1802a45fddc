"""The client's half of FedADMM.

Zhou, Li, "Federated Learning via Inexact ADMM", TPAMI 2023, in the form of FedAPM's Algorithm 1
without personal parameters. The server's half is `fl_admm_strategies.FedADMM`.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_admm_strategies.wire import split_groups

from .solvers import ProximalTerm, gradient_descent
from .torch_client import Scalars, TorchClient, to_numpy, to_tensors


class FedADMMClient(TorchClient):
    """Client of `FedADMM`: E epochs on its loss, pulled towards the anchor, from its own copy u_i.

    Parameters are those of `TorchClient`.
    """

    def fit(
        self, parameters: list[NDArray[Any]], config: Scalars
    ) -> tuple[list[NDArray[Any]], int, Scalars]:
        """Move u_i, and pi_i where the client keeps it, by one round.

        Returns
        -------
        parameters : list of ndarray
            u_i, in the order of the model; with ``duals`` "client" the change of
            z_i = u_i + pi_i/rho in its place.
        num_examples : int
            n_i.
        metrics : dict
            ``loss``: the training loss before the last step (GD) or over the last epoch (SGD).

        Raises
        ------
        ValueError
            If there is nothing to train on, the message does not fit the model, or the client does
            not hold the variables that the server takes for its own.
        """
        if config.get("handshake"):
            return self.shake_hands()
        num_examples = self.train_size()
        groups = split_groups(parameters, config)
        self.receive(groups["center"], config)
        names = self.trainable(str(config["shared"]).split(","), setting="FedADMM(averaged=...)")
        center = self.block(names)
        u, dual = self._held(names, groups.get("start"), config)
        rho = float(config["rho"])
        anchor = {name: center[name] - dual[name] / rho for name in names} if dual else center
        self.load_block(center if config.get("start") == "center" else u)
        with self.seeded(config):
            metrics, kept = self.minimise(anchor, config)
        new = self.block(names)
        kept |= to_numpy(new, "u/")
        if dual:
            dual = {name: dual[name] + rho * (new[name] - center[name]) for name in names}  # (12)
            kept |= to_numpy(dual, "dual/")
            # The model to upload becomes z_i - z_i of before = (u - u before) + (u - w).
            self.load_block({n: (new[n] - u[n]) + (new[n] - center[n]) for n in names})
        self.memory.keep(config, kept)
        return self.upload(config), num_examples, metrics

    def minimise(
        self, anchor: dict[str, Tensor], config: Scalars
    ) -> tuple[Scalars, dict[str, NDArray[Any]]]:
        """Run u <- u - eta [alpha_i grad f_i(u) + rho (u - anchor)], E epochs.

        With the anchor w - pi_i/rho the last term is FedAPM's pi_i + rho (u - w) of (11).

        Returns
        -------
        metrics : dict
            What the client reports.
        kept : dict of str to ndarray
            What it keeps beside u_i and pi_i.
        """
        loss = gradient_descent(
            self.train_problem,
            [ProximalTerm(float(config["rho"]), anchor)],
            lr=float(config["lr"]),
            epochs=int(config["local-epochs"]),
            full_batch=self.full_batch,
            optimizer_fn=self.optimizer_fn,
            loss_weight=float(config["loss-weight"]),
            moving=anchor,
        )
        return {"loss": loss}, {}

    def receive(self, arrays: list[NDArray[Any]], config: Scalars) -> None:
        """Load the arrays of a message into the model."""
        self.load(arrays)

    def upload(self, config: Scalars) -> list[NDArray[Any]]:
        """Return the model's arrays that the server wants."""
        return self.get_parameters({})

    def _held(
        self, names: list[str], start: list[NDArray[Any]] | None, config: Scalars
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return u_i and, where the client keeps it, pi_i."""
        if start is not None:
            u = to_tensors(names, start, self.device)
            dual = {name: torch.zeros_like(u[name]) for name in names}
        else:
            own = self.memory.require(config)
            u, dual = (
                to_tensors(names, [own[f"{kind}/{name}"] for name in names], self.device)
                if f"{kind}/{names[0]}" in own
                else {}
                for kind in ("u", "dual")
            )
        return u, dual if config["duals"] == "client" else {}

    def personal_arrays(self) -> dict[str, NDArray[Any]]:
        """Return u_i, the client's own copy of the shared arrays after its last training.

        Raises
        ------
        RuntimeError
            If it has not been trained yet.
        """
        latest = self.memory.latest()
        return {k.removeprefix("u/"): v for k, v in latest.items() if k.startswith("u/")}
