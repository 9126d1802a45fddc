"""A PyTorch model that learns from samples."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor

from clients import Minibatches, accuracy, rmse
from clients.toolkit.round.torch_client import MetricFn

from ..attacks import LABELS
from ..data import ClientData, FederatedData
from ..settings.imported import is_import
from ..settings.section import Section
from ..settings.tables import Settings
from .base import Problem
from .models import Scheme, build, build_own, initialise, loss_of
from .scores import METRICS, Metric


def weighted_f1(outputs: Tensor, targets: Tensor) -> float:
    """Return the F1 score of each class, averaged with the class's share of the samples as weight.

    A class that the samples lack has no weight, whether the model predicts it or not; one that the
    model never predicts scores 0.

    Parameters
    ----------
    outputs : Tensor, shape (n, C)
        Logits or scores; the largest is the prediction.
    targets : Tensor of int64, shape (n,)
        Classes.
    """
    from sklearn.metrics import f1_score  # here: takes seconds

    predicted = outputs.argmax(dim=1)
    return float(f1_score(targets.cpu(), predicted.cpu(), average="weighted"))


def auc(outputs: Tensor, targets: Tensor) -> float:
    """Return the area under the ROC curve of one class against the rest, averaged over classes.

    The average is over the classes that the samples have: for others there is no curve. If all
    samples are of one class there is no curve at all, and the value is 0.5, that of guessing, so
    that such a client moves a mean over clients neither up nor down by its labels. (The code behind
    the paper's tables takes 0 there.) Outputs that are not finite give NaN: the model has diverged.

    Parameters
    ----------
    outputs : Tensor, shape (n, C)
        Logits; samples are ranked by the softmax probability of the class.
    targets : Tensor of int64, shape (n,)
        Classes.
    """
    from sklearn.metrics import roc_auc_score

    if not outputs.isfinite().all():
        return math.nan
    classes = targets.cpu().numpy()
    present = np.unique(classes)
    if len(present) < 2:
        return 0.5
    # In double precision, in which fewer probabilities are rounded to ties at 0 and 1.
    scores = outputs.double().softmax(dim=1).cpu().numpy()[:, present]
    return float(roc_auc_score(classes[:, None] == present, scores, average="macro"))


FURTHER_METRICS: dict[str, MetricFn] = {"f1": weighted_f1, "auc": auc}


class TorchModel(Section):
    """The table ``[model]``: which model, and how its common initial weights are drawn."""

    name: str
    """The architecture, e.g. 'softmax', 'mlp' or 'cnn'; an unknown name shows all there are. Or
    ``module:function``, a function of the data that returns a model with its initial weights."""
    init: Scheme = "pytorch"
    """How the common initial weights are drawn: 'pytorch' or 'normal'."""


class TorchProblem(Problem):
    """Classification or regression with a model of `models.MODELS`."""

    data_type: ClassVar[type] = FederatedData
    model_table: ClassVar[type[Section]] = TorchModel
    needs: ClassVar[frozenset[str]] = frozenset({"model", "train_loader", "loss_fn"})
    gives: ClassVar[frozenset[str]] = needs | {
        *("test_loader", "validation_loader", "metrics", "full_batch", "optimizer_fn")
    }

    def __init__(self, settings: Settings, data: FederatedData) -> None:
        super().__init__(settings, data)
        wanted = settings.report.metrics
        if wanted and data.task != "classification":
            raise ValueError(
                f"report.metrics is {list(wanted)}, which are of a classification; data set "
                f"{data.name!r} is one of regression: leave it out."
            )
        key = "accuracy" if data.task == "classification" else "rmse"
        self._metric = METRICS[key]
        self._metric_fns: dict[str, MetricFn] = {key: accuracy if key == "accuracy" else rmse}
        self._metric_fns |= {name: FURTHER_METRICS[name] for name in wanted}
        self.loss_fn = loss_of(data.task)
        """What the clients minimise: the mean over a batch."""
        name, seed = settings.model.name, settings.seed
        if is_import(name):
            self._model = build_own(name, data, seed)
        else:
            self._model = initialise(build(name, data), seed, settings.model.init)

    @classmethod
    def check(cls, settings: Settings) -> None:
        """Refuse an experiment without a model."""
        if settings.model is None:
            raise ValueError(
                f"[model] is missing: data set {settings.data.name!r} is learned by a PyTorch "
                'model, e.g. name = "softmax".'
            )

    def initial_arrays(self, strategy: Any) -> ArrayRecord:
        """Return the model's initial weights."""
        return ArrayRecord(self._model.state_dict())

    def client_arguments(self, client_id: int) -> dict[str, Any]:
        """Return model, batches, loss and test metrics.

        The model has the initial weights: parts that never travel start from them on all clients
        (docs/methods/fedapm-notes.md, P3).
        """
        data, training = self._poisoned(client_id), self.settings.training
        size = training.batch_size
        return {
            "model": copy.deepcopy(self._model),
            "train_loader": [data.train] if size is None else Minibatches(*data.train, size),
            "loss_fn": self.loss_fn,
            "test_loader": [data.test],
            "validation_loader": None if data.validation is None else [data.validation],
            "metrics": self._metric_fns,
            "full_batch": size is None,
            "optimizer_fn": partial(
                torch.optim.SGD, momentum=training.momentum, weight_decay=training.weight_decay
            )
            if training.momentum or training.weight_decay
            else torch.optim.SGD,
        }

    def _poisoned(self, client_id: int) -> ClientData:
        """Return a client's samples; to learn from, with false labels where it attacks by them."""
        data: ClientData = self.data.clients[client_id]
        attack = self.attack
        if attack is None or attack.kind != LABELS or client_id not in self.malicious:
            return data
        parts = [data.train] if data.validation is None else [data.train, data.validation]
        labels = np.concatenate([y.numpy() for _, y in parts])
        false = torch.from_numpy(attack.poisoned(labels, self.data.num_classes, client_id))
        drawn = torch.split(false, [len(y) for _, y in parts])
        train, *rest = [(x, y) for (x, _), y in zip(parts, drawn, strict=True)]
        return ClientData(train, rest[0] if rest else None, data.test)

    @property
    def metric(self) -> Metric:
        """The accuracy of a classification, the RMSE of a regression."""
        return self._metric
