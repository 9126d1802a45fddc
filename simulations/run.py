"""One run of an experiment: train, write down every round, compare, report."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import datetime
from itertools import compress
from pathlib import Path

from flwr.serverapp import Grid
from rich.console import Console
from safetensors.numpy import save_file

from fl_admm_strategies.runtime.checkpoints import lock_folder

from . import plots
from .algorithms import Experiment
from .baselines import Baseline, run_baselines
from .config import RunConfig
from .report import Report, Result, Score, results_table, write_metrics_line, write_result
from .settings import Settings, changed_settings, load_experiment, load_settings, published_rows

_SETTINGS = "experiment.toml"
_CHECKPOINTS = "checkpoints"


def prepare(config: RunConfig) -> Experiment:
    """Load an experiment's settings and data, and build its strategy and what it starts from.

    Raises
    ------
    ValueError, FileNotFoundError
        If settings or data are not usable, or do not go together.
    """
    settings, data = load_experiment(config)
    strategy = settings.algorithm.strategy(
        settings,
        data,
        fraction_train=settings.training.fraction_train,
        min_available_nodes=len(data.clients),
        seed=settings.seed,
    )
    return Experiment(settings, data, strategy, settings.algorithm.initial_arrays(settings, data))


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
        If the run to resume is still going on, or not one reply, or not one evaluation, of the
        whole run was usable.
    """
    experiment = prepare(config)
    out = results_folder(config, experiment.settings)
    with lock_folder(out / _CHECKPOINTS):  # until the last file is written
        return _run_in(out, grid, config, experiment, engine, console)


