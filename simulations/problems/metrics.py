"""Test metrics beside accuracy: F1 and AUC, as scikit-learn has them.

FedAPM's paper does not say how it averages over classes. Its tables' numbers are averages of F1
weighted by class and of AUC, the unweighted mean of one class against the rest
(docs/methods/fedapm-notes.md, P15).
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor


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


def macro_f1(outputs: Tensor, targets: Tensor) -> float:
    """Return the plain mean of the F1 scores of the classes that the samples have.

    Of samples that lack a class the mean is over the others, as that of `auc` is.

    Parameters
    ----------
    outputs, targets
        As `weighted_f1` has them.
    """
    from sklearn.metrics import f1_score

    classes, predicted = targets.cpu().numpy(), outputs.argmax(dim=1).cpu().numpy()
    present = np.unique(classes)
    return float(f1_score(classes, predicted, labels=present, average="macro", zero_division=0.0))


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
