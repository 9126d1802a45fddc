"""Krum, multi-Krum, median and trimmed mean on seven uploads, two of them false.

In two coordinates: 1 (1, 1), 2 (1.2, .9), 3 (.9, 1.3), 4 (1.1, 1.05), 5 (8, -7), 6 (1.4, 1),
7 (7.5, -6). With f = 2 a score is the sum of squared distances to the 7 - 2 - 2 = 3 nearest others:
of upload 2 to 4, 6 and 1, (.01 + .0225) + (.04 + .01) + (.04 + .01) = .1325, the lowest; of 4
.1375, of 1 .1625, of 6 .3025, of 3 .4525. Sums of distances not squared would have 4 before 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from clients import DittoClient
from fl_admm_strategies import Ditto
from fl_admm_strategies.algorithms.shared.robust import aggregate, check_enough
from fl_admm_strategies.maths.blocks import Arrays
from tests.fl_admm_strategies.algorithms.quadratics import ALL, Grid, follow
from tests.support.refusals import Warned, refused

UPLOADS = [(1, 1), (1.2, 0.9), (0.9, 1.3), (1.1, 1.05), (8, -7), (1.4, 1), (7.5, -6)]
TWO_OF_SEVEN = 2 / 7


def uploads(dtype: str = "float64") -> list[Arrays]:
    """Return the uploads, each as two arrays of one number."""
    return [{"x": np.array([x], dtype), "y": np.array([[y]], dtype)} for x, y in UPLOADS]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("krum", (1.2, 0.9)),
        ("multi-krum", (1.12, 1.05)),  # the mean of 2, 4, 1, 6 and 3
        ("median", (1.2, 1)),
        ("trimmed-mean", (3.7 / 3, 2.9 / 3)),  # 1.1 + 1.2 + 1.4 and .9 + 1 + 1
    ],
)
def test_the_worked_example(rule: Any, expected: tuple[float, float]) -> None:
    made = aggregate(rule, TWO_OF_SEVEN, uploads())
    assert made["y"].shape == (1, 1)
    assert_allclose([made["x"].item(), made["y"].item()], expected, atol=1e-8)
    assert aggregate(rule, TWO_OF_SEVEN, uploads("float32"))["x"].dtype == np.float32


def test_without_liars_they_are_the_plain_mean() -> None:
    mean = np.mean(UPLOADS, axis=0)
    for rule in ("multi-krum", "trimmed-mean"):
        made = aggregate(rule, 0.0, uploads())  # type: ignore[arg-type]
        assert_allclose([made["x"].item(), made["y"].item()], mean, rtol=1e-14)


def test_distances_far_from_zero_are_those_of_the_uploads() -> None:
    # In single precision the squares of 4096 drown differences of a hundredth.
    far = [{name: array + 4096 for name, array in own.items()} for own in uploads("float32")]
    made = aggregate("krum", TWO_OF_SEVEN, far)
    assert_array_equal(made["x"], np.float32([1.2]) + np.float32(4096))


def test_integers_have_no_say_in_distances() -> None:
    # A batch norm's counter of a client with more data would make it look far away.
    own = uploads()
    for place, upload in enumerate(own):
        upload["batches"] = np.array(100 * place if place != 1 else 10**6)
    made = aggregate("krum", TWO_OF_SEVEN, own)
    assert made["x"].item() == 1.2
    assert made["batches"] == 400  # of 0, 10^6, 200, ..., 600
    assert made["batches"].dtype == np.int64


@pytest.mark.parametrize(
    ("rule", "malicious", "fewest"),
    # Krum: n - f - 2 = 1 neighbours with n, f = 3, 0; 4, 1; 6, 3. A trimmed mean: f = 1 of 5.
    [
        ("krum", 0.0, 3),
        ("multi-krum", 0.4, 4),
        ("krum", 0.5, 5),
        ("median", 0.2, 3),
        ("trimmed-mean", 0.2, 5),
        ("trimmed-mean", 0.0, 1),
    ],
)
def test_too_few_uploads_are_refused(rule: Any, malicious: float, fewest: int) -> None:
    check_enough(rule, malicious, fewest)
    with refused(ValueError, fewest - 1, fewest, rule):
        check_enough(rule, malicious, fewest - 1)


# --- Ditto, whose paper uses them -----------------------------------------------------------------


def ditto(**settings: Any) -> Ditto:
    return Ditto(lam=0.5, lr=0.1, local_epochs=2, fraction_evaluate=0.0, **settings)


def test_dittos_global_model_is_the_median_of_its_uploads(warned: Warned) -> None:
    # w_i = .19, -.36, 1.92 (test_ditto.py), so w = .19. Round 2: w_i = 1 - .81 (1 - w) = .3439,
    # -1 + .64 (1 + w) = -.2384, 3 - .36 (3 - w) = 1.9884. In round 3 two reply.
    strategy = ditto(aggregation="median")
    seen = follow(
        strategy, Grid(DittoClient), ALL, ALL, (0, 1), read=lambda: strategy.state.model["w"].item()
    )
    assert_allclose(seen, [0.19, 0.3439, 0.3439], atol=1e-8)
    assert len(warned()) == len(warned("Round 3", "2 uploads", "aggregation='median'")) == 1


def test_ditto_says_at_once_that_there_are_too_few() -> None:
    with refused(ValueError, "3 uploads", "aggregation='multi-krum'"):
        follow(ditto(aggregation="multi-krum", malicious=0.4), Grid(DittoClient), ALL)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"aggregation": "mode"}, ["aggregation", "mode"]),
        ({"malicious": 1.5}, ["malicious", 1.5]),
        ({"aggregation": "trimmed-mean", "malicious": 0.5}, ["malicious", 0.5]),
        ({"aggregation": "krum", "weights": "size"}, ["weights", "size"]),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], named: list[Any]) -> None:
    with refused(ValueError, *named):
        ditto(**settings)
