"""Weighted F1 and AUC by hand, and where a client's test set lacks classes."""

import math

import pytest
import torch
from torch import Tensor, nn

from simulations.problems.torch_model import auc, weighted_f1


def chosen(classes: list[int], of: int) -> Tensor:
    """Outputs that predict these classes."""
    return nn.functional.one_hot(torch.tensor(classes), of).float()


def test_weighted_f1_by_hand() -> None:
    """Class 2 is predicted, but is nobody's class; class 3 is not even that.

    Targets 0 0 0 1 1, predictions 0 0 1 1 2. Class 0: precision 1, recall 2/3, F1 4/5, weight 3/5.
    Class 1: precision 1/2, recall 1/2, F1 1/2, weight 2/5. Class 2 is only predicted: weight 0.
    """
    value = weighted_f1(chosen([0, 0, 1, 1, 2], 4), torch.tensor([0, 0, 0, 1, 1]))
    assert value == pytest.approx(3 / 5 * 4 / 5 + 2 / 5 * 1 / 2)
    targets = torch.tensor([3, 3, 3])
    assert weighted_f1(chosen([3, 3, 0], 4), targets) == pytest.approx(0.8)
    assert weighted_f1(chosen([0, 1, 2], 4), targets) == 0.0  # without a warning


def test_auc_by_hand() -> None:
    """Two classes, probabilities of class 1 increasing with its logit z: .1 .4 .35 .8 for 0 0 1 1.

    Of the four pairs (one of each class) three are in order, .4 and .35 are not: 3/4 for class 1,
    and the same for class 0, whose probabilities are the complements.
    """
    z = torch.tensor([0.1, 0.4, 0.35, 0.8])
    outputs = torch.stack([torch.zeros(4), z], dim=1)
    assert auc(outputs, torch.tensor([0, 0, 1, 1])) == pytest.approx(3 / 4)
    # A tie counts a half, one class alone is guessing; in single precision both probabilities of
    # the confident outputs would be 1, a tie. A model that has diverged has none.
    assert auc(torch.zeros(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])) == 0.5
    assert auc(outputs, torch.tensor([1, 1, 1, 1])) == 0.5
    assert auc(torch.tensor([[0.0, 20.0], [0.0, 25.0]]), torch.tensor([0, 1])) == 1.0
    for bad in (math.nan, math.inf):
        assert math.isnan(auc(torch.tensor([[0.0, bad], [0.0, 1.0]]), torch.tensor([0, 1])))


def test_auc_averages_over_the_classes_that_are_there() -> None:
    """Classes 0 and 2 of four. Probability of class 2 in order of every pair: 1; of class 0 of the
    pairs (sample 0 or 1, sample 2 or 3) three of four.
    """
    of_0, of_2 = [0.6, 0.3, 0.1, 0.4], [0.1, 0.15, 0.8, 0.45]
    of_1 = [0.2, 0.5, 0.05, 0.05]
    of_3 = [0.1, 0.05, 0.05, 0.1]
    probabilities = torch.tensor([of_0, of_1, of_2, of_3]).T
    assert auc(probabilities.log(), torch.tensor([0, 0, 2, 2])) == pytest.approx((3 / 4 + 1) / 2)
