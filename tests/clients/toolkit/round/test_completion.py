"""What every client with ratings refuses, whatever its method makes of them."""

from __future__ import annotations

from typing import Any

import pytest

import clients
from fl_admm_strategies import SquaredL2
from tests.support.ratings import new_context, ratings
from tests.support.refusals import refused

KINDS = {kind.__name__: kind for kind in (clients.FedALSClient, clients.FedEASEClient)}

each_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, **settings: Any) -> Any:
    needs = () if kind == "FedEASEClient" else (SquaredL2(0.1),)
    return KINDS[kind](new_context(), ratings(2), *needs, **settings)


@each_kind
@pytest.mark.parametrize(
    ("settings", "error", "named"),
    [
        ({"test": ratings(1)}, ValueError, ("(4, 7)", "(5, 7)", "num_users")),
        ({"std": 0.0}, ValueError, ("std",)),
        ({"mean": float("nan")}, ValueError, ("mean",)),
        ({"rank_at": 0}, ValueError, ("rank_at",)),
        ({"rank_at": 8}, ValueError, ("rank_at", "7")),
    ],
    ids=["test", "std", "mean", "rank_at", "rank_at-items"],
)
def test_what_cannot_be_is_refused_at_once(
    kind: str, settings: dict[str, Any], error: type[Exception], named: tuple[str, ...]
) -> None:
    with refused(error, *named):
        make(kind, **settings)


@each_kind
@pytest.mark.parametrize(("user", "error"), [(5, ValueError), (-1, ValueError), (1.5, TypeError)])
def test_nobody_is_recommended_to_who_is_not_there(
    kind: str, user: Any, error: type[Exception]
) -> None:
    client = make(kind)
    items = {"FedEASEClient": "item_weights"}.get(kind, "item_factors")
    with refused(error, "user"):
        client.recommend(user, 1, **{items: None})
