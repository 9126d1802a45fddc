"""The wording of refused arguments, and which are refused."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest

from fl_admm_strategies.maths.checks import (
    check_above,
    check_choice,
    check_count,
    check_fraction,
    check_not_negative,
    check_positive,
    listing,
)

COUNT = partial(check_count, least=2)
ABOVE = partial(check_above, bound=1)
OPEN, CLOSED = partial(check_fraction, zero=False), partial(check_fraction, zero=True)
CHOICE = partial(check_choice, choices=("size", "uniform"))


@pytest.mark.parametrize(
    ("check", "value", "error", "message"),
    [
        (COUNT, 1, ValueError, "x is 1, expected an integer >= 2."),
        (COUNT, 2.0, TypeError, "x is 2.0, expected an integer >= 2."),
        (COUNT, True, TypeError, "x is True, expected an integer >= 2."),
        (ABOVE, 1.0, ValueError, "x is 1.0, expected a finite number > 1."),
        (ABOVE, np.nan, ValueError, "x is nan, expected a finite number > 1."),
        (check_positive, 0, ValueError, "x is 0, expected a finite number > 0."),
        (check_positive, "1", TypeError, "x is '1', expected a number > 0."),
        (check_positive, np.complex64(1), TypeError, "expected a number > 0."),
        (check_not_negative, np.inf, ValueError, "x is inf, expected a finite number >= 0."),
        (check_not_negative, None, TypeError, "x is None, expected a number >= 0."),
        (OPEN, 0, ValueError, "x is 0, expected a number in (0, 1]."),
        (CLOSED, 1.1, ValueError, "x is 1.1, expected a number in [0, 1]."),
        (CLOSED, False, TypeError, "x is False, expected a number in [0, 1]."),
        (CHOICE, "all", ValueError, "x is 'all', expected 'size' or 'uniform'."),
    ],
)
def test_refused(check: Any, value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        check("x", value)


def test_accepted() -> None:
    for value in (2, np.int64(3)):
        COUNT("x", value)
    ABOVE("x", 1.5)
    check_positive("x", np.float32(0.1))
    check_not_negative("x", 0)
    OPEN("x", 1)
    CLOSED("x", 0.0)
    CHOICE("x", "size")


def test_a_long_list_is_cut() -> None:
    assert listing([1, "a"]) == "[1, 'a'] (2)"
    assert listing(range(9)) == "[0, 1, 2, 3, 4, 5, ...] (9)"
