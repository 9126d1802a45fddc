"""The client's half of FLAME.

Zhu, Zeng, Wang, Sun, Li, Yao, Peng, "On ADMM in Heterogeneous Federated Learning: Personalization,
Robustness, and Fairness", arXiv:2407.16397: Algorithm 1, equations (11) to (14), (17). The server's
half is `fl_admm_strategies.FLAME`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from fl_admm_strategies.flame import advance
from fl_admm_strategies.wire import Arrays, split_groups

from .solvers import Loader, LocalProblem, ProximalTerm, descend_until, gradient_descent
from .torch_client import Scalars, TorchClient, to_numpy, to_tensors

Prox = Callable[[Mapping[str, Tensor], float], Mapping[str, Tensor]]


class FLAMEClient(TorchClient):
    """Client of `FLAME`: trains its personal model theta_i, pulled towards its copy of the global.

    Parameters are those of `TorchClient`, and:

    Parameters
    ----------
    validation_loader : iterable of batches, optional
        Validation data, part neither of the training nor of the test data. With it `evaluate`
        reports the hybrid model ``hm-val`` as well.
    prox : callable, optional
        ``prox(anchor, lam)`` returns argmin f_i(theta) + lam/2 ||theta - anchor||^2 (11) as tensors
        by parameter name, as `anchor` is. For ``FLAME(theta_step="exact")``.
    """

    def __init__(
        self,
        *args: Any,
        validation_loader: Loader | None = None,
        prox: Prox | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.prox = prox
        problem = self.train_problem
        self.validation_problem = (
            None
            if validation_loader is None
            else LocalProblem(
                self.model, validation_loader, problem.loss_fn, problem.split_batch, self.device
            )
        )

    def fit(
        self, parameters: list[NDArray[Any]], config: Scalars
    ) -> tuple[list[NDArray[Any]], int, Scalars]:
        """Move theta_i from where it was, then the variables that the client keeps.

        Returns
        -------
        parameters : list of ndarray
            theta_i, in the order of the model; with ``duals`` "client" the change of
            u_i = w_i + pi_i/rho in its place.
        num_examples : int
            n_i.
        metrics : dict
            ``loss``: the training loss before the last step (GD), over the last epoch (SGD), or at
            theta_i (accuracy-tested and exact steps). Of accuracy-tested steps also ``residual``,
            the left side of (17), ``tolerance``, epsilon_i, and ``steps``.
        """
        if config.get("handshake"):
            return self.shake_hands()
        num_examples = self.train_size()
        groups = split_groups(parameters, config)
        self.load(groups["center"])
        names = self.trainable(str(config["shared"]).split(","), setting="FLAME(averaged=...)")
        center = to_numpy(self.block(names))
        theta, copy = self._held(names, groups.get("start"), config)
        anchor = copy if copy and config["anchor"] == "w_i" else center
        self.load_block(to_tensors(names, [theta[name] for name in names], self.device))
        with self.seeded(config):
            metrics = self._theta_step(names, anchor, config)
        new = to_numpy(self.block(names))
        upload = dict(zip(self.model.state_dict(), self.get_parameters({}), strict=True))
        kept = {f"theta/{name}": new[name] for name in names}
        if copy:
            rho = float(config["rho"])
            a = float(config["lam"]) * float(config["alpha"])
            for name in names:
                kept[f"w_i/{name}"], upload[name] = advance(
                    new[name], theta[name], copy[name], center[name], a=a, rho=rho
                )
        self.memory.keep(config, kept)
        return list(upload.values()), num_examples, metrics

    def _held(
        self, names: Sequence[str], start: Sequence[NDArray[Any]] | None, config: Scalars
    ) -> tuple[Arrays, Arrays]:
        """Return theta_i and, where the client keeps it, w_i."""
        if start is not None:  # w_i^0 = theta_i^0
            theta = copy = dict(zip(names, start, strict=True))
        else:
            own = self.memory.require(config)
            theta = {name: own[f"theta/{name}"] for name in names}
            copy = {name: own[f"w_i/{name}"] for name in names if f"w_i/{name}" in own}
        return theta, copy if config["duals"] == "client" else {}

    def _theta_step(self, names: Sequence[str], anchor: Arrays, config: Scalars) -> Scalars:
        """Minimise f_i(theta) + lambda/2 ||theta - anchor||^2 (11) as the server asks."""
        lam, lr = float(config["lam"]), float(config["lr"])
        target = to_tensors(names, [anchor[name] for name in names], self.device)
        term = ProximalTerm(lam, target)
        if config["theta-step"] == "fixed":
            loss = gradient_descent(
                self.train_problem,
                [term],
                lr=lr,
                epochs=int(config["local-epochs"]),
                full_batch=self.full_batch,
                optimizer_fn=self.optimizer_fn,
            )
            return {"loss": loss}
        if config["theta-step"] == "accuracy":
            # (17) tests alpha_i times the gradient that the steps are taken with.
            scale, tolerance = float(config["alpha"]) ** 2, float(config["tolerance"])
            descent = descend_until(
                self.train_problem,
                [term],
                tolerance=tolerance / scale,
                lr=lr,
                max_steps=int(config["max-steps"]),
            )
            return {
                "loss": descent.loss,
                "residual": descent.residual * scale,
                "tolerance": tolerance,
                "steps": descent.steps,
            }
        if self.prox is None:
            raise ValueError(
                "The server asks for theta_step='exact', but this client has no solver for it. "
                "Give FLAMEClient(prox=...), or use theta_step='accuracy'."
            )
        self.load_block(self.prox(target, lam))
        return {"loss": self._test_metrics(self.train_problem)["loss"]}

    # ------------------------------------------------------------------------------------------
    # Personal, global and hybrid model
    # ------------------------------------------------------------------------------------------

    def evaluate(
        self, parameters: list[NDArray[Any]], config: Scalars
    ) -> tuple[float, int, Scalars]:
        """Evaluate the personal, the global and the hybrid model on the test data.

        Hybrid is the better of the two (section IV-D): that of the higher ``accuracy``, where the
        client measures one, and of the lower loss where it does not or they are equal. The paper
        does not say better on which data (specs 6.10), so there are two, and the second is only to
        stand beside the paper's tables.

        Returns
        -------
        loss : float
            Test loss of the personal model.
        num_examples : int
        metrics : dict
            ``KIND-loss`` and ``KIND-METRIC`` for KIND ``personal``, ``global``, ``hm-val`` (chosen
            on the validation data, where the client has some) and ``hm-oracle`` (chosen on the test
            data themselves); ``hm-val-personal`` is 1 where the choice fell on the personal model.
        """
        groups = split_groups(parameters, config)
        if "personal" not in groups:  # theta_i never left the client
            groups["personal"] = self._own_model(groups, config)
        models = {kind: groups[kind] for kind in ("personal", "global")}
        with self.seeded(config):
            loss, num_examples, report = self.evaluate_models(models)
            tested = {kind: _of_kind(report, kind) for kind in models}
            report |= _hybrid("hm-oracle", tested, tested)
            if self.validation_problem is not None:
                report |= _hybrid("hm-val", self._validate(models), tested)
        return loss, num_examples, report

    def _own_model(
        self, groups: Mapping[str, list[NDArray[Any]]], config: Scalars
    ) -> list[NDArray[Any]]:
        """Return theta_i in a whole model, with the averaged arrays of the global one."""
        names = str(config["shared"]).split(",")
        if "start" in groups:
            theta = dict(zip(names, groups["start"], strict=True))
        else:
            own = self.memory.require(config)
            theta = {name: own[f"theta/{name}"] for name in names}
        return [
            theta.get(name, array)
            for name, array in zip(self.model.state_dict(), groups["global"], strict=True)
        ]

    def _validate(
        self, models: Mapping[str, Sequence[NDArray[Any]]]
    ) -> dict[str, dict[str, float]]:
        assert self.validation_problem is not None
        if self.validation_problem.num_examples() == 0:
            raise ValueError(
                "The client's validation_loader is empty, so it cannot choose its hybrid model. "
                "Give it data, or leave it out; then there is no 'hm-val'."
            )
        scores = {}
        for kind, arrays in models.items():
            self.load(arrays)
            scores[kind] = self._test_metrics(self.validation_problem)
        return scores

    def personal_arrays(self) -> dict[str, NDArray[Any]]:
        """Return theta_i, the client's personal model after its last training.

        Raises
        ------
        RuntimeError
            If it has not been trained yet.
        """
        latest = self.memory.latest()
        return {k.removeprefix("theta/"): v for k, v in latest.items() if k.startswith("theta/")}


def _of_kind(report: Scalars, kind: str) -> dict[str, float]:
    prefix = f"{kind}-"
    return {k.removeprefix(prefix): v for k, v in report.items() if k.startswith(prefix)}


def _hybrid(
    kind: str, scores: Mapping[str, Mapping[str, float]], tested: Mapping[str, Mapping[str, float]]
) -> Scalars:
    """Return the test metrics of the model that the scores prefer."""

    def merit(model: str) -> tuple[float, float]:
        return scores[model].get("accuracy", 0.0), -scores[model]["loss"]

    chosen = max(tested, key=merit)
    return {
        **{f"{kind}-{name}": value for name, value in tested[chosen].items()},
        f"{kind}-personal": float(chosen == "personal"),
    }
