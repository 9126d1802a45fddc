"""What a personalised method has to beat, run on the same data: FedAvg, and every client alone.

FedAvg is Flower's own strategy. Both baselines start from the experiment's initial weights and have
its model, clients, batches and number of rounds. They run in this process after the experiment
itself, whatever engine that ran on, so that their numbers are the same on all.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray
from pydantic import Field
from rich.console import Console

from clients import TorchClient, client_app
from clients.toolkit.solvers import gradient_descent
from fl_admm_strategies import InProcessGrid

from .algorithms import Experiment, TorchAlgorithm, local_problem
from .data.federated import generator
from .models import build
from .report import Metric, Score, column_means, score
from .section import Section


class BaselineSettings(Section):
    """The table ``[baselines]`` of an experiment: what to run beside the algorithm."""

    names: tuple[Literal["fedavg", "local"], ...] = ("fedavg", "local")
    lr: float | None = Field(default=None, gt=0)
    """Step size; left out, the algorithm's, without its decay."""
    epochs: int | None = Field(default=None, ge=1)
    """Local epochs of a round; left out, the algorithm's."""


@dataclass(frozen=True)
class Baseline:
    """A baseline's results.

    Attributes
    ----------
    title : str
        As the table has it.
    curve : list of (int, Score)
        The metric over the clients after the rounds that were evaluated; the last is the result.
    cells : mapping of str to float
        Further columns of the table.
    """

    title: str
    curve: list[tuple[int, Score]]
    cells: Mapping[str, float]

    @property
    def score(self) -> Score:
        """The metric after the last round."""
        return self.curve[-1][1]


class FedAvgClient(TorchClient):
    """A client of FedAvg: descend on one's own loss from the model received.

    Parameters
    ----------
    *args, **local
        As `TorchClient`.
    seed : int
        The run's; the client's randomness of a round follows from it, since FedAvg sends the same
        settings to everybody.
    """

    def __init__(self, *args: Any, seed: int, **local: Any) -> None:
        super().__init__(*args, **local)
        self.seed = seed

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        """Take ``config["epochs"]`` epochs with step size ``config["lr"]``."""
        client_id, server_round = self.context.node_config["partition-id"], config["server-round"]
        stream = generator(self.seed, "fedavg", int(client_id), int(server_round))
        with self.seeded({"seed": int(stream.integers(2**63))}):
            self.load(parameters)
            loss = gradient_descent(
                self.train_problem,
                [],
                lr=config["lr"],
                epochs=config["epochs"],
                full_batch=self.full_batch,
                optimizer_fn=self.optimizer_fn,
            )
        return self.get_parameters({}), self.train_problem.num_examples(), {"loss": loss}


def run_baselines(experiment: Experiment, console: Console) -> list[Baseline]:
    """Run the baselines that an experiment asks for, after the experiment itself.

    Parameters
    ----------
    experiment : Experiment
        Its strategy has run: the baselines get as many rounds.
    console : Console
        Told what is being run.

    Returns
    -------
    list of Baseline
        In the order of the settings; empty where there is no table ``[baselines]``.

    Raises
    ------
    RuntimeError
        If not a single client could evaluate FedAvg's model.
    """
    asked = experiment.settings.baselines
    if asked is None:
        return []
    methods = {"fedavg": _fedavg, "local": _local}
    found = []
    with _one_thread():
        for name in asked.names:
            console.print(f"For comparison, on the same data: {name} ...", highlight=False)
            found.append(methods[name](experiment))
    return found


def _work(experiment: Experiment) -> tuple[float, int, int, int]:
    """Return step size, local epochs, rounds and clients a round, all as the algorithm had them."""
    settings = experiment.settings
    algorithm, asked = settings.algorithm, settings.baselines
    assert isinstance(algorithm, TorchAlgorithm)  # `check` has seen to it
    assert asked is not None
    total = len(experiment.data.clients)
    active = max(1, int(settings.training.fraction_train * total + 1e-9))  # StatefulStrategy's rule
    return (
        asked.lr or algorithm.lr,
        asked.epochs or algorithm.local_epochs,
        max(experiment.strategy.traffic),
        active,
    )


