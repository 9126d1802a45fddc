"""Apps of our own, converted by docs/drop-in.md: both APIs, batch norm, a Transformer."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_admm_strategies import StatefulStrategy
from tests.apps.conversions import own
from tests.apps.converted import run_app
from tests.apps.data import needs_cifar

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "legacy", "rounds"),
    [
        ("mlp", True, 15),
        ("transformer", False, 15),
        pytest.param("resnet", False, 2, marks=needs_cifar),
    ],
)
def test_an_app_of_our_own(
    model: str,
    legacy: bool,
    rounds: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    made: list[StatefulStrategy],
) -> None:
    folder = own(tmp_path, model, "FedADMM", legacy=legacy, rounds=rounds)
    run_app(folder, "own", 10, {}, monkeypatch)
    (strategy,) = made
    assert {r: len(clients) for r, clients in strategy.train_metrics.items()} == dict.fromkeys(
        range(1, rounds + 1), 5
    )
    found = strategy.run.record.result.evaluate_metrics_clientapp
    if model != "resnet":  # which needs more than two rounds
        assert found[rounds]["global-accuracy"] > max(0.3, found[1]["global-accuracy"])
