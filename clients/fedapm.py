"""The client's half of FedAPM.

Zhu, Nie, Zeng, Wang, Sun, Yao, Chen, Xu, Yang, "FedAPM: Federated Learning via ADMM with Partial
Model Personalization", KDD 2025: Algorithm 1, equations (9) to (13). The server's half is
`fl_admm_strategies.FedAPM`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fl_admm_strategies.wire import split_groups

from .fedadmm import FedADMMClient
from .solvers import ProximalTerm, descend_until, gradient_descent
from .torch_client import Scalars

V, U, XI = "v/", "u/", "xi"  # how v_i, u_i and xi_i are called in the client's memory


class FedAPMClient(FedADMMClient):
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

    def minimise(
        self, anchor: dict[str, Tensor], config: Scalars
    ) -> tuple[Scalars, dict[str, NDArray[Any]]]:
        """Run the v-step at the old u_i, then the u-step at the new v_i (Gauss-Seidel).

        v <- v - eta [alpha_i grad_v f_i(v, u_i) + sigma (v - v_i)], E_v epochs. (9) prints f_i
        without its alpha_i; (15) and all proofs have it (specs 6.1, 1).

        The u-step is FedADMM's, or full-gradient steps until the accuracy test (16) holds for
        xi_i^{t+1} = mu xi_i^t. Then the metrics have ``residual``, its left side, and ``steps``.
        """
        personal = [
            name
            for name, p in self.model.named_parameters()
            if p.requires_grad and _is_personal(name, config)
        ]
        weight, lr = float(config["loss-weight"]), float(config["lr"])
        if personal:
            gradient_descent(
                self.train_problem,
                [ProximalTerm(float(config["sigma"]), self.block(personal))],
                lr=lr,
                epochs=int(config["personal-epochs"]),
                full_batch=self.full_batch,
                optimizer_fn=self.optimizer_fn,
                loss_weight=weight,
                moving=personal,
            )
        kept: dict[str, NDArray[Any]] = {}
        if "tolerance" in config:
            own = self.memory.recall(config)
            before = config["tolerance"] if own is None or XI not in own else own[XI]
            xi = float(config["tolerance-decay"]) * float(before)
            descent = descend_until(
                self.train_problem,
                [ProximalTerm(float(config["rho"]), anchor)],
                tolerance=xi,
                lr=lr,
                max_steps=int(config["max-steps"]),
                loss_weight=weight,
                moving=anchor,
            )
            kept[XI] = np.array(xi)
            metrics = {"loss": descent.loss, "residual": descent.residual, "steps": descent.steps}
        else:
            metrics, _ = super().minimise(anchor, config)
        # Not before: the u-step moves the running statistics of a personal batch norm.
        kept |= {f"{V}{name}": array for name, array in self._own(config).items()}
        return metrics, kept

    def evaluate(
        self, parameters: list[NDArray[Any]], config: Scalars
    ) -> tuple[float, int, Scalars]:
        """Evaluate the client's own (v_i, u_i), the headline, and (v_i, w) (specs 6.3, 37).

        v_i and u_i are those of its last training that the server accepted, before the first the
        initial ones; arrays that are averaged are the server's in both.
        """
        groups = split_groups(parameters, config)
        self.receive(groups["global"], config)
        shared = self.get_parameters({})
        names = str(config["shared"]).split(",")
        u, _ = self._held(names, groups.get("start"), config)
        self.load_block(u)
        with self.seeded(config):
            return self.evaluate_models({"personal": self.get_parameters({}), "global": shared})

    def receive(self, arrays: list[NDArray[Any]], config: Scalars) -> None:
        """Load the shared arrays of a message, and the client's own v_i, into the model."""
        state = self._state()
        shared = [name for name in state if not _is_personal(name, config)]
        if len(arrays) != len(shared):
            raise ValueError(
                f"The server shares {len(arrays)} arrays, but personal={config.get('personal')!r} "
                f"leaves {len(shared)} of the client's model to share ({', '.join(shared)}). "
                "Models may differ in their personal arrays only."
            )
        state |= self._recall_personal(config)
        state |= dict(zip(shared, arrays, strict=True))
        self.load(list(state.values()))

    def upload(self, config: Scalars) -> list[NDArray[Any]]:
        """Return the shared arrays only."""
        return [array for name, array in self._state().items() if not _is_personal(name, config)]

    def _recall_personal(self, config: Scalars) -> dict[str, NDArray[Any]]:
        """Return v_i as it was in the round that the server takes the client to be in."""
        model = self._own(config)
        held = self.memory.recall(config)
        if held is None:
            if int(config["version"]) > 0:
                raise self.memory.lost(config)
            return model
        own = {name.removeprefix(V): a for name, a in held.items() if name.startswith(V)}
        shapes, new = ({name: a.shape for name, a in d.items()} for d in (own, model))
        if shapes != new:
            raise ValueError(
                f"The personal arrays of round {config['version']} were {shapes}, the client's "
                f"model has {new} now. client_fn must build the same model in every round."
            )
        return own

    def _own(self, config: Scalars) -> dict[str, NDArray[Any]]:
        """Return the personal arrays of the model, buffers among them."""
        return {name: a for name, a in self._state().items() if _is_personal(name, config)}

    def _state(self) -> dict[str, NDArray[Any]]:
        return dict(zip(self.model.state_dict(), self.get_parameters({}), strict=True))

    def personal_arrays(self) -> dict[str, NDArray[Any]]:
        """Return v_i and u_i, the client's own model after its last training, by name.

        Raises
        ------
        RuntimeError
            If it has not been trained yet.
        """
        latest = self.memory.latest()
        return {
            name.removeprefix(kind): array
            for kind in (V, U)
            for name, array in latest.items()
            if name.startswith(kind)
        }


def _is_personal(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether the strategy's pattern, absent where nothing is personal, is in a name."""
    return "personal" in config and re.search(str(config["personal"]), name) is not None