def _run_in(
    out: Path,
    grid: Grid,
    config: RunConfig,
    experiment: Experiment,
    engine: str,
    console: Console,
) -> Result:
    settings, strategy = experiment.settings, experiment.strategy
    if changed := _changed(out, settings):
        differences = "; ".join(f"{key} {how}" for key, how in changed.items())
        console.print(
            f"Resuming with other settings: {differences}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    written = out / f"{_SETTINGS}.part"
    written.write_text(settings.to_toml(), encoding="utf-8")
    written.replace(out / _SETTINGS)  # whole or not at all, should the run be killed here
    path = out / "metrics.jsonl"
    earlier = None  # seconds of what is resumed, once it is known where

    began = time.monotonic()
    with path.open("a", encoding="utf-8") as file:

        def on_round(server_round: int, metrics: Mapping[str, float]) -> None:
            nonlocal earlier, began
            if earlier is None:
                earlier = _drop_from(path, server_round)
                began -= earlier
            write_metrics_line(
                file,
                {
                    "round": server_round,
                    "seconds": time.monotonic() - began,
                    "bytes": strategy.traffic[server_round]._asdict(),
                    "metrics": metrics,
                    "clients": {
                        "train": strategy.train_metrics.get(server_round, {}),
                        "evaluate": strategy.evaluate_metrics.get(server_round, {}),
                    },
                },
            )

        strategy.start(
            grid,
            experiment.arrays,
            num_rounds=settings.training.num_rounds,
            evaluate_every=settings.training.evaluate_every,
            stop=settings.algorithm.stop_rule(experiment),
            on_round=on_round,
            checkpoint_dir=out / _CHECKPOINTS,
            checkpoint_every=settings.training.checkpoint_every,
            resume=config.resume,
        )
    seconds = time.monotonic() - began
    save_file(strategy.state_dict(), out / "state.safetensors")
    if not strategy.evaluate_metrics:
        raise RuntimeError(
            f"no client could evaluate a model, so there is nothing to report. The models are in "
            f"{out}; the warnings above say why."
        )
    baselines = run_baselines(experiment, console)
    evaluated = strategy.evaluate_metrics
    curves = {
        server_round: settings.algorithm.scores(experiment.data, clients)
        for server_round, clients in evaluated.items()
    }
    cells: dict[str, Mapping[str, float | None]] = {
        **settings.algorithm.cells(evaluated[max(evaluated)]),
        **{baseline.title: baseline.cells for baseline in baselines},
    }
    report = settings.algorithm.report(experiment, out)
    for row, more in report.cells.items():
        cells[row] = {**cells.get(row, {}), **more}
    result = Result(
        experiment=Path(config.experiment).stem,
        algorithm=settings.algorithm.title,
        data=experiment.data.name,
        metric=settings.algorithm.metric(experiment.data),
        models=curves[max(curves)],
        traffic=strategy.traffic,
        seconds=seconds,
        rounds=len(strategy.train_metrics),
        engine=engine,
        seed=settings.seed,
        published=published_rows(settings),
        baselines={baseline.title: baseline.score for baseline in baselines},
        cells=cells,
        note=report.note,
        legend=report.legend,
        extra=report.extra,
    )
    write_result(out / "result.json", result)
    _draw_metric(out, settings.title, curves, baselines, result)
    console.print(results_table(result))
    console.print()
    for part in report.body:
        console.print(part)
        console.print()
    _print_files(console, out, report)
    return result


def _drop_from(path: Path, server_round: int) -> float:
    """Remove the rounds of a metrics file that come again; return the seconds of those before."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [json.loads(line) for line in lines if line.endswith("\n")]  # a kill may cut the last
    kept = [record["round"] < server_round for record in whole]
    path.write_text("".join(compress(lines, kept)), encoding="utf-8")
    return max((record["seconds"] for record in compress(whole, kept)), default=0.0)


def results_folder(config: RunConfig, settings: Settings) -> Path:
    """Make the folder of a run, or find that of the run to resume.

    Raises
    ------
    ValueError
        If a folder has something in it that is not to be resumed, or the run to resume has another
        seed, other data, another model or another algorithm.
    RuntimeError
        If the run in the folder is still going on.
    """
    wanted, name = config.out, Path(config.experiment).stem
    if config.resume and wanted is None:
        started = sorted(Path("runs").glob(f"{name}-[0-9]*"), key=lambda p: p.stat().st_mtime)
        unfinished = [folder for folder in started if not (folder / "result.json").exists()]
        wanted = unfinished[-1] if unfinished else None
    if wanted is not None:
        if not config.resume and wanted.exists() and any(wanted.iterdir()):
            raise ValueError(
                f"the results folder {wanted} is not empty; give another --out, or --resume to "
                "continue the run in it"
            )
        if other := [f"{k} {how}" for k, how in _changed(wanted, settings).items() if _fixed(k)]:
            raise ValueError(
                f"{wanted} is of another run: {'; '.join(other)}. Resume it with the --profile, "
                "--set and --seed that it was started with, or give another --out, or leave "
                "--resume out to start a new run."
            )
        wanted.mkdir(parents=True, exist_ok=True)
        if config.resume:
            with lock_folder(wanted / _CHECKPOINTS):
                pass  # nobody is in it, which is better known before an engine is started
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


def _changed(folder: Path, settings: Settings) -> dict[str, str]:
    """Return how settings differ from those of the run in a folder; empty where there is none."""
    path = folder / _SETTINGS
    return changed_settings(load_settings(str(path)), settings) if path.exists() else {}


def _fixed(key: str) -> bool:
    """Return whether a run cannot go on with another value of a setting."""
    return key in ("seed", "algorithm.name") or key.startswith(("data.", "model."))


def _draw_metric(
    out: Path,
    title: str,
    curves: Mapping[int, Mapping[str, Score]],
    baselines: list[Baseline],
    result: Result,
) -> None:
    metric = result.metric
    # The kinds of model of any round: a kind may appear late, where nobody had it at first.
    series: dict[str, list[tuple[int, float]]] = {
        kind: [
            (server_round, metric.scale * scores[kind].mean)
            for server_round, scores in curves.items()
            if kind in scores
        ]
        for kind in dict.fromkeys(kind for scores in curves.values() for kind in scores)
    }
    for baseline in baselines:
        series[f"{baseline.title}, run here"] = [
            (server_round, metric.scale * score.mean) for server_round, score in baseline.curve
        ]
    published = {
        f"{method}, published": row[metric.published]
        for method, row in result.published.items()
        if method == result.algorithm and metric.published in row
    }
    plots.metric_over_rounds(
        series, ylabel=metric.axis, title=title, path=out / "metric.png", published=published
    )


def _print_files(console: Console, out: Path, report: Report) -> None:
    files = {
        "metric.png": "the metric over the rounds",
        **report.files,
        "result.json": "the numbers above",
        "metrics.jsonl": "every round, with the metrics of every client",
        _SETTINGS: "the settings: run this file for the same numbers",
        "state.safetensors": "the server's state, with all the models",
    }
    console.print(f"Results: [bold]{out.resolve()}[/bold]", soft_wrap=True)
    for file, what in files.items():
        console.print(f"  {file:<18} {what}", highlight=False)
