"""How one value per client is summarised, against hand-derived numbers."""

import math

import numpy as np
import pytest

from simulations.problems.scores import METRICS, column_means, score

ACCURACY, RMSE = METRICS["accuracy"], METRICS["rmse"]


def test_score_of_accuracies():
    # 0.01, 0.02, ..., 0.20: twenty clients, so the worst tenth are .01, .02, the best .19, .20;
    # the variance of 1..n is (n^2 - 1)/12.
    values = np.random.default_rng(0).permutation(np.arange(1, 21) / 100)
    got = score(values, ACCURACY)
    assert got.mean == pytest.approx(0.105)
    assert got.std == pytest.approx(math.sqrt(399 / 12) / 100)
    assert got.worst == pytest.approx(0.015)
    assert got.best == pytest.approx(0.195)


def test_score_of_errors_has_the_worst_at_the_high_end():
    # Eleven clients: a tenth is rounded up to two.
    got = score(np.arange(11.0), RMSE)
    assert (got.worst, got.best) == (9.5, 0.5)


@pytest.mark.parametrize("metric", [ACCURACY, RMSE])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_a_worst_one(metric, bad):
    got = score([0.5, bad, 0.5], metric)
    assert math.isnan(got.mean)
    assert math.isnan(got.worst)
    assert got.best == 0.5


def test_columns_are_means_over_all_clients_in_percent():
    clients = [{"personal-f1": 0.5, "personal-auc": 1.0}, {"personal-f1": 0.25}]
    assert column_means(clients, "personal") == {"f1": 37.5}  # not everybody has an AUC
    assert column_means(clients, "global") == {}
    assert column_means([], "personal") == {}
