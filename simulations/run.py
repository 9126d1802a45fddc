"""One run of an experiment: train, write down every round, report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from rich.console import Console
from rich.text import Text
from safetensors.numpy import save_file
from torch import nn

from fl_admm_strategies import FPFC
from fl_admm_strategies.fpfc import FPFCDiagnostics

from . import plots
from .config import RunConfig
from .data import FederatedData
from .models import build, initialise
from .report import (
    Result,
    clustering_scores,
    communication_cost,
    diagnostics_table,
    results_table,
    score,
    write_metrics_line,
    write_result,
)
from .settings import Settings, load_experiment, published_rows

_KINDS = {
    "personal": "personal model",
    "cluster": "cluster model",
    "global": "one global model",
}


@dataclass(frozen=True)
class Experiment:
    """An experiment that is ready to run."""

    settings: Settings
    data: FederatedData
    strategy: FPFC
    model: nn.Module


def prepare(config: RunConfig) -> Experiment:
    """Load an experiment's settings and data, and build its strategy and its initial model.

    Raises
    ------
    ValueError, FileNotFoundError
        If settings or data are not usable.
    """
    settings, data = load_experiment(config)
    strategy = settings.algorithm.strategy(
        fraction_train=settings.training.fraction_train,
        min_available_nodes=len(data.clients),
        seed=settings.seed,
    )
    model = initialise(build(settings.model.name, data), settings.seed, settings.model.init)
    return Experiment(settings, data, strategy, model)


def run_experiment(grid: Grid, config: RunConfig, *, engine: str, console: Console) -> Result:
    """Run an experiment on a grid and write its results folder.

    Parameters
    ----------
    grid : Grid
        Of any engine.
    config : RunConfig
        Which experiment, with which changes.
    engine : str
        The engine's name, for the report.
    console : Console
        Where the tables go.

    Returns
    -------
    Result
        What ``result.json`` holds.

    Raises
    ------
    ValueError, FileNotFoundError
        If settings or data are not usable; nothing has been sent by then.
    RuntimeError
        If not one reply, or not one evaluation, of the whole run was usable.
    """
    experiment = prepare(config)
    settings, data, strategy = experiment.settings, experiment.data, experiment.strategy
    name = Path(config.experiment).stem
    out = _new_folder(config.out, name)
    (out / "experiment.toml").write_text(settings.to_toml(), encoding="utf-8")

    began = time.monotonic()
    with (out / "metrics.jsonl").open("w", encoding="utf-8") as file:

        def on_round(server_round: int, metrics: Mapping[str, float]) -> None:
            write_metrics_line(
                file,
                {
                    "round": server_round,
                    "seconds": time.monotonic() - began,
                    "metrics": metrics,
                    "clients": {
                        "train": strategy.train_metrics.get(server_round, {}),
                        "evaluate": strategy.evaluate_metrics.get(server_round, {}),
                    },
                },
            )

        strategy.start(
            grid,
            ArrayRecord(experiment.model.state_dict()),
            num_rounds=settings.training.num_rounds,
            evaluate_every=settings.training.evaluate_every,
            on_round=on_round,
        )
    seconds = time.monotonic() - began
    save_file(strategy.state_dict(), out / "state.safetensors")
    if not strategy.evaluate_metrics:
        raise RuntimeError(
            f"no client could evaluate a model, so there is nothing to report. The models are in "
            f"{out}; the warnings above say why."
        )
    found = strategy.diagnostics()
    result = _result(name, settings, data, strategy, found, engine, seconds)
    write_result(out / "result.json", result)
    _draw(out, settings, data, strategy, found, result)
    console.print(results_table(result))
    console.print()
    _print_diagnostics(console, settings, found, result)
    console.print()
    _print_summary(console, settings, data, found, result)
    console.print()
    _print_files(console, out)
    return result


def _new_folder(wanted: Path | None, name: str) -> Path:
    """Make the folder of a run, never one that is there already."""
    if wanted is not None:
        if wanted.exists() and any(wanted.iterdir()):
            raise ValueError(f"the results folder {wanted} is not empty; give another --out")
        wanted.mkdir(parents=True, exist_ok=True)
        return wanted
    stamp = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    for suffix in ("", *(f"-{count}" for count in range(2, 1000))):
        folder = Path("runs") / f"{stamp}{suffix}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"runs/{stamp} and its numbered neighbours exist already")


def _metric(data: FederatedData) -> str:
    return "accuracy" if data.task == "classification" else "rmse"


def _result(
    name: str,
    settings: Settings,
    data: FederatedData,
    strategy: FPFC,
    found: FPFCDiagnostics,
    engine: str,
    seconds: float,
) -> Result:
    metric = _metric(data)
    last = strategy.evaluate_metrics[max(strategy.evaluate_metrics)]
    sizes = {key: array.size for key, array in strategy.global_model().items()}
    shared = sum(strategy.state.shared[key].size for key in strategy.state.shared)
    return Result(
        experiment=name,
        algorithm=settings.algorithm.title,
        metric=metric,  # type: ignore[arg-type]
        models={
            title: score([metrics[f"{kind}-{metric}"] for metrics in last.values()], metric)  # type: ignore[arg-type]
            for kind, title in _KINDS.items()
        },
        clustering=clustering_scores(found.theta_norms, data.true_clusters),
        cost=communication_cost(
            len(data.clients),
            sum(sizes.values()) - shared,
            [len(replies) for replies in strategy.train_metrics.values()],
            shared,
        ),
        seconds=seconds,
        rounds=len(strategy.train_metrics),
        engine=engine,
        seed=settings.seed,
        published=published_rows(settings),
        shared_dim=shared,
    )


def _draw(
    out: Path,
    settings: Settings,
    data: FederatedData,
    strategy: FPFC,
    found: FPFCDiagnostics,
    result: Result,
) -> None:
    metric = _metric(data)
    percent = metric == "accuracy"
    series: dict[str, list[tuple[int, float]]] = {title: [] for title in _KINDS.values()}
    for server_round, clients in strategy.evaluate_metrics.items():
        for kind, title in _KINDS.items():
            mean = float(np.mean([metrics[f"{kind}-{metric}"] for metrics in clients.values()]))
            series[title].append((server_round, 100 * mean if percent else mean))
    key = "acc" if percent else "rmse"
    published = {
        f"{method}, published": row[key]
        for method, row in result.published.items()
        if method == result.algorithm and key in row
    }
    plots.metric_over_rounds(
        series,
        ylabel="mean test accuracy of the clients (%)" if percent else "mean test RMSE",
        title=settings.title,
        path=out / "metric.png",
        published=published,
    )
    omega = strategy.state.pairs.omega
    plots.distance_heat_map(
        omega, found.labels, path=out / "distances.png", title="Distances between the client models"
    )
    plots.embedding(
        omega,
        found.labels,
        data.true_clusters,
        path=out / "embedding.png",
        title="The client models in two dimensions",
        seed=settings.seed,
    )


def _print_diagnostics(
    console: Console, settings: Settings, found: FPFCDiagnostics, result: Result
) -> None:
    console.print(
        diagnostics_table(
            found.labels,
            found.theta_norms,
            found.gradient_norms,
            lam=settings.algorithm.lam,
            stationarity=found.stationarity,
            consensus=found.primal_residual,
            clustering=result.clustering,
        )
    )


def _print_summary(
    console: Console,
    settings: Settings,
    data: FederatedData,
    found: FPFCDiagnostics,
    result: Result,
) -> None:
    """Say in two sentences what came out, for somebody who has not read the paper."""
    nus = (settings.algorithm.nu,)
    (row,) = clustering_scores(found.theta_norms, data.true_clusters, nus)
    groups = f"{row.num} group{'' if row.num == 1 else 's'}"
    truth = ""
    if row.ari == 1:
        truth = ", exactly the true ones"
    elif row.ari is not None:
        assert data.true_clusters is not None  # it has a score
        num_true = len(np.unique(data.true_clusters))
        truth = f"; there are {num_true} true ones (ARI {row.ari:.2f}; 1 is a perfect match)"
    unit, scale = (" %", 100) if result.metric == "accuracy" else ("", 1)
    own, one = (
        f"{scale * result.models[_KINDS[kind]].mean:.2f}{unit}" for kind in ("personal", "global")
    )
    measure = "test accuracy" if result.metric == "accuracy" else "test error (RMSE)"
    console.print(
        Text.assemble(
            (f"{result.algorithm} found {groups} among {len(data.clients)} clients", "bold green"),
            f"{truth}. It was not told how many there are.\n",
            f"Mean {measure}: ",
            (own, "bold"),
            " with the clients' own models, ",
            (one, "bold"),
            " with one model for all (their mean).",
        )
    )


def _print_files(console: Console, out: Path) -> None:
    files = {
        "metric.png": "the metric over the rounds",
        "distances.png": "how far apart the client models are",
        "embedding.png": "the client models in two dimensions",
        "result.json": "the numbers above",
        "metrics.jsonl": "every round, with the metrics of every client",
        "experiment.toml": "the settings: run this file for the same numbers",
        "state.safetensors": "the server's state, with all the models",
    }
    console.print(f"Results: [bold]{out.resolve()}[/bold]", soft_wrap=True)
    for file, what in files.items():
        console.print(f"  {file:<18} {what}", highlight=False)