def _client(experiment: Experiment, context: Context) -> FedAvgClient:
    settings, data = experiment.settings, experiment.data
    assert settings.model is not None  # `check` has seen to it
    client_id = int(context.node_config["partition-id"])
    return FedAvgClient(
        context,
        build(settings.model.name, data),
        seed=settings.seed,
        **local_problem(settings, data, client_id),
    )


class _FedAvg(FedAvg):
    """Flower's FedAvg, evaluated every so many rounds, that keeps every client's metric."""

    def __init__(self, evaluated: set[int], metric: Metric, **options: Any) -> None:
        super().__init__(**options, evaluate_metrics_aggr_fn=self._collect)
        self.curve: list[tuple[int, Score]] = []
        self.cells: dict[str, float] = {}
        self._evaluated = evaluated
        self._metric = metric
        self._now = 0

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._now = server_round
        if server_round not in self._evaluated:
            return []
        return super().configure_evaluate(server_round, arrays, config, grid)

    def _collect(self, replies: list[RecordDict], weighted_by_key: str) -> MetricRecord:
        clients: list[dict[str, Any]] = [
            dict(record) for reply in replies for record in reply.metric_records.values()
        ]
        values = [metrics[f"arrays-{self._metric.key}"] for metrics in clients]
        self.curve.append((self._now, score(values, self._metric)))
        self.cells = column_means(clients, "arrays")
        return MetricRecord({self._metric.key: self.curve[-1][1].mean})


def _fedavg(experiment: Experiment) -> Baseline:
    settings, total = experiment.settings, len(experiment.data.clients)
    lr, epochs, rounds, active = _work(experiment)
    every = settings.training.evaluate_every
    strategy = _FedAvg(
        {*range(every, rounds, every), rounds},
        settings.algorithm.metric(experiment.data),
        fraction_train=settings.training.fraction_train,
        min_train_nodes=active,
        min_evaluate_nodes=total,
        min_available_nodes=total,
    )
    app = client_app(lambda context: _client(experiment, context))
    with _seeded_sampling(settings.seed), InProcessGrid(app, total) as grid:
        strategy.start(
            grid,
            experiment.arrays,
            num_rounds=rounds,
            train_config=ConfigRecord({"lr": lr, "epochs": epochs}),
        )
    if not strategy.curve or strategy.curve[-1][0] != rounds:
        raise RuntimeError("no client could evaluate FedAvg's model; the errors above say why.")
    return Baseline("FedAvg (global model)", strategy.curve, strategy.cells)


def _local(experiment: Experiment) -> Baseline:
    """Train everybody alone for the epochs that a client has in the run on average."""
    settings, total = experiment.settings, len(experiment.data.clients)
    lr, epochs, rounds, active = _work(experiment)
    config = {
        "lr": lr,
        "epochs": max(1, round(rounds * active / total * epochs)),
        "server-round": 0,  # a stream of randomness that no round of FedAvg has
    }
    start = [array.numpy() for array in experiment.arrays.values()]
    metric = settings.algorithm.metric(experiment.data)
    clients = []
    for client_id in range(total):
        context = Context(
            run_id=0,
            node_id=0,
            node_config={"partition-id": client_id, "num-partitions": total},
            state=RecordDict(),
            run_config={},
        )
        client = _client(experiment, context)
        trained, _, _ = client.fit(start, config)
        _, _, metrics = client.evaluate_models({"local": trained})
        clients.append(metrics)
    found = score([metrics[f"local-{metric.key}"] for metrics in clients], metric)
    return Baseline("local training", [(rounds, found)], column_means(clients, "local"))


@contextmanager
def _seeded_sampling(seed: int) -> Iterator[None]:
    """Make Flower's sampling reproducible: it uses Python's global random numbers."""
    before = random.getstate()
    random.seed(int(generator(seed, "fedavg", "sampling").integers(2**63)))
    try:
        yield
    finally:
        random.setstate(before)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let sums have the same last bits wherever this runs, as the app's clients do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
