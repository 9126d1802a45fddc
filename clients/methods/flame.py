"""The client of FLAME; the strategy and the paper are in `fl_admm_strategies.FLAME`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from fl_admm_strategies import FLAME
from fl_admm_strategies.maths.blocks import Arrays

from ..toolkit.data.batches import Loader
from ..toolkit.round.proximal import ProximalClient
from ..toolkit.solving.steps import Evaluation, Scalars, Steps


class FLAMEClient(ProximalClient):
    """Client of `FLAME`: trains its personal model theta_i, pulled towards the global one.

    Parameters are those of `TorchClient`, and:

    Parameters
    ----------
    validation_loader : iterable of batches, optional
        Validation data, part neither of the training nor of the test data. With it `evaluate`
        reports the hybrid model ``hm-val`` as well.
    """

    strategy = FLAME

    def __init__(
        self, *args: Any, validation_loader: Loader | None = None, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.validation_loader = validation_loader

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
        models = self.models(parameters, config)
        if "personal" not in models:  # theta_i never left the client
            kept = self.memory.require_known(config)
            own = {} if kept is None else self.own_model(kept)
            models = {"personal": models["global"] | own} | models
        loss, num_examples, report = yield from self.evaluate_models(models)
        tested = {kind: _of_kind(report, kind) for kind in models}
        report |= _hybrid("hm-oracle", tested, tested)
        if self.validation_loader is not None:
            report |= _hybrid("hm-val", self._validate(models, self.validation_loader), tested)
        return loss, num_examples, report

    def _validate(self, models: Mapping[str, Arrays], loader: Loader) -> dict[str, Scalars]:
        problem, scores = replace(self.train_problem, loader=loader), {}
        if problem.num_examples() == 0:
            raise ValueError("The client's validation_loader is empty. Give it data, or no loader.")
        for kind, arrays in models.items():
            self.load(arrays)
            scores[kind] = self.measure(problem)
        return scores


def _of_kind(report: Scalars, kind: str) -> Scalars:
    prefix = f"{kind}-"
    return {k.removeprefix(prefix): v for k, v in report.items() if k.startswith(prefix)}


def _hybrid(kind: str, scores: Mapping[str, Scalars], tested: Mapping[str, Scalars]) -> Scalars:
    """Return the test metrics of the model that the scores prefer."""

    def merit(model: str) -> tuple[float, float]:
        return scores[model].get("accuracy", 0.0), -scores[model]["loss"]

    chosen = max(tested, key=merit)
    report = {f"{kind}-{name}": value for name, value in tested[chosen].items()}
    return report | {f"{kind}-personal": float(chosen == "personal")}
