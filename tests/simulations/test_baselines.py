"""FedAvg and local training beside an experiment, against descent steps written out here."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from fl_admm_strategies import InProcessGrid
from simulations.algorithms import Experiment
from simulations.baselines import Baseline, FedAvgClient, run_baselines
from simulations.client_app import make_client_app
from simulations.config import RunConfig
from simulations.run import prepare, run_experiment

ALL = ("training.fraction-train=1.0", "training.evaluate-every=2", "algorithm.local-epochs=3")
NAMES = 'baselines={names = ["fedavg", "local"]}'


def prepared(*changes: str, rounds: int = 5, seed: int = 0) -> Experiment:
    """Return an experiment as if it had run this many rounds."""
    experiment = prepare(RunConfig("digits-fpfc", changes=(*ALL, *changes), seed=seed))
    experiment.strategy.traffic = dict.fromkeys(range(1, rounds + 1))  # type: ignore[arg-type]
    return experiment


def baselines(experiment: Experiment) -> list[Baseline]:
    return run_baselines(experiment, Console(file=io.StringIO()))


def descend(weights: list[Tensor], data: tuple[Tensor, Tensor], lr: float, epochs: int) -> Any:
    """Return softmax regression's weight and bias after full-gradient steps."""
    weight, bias = (w.clone().requires_grad_() for w in weights)
    for _ in range(epochs):
        loss = nn.functional.cross_entropy(data[0] @ weight.T + bias, data[1])
        steps = torch.autograd.grad(loss, (weight, bias))
        weight, bias = (
            (w - lr * step).detach().requires_grad_()
            for w, step in zip((weight, bias), steps, strict=True)
        )
    return [weight.detach(), bias.detach()]


def accuracy_of(weights: list[Tensor], data: tuple[Tensor, Tensor]) -> float:
    outputs = data[0] @ weights[0].T + weights[1]
    return float((outputs.argmax(dim=1) == data[1]).float().mean())


def start_of(experiment: Experiment) -> list[Tensor]:
    return [torch.from_numpy(np.array(array.numpy())) for array in experiment.arrays.values()]


def test_fedavg_is_the_weighted_mean_of_local_descents() -> None:
    experiment = prepared(NAMES, rounds=5)
    fedavg, _ = baselines(experiment)
    clients, weights = experiment.data.clients, start_of(experiment)
    sizes = [len(own.train[1]) for own in clients]
    expected = {}
    for server_round in range(1, 6):
        own = [descend(weights, client.train, lr=0.3, epochs=3) for client in clients]
        weights = [
            sum(n * w[k] for n, w in zip(sizes, own, strict=True)) / sum(sizes) for k in (0, 1)
        ]
        expected[server_round] = np.mean([accuracy_of(weights, client.test) for client in clients])
    assert fedavg.title == "FedAvg (global model)"
    # Every second round and the last. One of 60 test samples may tip by rounding.
    assert [server_round for server_round, _ in fedavg.curve] == [2, 4, 5]
    for server_round, score in fedavg.curve:
        assert score.mean == pytest.approx(expected[server_round], abs=0.003)
    assert fedavg.score is fedavg.curve[-1][1]


def test_local_training_has_the_epochs_of_the_run_and_nobody_elses_data() -> None:
    # 5 rounds with half of the 12 clients: 2.5 rounds of 3 epochs for each, rounded to 8 (7.5, to
    # even); lr and epochs of [baselines] come before the algorithm's.
    experiment = prepared('baselines={names = ["local"], lr=0.1}', "training.fraction-train=0.5")
    (local,) = baselines(experiment)
    start = start_of(experiment)
    own = [descend(start, client.train, lr=0.1, epochs=8) for client in experiment.data.clients]
    values = [
        accuracy_of(weights, client.test)
        for weights, client in zip(own, experiment.data.clients, strict=True)
    ]
    assert local.title == "local training"
    assert local.score.mean == pytest.approx(np.mean(values), abs=0.003)
    assert local.score.std == pytest.approx(np.std(values), abs=0.003)
    assert [server_round for server_round, _ in local.curve] == [5]


@pytest.mark.parametrize("batches", [(), ("training.batch-size=20",)])
def test_baselines_are_reproducible_and_leave_the_process_as_it_was(
    batches: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []
    fit = FedAvgClient.fit

    def watched(self: FedAvgClient, *arguments: Any) -> Any:
        trained.append(int(self.context.node_config["partition-id"]))
        return fit(self, *arguments)

    monkeypatch.setattr(FedAvgClient, "fit", watched)
    half = ("training.fraction-train=0.5", NAMES, *batches)
    torch.set_num_threads(2)
    try:
        random.seed(1)
        torch.manual_seed(1)
        before = random.getstate(), torch.random.get_rng_state()
        first = baselines(prepared(*half, rounds=3))
        assert random.getstate() == before[0]
        assert torch.equal(torch.random.get_rng_state(), before[1])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    sampled = trained.copy()
    # Six different clients a round, then all twelve alone.
    assert [len(set(sampled[k : k + 6])) for k in (0, 6, 12)] == [6, 6, 6]
    assert sampled[18:] == list(range(12))
    assert not sampled[:6] == sampled[6:12] == sampled[12:18]
    trained.clear()
    random.seed(2)
    torch.manual_seed(2)
    assert baselines(prepared(*half, rounds=3)) == first
    assert trained == sampled
    trained.clear()
    baselines(prepared(*half, rounds=3, seed=1))
    assert trained != sampled


def test_without_the_table_nothing_is_run() -> None:
    assert baselines(prepared()) == []


def test_a_run_shows_its_baselines(tmp_path: Path) -> None:
    changes = (NAMES, "training.num-rounds=4", "training.evaluate-every=3")
    config = RunConfig("digits-fpfc", changes=changes, out=tmp_path / "out")
    screen = io.StringIO()
    with InProcessGrid(make_client_app(config.to_mapping()), 3) as grid:
        console = Console(file=screen, width=80)
        result = run_experiment(grid, config, engine="inprocess", console=console)
    written = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    assert list(written["baselines"]) == ["FedAvg (global model)", "local training"]
    for title, score in result.baselines.items():
        line = next(
            line for line in screen.getvalue().splitlines() if line.startswith(f"   {title[:6]}")
        )
        assert f"{100 * score.mean:.2f}" in line
        assert written["baselines"][title]["mean"] == score.mean
    assert "Run here for comparison" in screen.getvalue()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('{names = ["fedprox"]}', "baselines.names.0: .*'fedavg' or 'local', given 'fedprox'"),
        ("{lr = 0}", "baselines.lr: .*greater than 0, given 0"),
        ("{epochs = 0}", "baselines.epochs: .*given 0"),
    ],
)
def test_bad_baselines_are_refused(table: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(RunConfig("digits-fpfc", changes=(f"baselines={table}",)))
