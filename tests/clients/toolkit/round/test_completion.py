"""What every client with ratings refuses, whatever its method makes of them."""

from __future__ import annotations

from typing import Any

import pytest

import clients
from fl_admm_strategies import SquaredL2
from tests.support.ratings import new_context, ratings
from tests.support.refusals import refused


def make(**settings: Any) -> clients.FedALSClient:
    return clients.FedALSClient(new_context(), ratings(2), SquaredL2(0.1), **settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"test": ratings(1)}, ("(4, 7)", "(5, 7)", "num_users")),
        ({"std": 0.0}, ("std",)),
        ({"mean": float("nan")}, ("mean",)),
    ],
    ids=["test", "std", "mean"],
)
def test_what_cannot_be_is_refused_at_once(settings: Any, named: tuple[str, ...]) -> None:
    with refused(ValueError, *named):
        make(**settings)


@pytest.mark.parametrize(("user", "error"), [(5, ValueError), (-1, ValueError), (1.5, TypeError)])
def test_a_user_that_is_not_there_is_refused(user: Any, error: type[Exception]) -> None:
    with refused(error, "user"):
        make().recommend(user, 1)
