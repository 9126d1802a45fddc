"""The client of FLAME; the strategy and the paper are in `fl_admm_strategies.FLAME`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fl_admm_strategies import FLAME
from fl_admm_strategies.algorithms.flame import LOCAL_W, THETA, FLAMEEvaluation, FLAMEInstruction
from fl_admm_strategies.maths.blocks import Arrays, prefixed, under
from fl_admm_strategies.maths.moreau import joint_weight

from ..toolkit.data.batches import Loader
from ..toolkit.round.torch_client import BUFFERS, TorchClient, read_only, to_tensors
from ..toolkit.solving.objective import LocalObjective, ProximalTerm
from ..toolkit.solving.solvers import descend_until
from ..toolkit.solving.steps import Evaluation, MethodSteps, Minimisation, Scalars, Steps

Prox = Callable[[Mapping[str, Tensor], float], Mapping[str, Tensor]]


class FLAMEClient(TorchClient[FLAMEInstruction]):
    """Client of `FLAME`: trains its personal model theta_i, pulled towards its copy of the global.

    Parameters are those of `TorchClient`, and:

    Parameters
    ----------
    validation_loader : iterable of batches, optional
        Validation data, part neither of the training nor of the test data. With it `evaluate`
        reports the hybrid model ``hm-val`` as well.
    prox : callable, optional
        ``prox(anchor, lam)`` returns argmin f_i(theta) + lam/2 ||theta - anchor||^2 (11) as tensors
        by parameter name, as `anchor` is; anchor and weight are those of `FLAME(anchor_on=...)`.
        For ``FLAME(theta_step="exact")``.
    """

    strategy = FLAME
    instruction = FLAMEInstruction

    def __init__(
        self,
        *args: Any,
        validation_loader: Loader | None = None,
        prox: Prox | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.prox = prox
        self.validation_problem = (
            None
            if validation_loader is None
            else replace(self.train_problem, loader=validation_loader)
        )

    def steps(self, asked: FLAMEInstruction, config: Scalars) -> MethodSteps:
        """Move theta_i from w or from where it was, then w_i where the client keeps it.

        Uploads theta_i or, with the duals on the clients, the change of its message.
        Metrics: ``loss``, the training loss before the last step (GD), over the last epoch (SGD),
        or at theta_i (accuracy-tested and exact steps). Of accuracy-tested steps also ``residual``,
        the left side of (17), ``tolerance``, epsilon_i, and ``steps``.
        """
        names = self.trainable(asked.optimised, setting="FLAME(averaged=...)")
        received = {name: asked.anchor[name] for name in names}
        theta, local_w, dual, buffers = self._held(asked, received, config)
        self.load(asked.anchor | buffers)
        if asked.start_at == "own":  # else it has just been loaded
            self.load_block(theta)
        anchor, weight = received, asked.lam
        if asked.anchor_on == "joint":
            anchor = {}
            for name in names:  # w - pi_i/rho
                room = np.empty_like(dual[name])
                anchor[name] = np.divide(dual[name], -asked.rho, out=room)
                anchor[name] += received[name]
            weight = joint_weight(asked.lam, asked.alpha, asked.rho)
        elif asked.anchor_on == "w_i" and asked.duals == "client":
            anchor = local_w
        metrics = yield from self._theta_step(asked, anchor, weight)
        del anchor
        upload = self.arrays()
        new = {name: upload[name] for name in names}
        kept = prefixed(BUFFERS, self.buffers())
        if asked.duals == "client" or asked.anchor_on == "joint":
            before = local_w
            local_w = asked.moved(new, dual)
        if asked.duals == "client":
            change = asked.change_of(new, local_w, dual, before)
            sent = asked.averaged
            whole = {name: array for name, array in upload.items() if name in sent} | change
            upload, share = self.clipped(whole, sent, config)
            if share < 1:
                back = (1 - share) / asked.slope
                new = {name: array - back * change[name] for name, array in new.items()}
                local_w = asked.moved(new, dual)
                change = asked.change_of(new, local_w, dual, before)
            whole, held_back = self.whole_change(
                {name: upload[name] for name in change}, config, first=asked.begins
            )
            upload |= whole
            kept |= held_back
        if asked.duals == "client" or asked.anchor_on == "joint":
            kept |= prefixed(LOCAL_W, local_w)
        kept |= prefixed(THETA, new)
        self.memory.keep(config, kept, resent=asked.duals == "strategy")
        return upload, metrics

    def _held(
        self, asked: FLAMEInstruction, received: Arrays, config: Scalars
    ) -> tuple[Arrays, Arrays, Arrays, Arrays]:
        """Return theta_i, w_i, pi_i and, where the client keeps them, its model's buffers."""
        if not asked.begins:
            held = self.memory.require(config)
            theta, local_w, buffers = (under(part, held) for part in (THETA, LOCAL_W, BUFFERS))
            dual = asked.dual_of(theta, local_w)
            return theta, local_w, dual, buffers if asked.duals == "client" else {}
        theta = received if asked.start is None else asked.start  # w where nobody needs theta_i
        zero = {name: np.zeros_like(array) for name, array in theta.items()}
        # A client that keeps w_i only ever starts with pi_i = 0, where w_i is theta_i.
        return theta, theta, asked.dual or zero, {}

    def _theta_step(self, asked: FLAMEInstruction, anchor: Arrays, weight: float) -> Steps[Scalars]:
        """Minimise f_i(theta) + weight/2 ||theta - anchor||^2 (11) as the server asks."""
        tensors = to_tensors if asked.theta_step == "exact" else read_only
        term = ProximalTerm(weight, tensors(anchor, self.device))
        if asked.theta_step == "fixed":
            objective = LocalObjective([term])
            found: Scalars = yield Minimisation(objective, asked.lr, asked.local_epochs)
            return found
        self.refuse_own_steps(
            f"the server asks for theta_step={asked.theta_step!r}, which takes no other steps than "
            "its own",
            "use FLAME(theta_step='fixed')",
        )
        if asked.theta_step == "accuracy":
            metrics = descend_until(
                self.train_problem,
                LocalObjective([term]),
                tolerance=asked.tolerance,
                lr=asked.lr,
                max_steps=asked.max_steps,
                loss_weight=asked.alpha,
            )
            return metrics | {"tolerance": asked.tolerance}
        if self.prox is None:
            raise ValueError(
                "The server asks for theta_step='exact', but this client has no solver for it. "
                "Give FLAMEClient(prox=...), or use theta_step='accuracy'."
            )
        self.load_block(self.prox(term.anchor, weight))
        return {"loss": self.measure(self.train_problem)["loss"]}

    # ------------------------------------------------------------------------------------------
    # Personal, global and hybrid model
    # ------------------------------------------------------------------------------------------

    def test(self, parameters: list[NDArray[Any]], config: Scalars) -> Steps[Evaluation]:
        """Evaluate the personal, the global and the hybrid model on the test data.

        Hybrid is the better of the two (section IV-D): that of the higher ``accuracy``, where the
        client measures one, and of the lower loss where it does not or they are equal. The paper
        does not say better on which data (docs/methods/flame-notes.md, P7), so there are two, and
        the second is only to stand beside the paper's tables.

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
        asked = FLAMEEvaluation.decode(parameters, config)
        personal = asked.personal
        if personal is None:  # theta_i never left the client
            theta = asked.start or self._kept_model(self.memory.require(config))
            personal = asked.global_ | theta
        models = {"personal": personal, "global": asked.global_}
        loss, num_examples, report = yield from self.evaluate_models(models)
        tested = {kind: _of_kind(report, kind) for kind in models}
        report |= _hybrid("hm-oracle", tested, tested)
        if self.validation_problem is not None:
            report |= _hybrid("hm-val", self._validate(models), tested)
        return loss, num_examples, report

    def _validate(self, models: Mapping[str, Arrays]) -> dict[str, dict[str, float]]:
        assert self.validation_problem is not None
        if self.validation_problem.num_examples() == 0:
            raise ValueError(
                "The client's validation_loader is empty, so it cannot choose its hybrid model. "
                "Give it data, or leave it out; then there is no 'hm-val'."
            )
        scores = {}
        for kind, arrays in models.items():
            self.load(arrays)
            scores[kind] = self.measure(self.validation_problem)
        return scores

    def personal_arrays(self) -> Arrays:
        """Return theta_i, the client's personal model after its last training: a ``state_dict``.

        Raises
        ------
        RuntimeError
            If it has not been trained yet.
        """
        return self.model_arrays.complete(self._kept_model(self.memory.latest()))

    @staticmethod
    def _kept_model(held: Arrays) -> Arrays:
        return under(BUFFERS, held) | under(THETA, held)


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
