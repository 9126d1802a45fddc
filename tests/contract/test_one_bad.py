"""One of m clients says or does not say what it likes: the others' run goes on as without it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clients import client_app
from fl_admm_strategies import InProcessGrid
from tests.support.cases import CHEAP
from tests.support.federation import Adding, Mean

M, BAD = 6, 0  # how many clients there are, and which is bad

# --- Metrics --------------------------------------------------------------------------------------

LIES: dict[str, dict[str, Any]] = {
    "left-out": {},
    "nan": {"accuracy": math.nan},
    "infinite": {"accuracy": math.inf},
    "perfect": {"accuracy": 1.0, "num-examples": 2**53},
    "huge": {"accuracy": 1e300, "num-examples": 2**53},
    "many": {"accuracy": 0.5, **{f"{k:0>100}": 0.1234567890123456 * k for k in range(290)}},
    "unprintable": {"accuracy": 0.5, "\N{SNOWMAN}" * 200: 1.0},
}


class Reporting(Adding):
    """Has an accuracy between .3 and .5; the bad one says something else."""

    lie: Mapping[str, Any] = {}

    def fit(self, parameters: Any, config: Any) -> Any:
        arrays, num_examples, metrics = super().fit(parameters, config)
        said = dict(self.lie) if self.client == BAD else {"accuracy": 0.3 + 0.04 * self.client}
        return arrays, said.pop("num-examples", num_examples), metrics | said

    def evaluate(self, parameters: Any, config: Any) -> Any:
        loss, num_examples, _ = super().evaluate(parameters, config)
        said = dict(self.lie) if self.client == BAD else {"accuracy": 0.3 + 0.04 * self.client}
        return loss, said.pop("num-examples", num_examples), said


def reporting(lie: Mapping[str, Any], m: int = M) -> InProcessGrid:
    class Lying(Reporting):
        pass

    Lying.lie = lie
    return InProcessGrid(client_app(lambda context: Lying(context).to_client()), m)


@pytest.mark.parametrize("m", [3, M])
@pytest.mark.parametrize("lie", [*LIES])
def test_no_clients_metrics_end_a_run_or_hide_the_others(lie: str, m: int) -> None:
    strategy, seen = Mean(), {}

    def stop(server_round: int, metrics: Mapping[str, float]) -> bool:
        seen[server_round] = dict(metrics)
        return metrics["accuracy"] > 0.99 or metrics["train-accuracy"] > 0.99

    strategy.start(reporting(LIES[lie], m), CHEAP.initial_arrays(), 3, stop=stop)
    assert strategy.last_round == 3
    for metrics in seen.values():
        for name in ("accuracy", "train-accuracy"):
            assert 0.3 <= metrics[name] <= 0.3 + 0.04 * m, name
    means = strategy.run.record.measured(3)
    assert means.get("accuracy-clients") == (
        m - 1 if lie in ("left-out", "nan", "infinite") else None
    )


def test_a_resumed_run_decides_as_the_one_before(tmp_path: Path) -> None:
    def stop(server_round: int, metrics: Mapping[str, float]) -> bool:
        seen.append((server_round, dict(metrics)))
        return False

    seen: list[tuple[int, dict[str, float]]] = []
    grid, first = reporting(LIES["huge"]), CHEAP.initial_arrays()
    Mean().start(grid, first, 2, stop=stop, checkpoint_dir=tmp_path)
    before, seen = seen, []
    Mean().start(grid, first, 2, stop=stop, checkpoint_dir=tmp_path, resume=True)
    assert seen == before


@pytest.mark.parametrize("lie", ["many", "unprintable"])
def test_the_history_of_a_round_has_a_bound(lie: str, tmp_path: Path) -> None:
    Mean().start(reporting(LIES[lie]), CHEAP.initial_arrays(), 1, checkpoint_dir=tmp_path)
    assert (tmp_path / "history.jsonl").stat().st_size < 100_000
