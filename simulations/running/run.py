"""One run of an experiment: train, write down every round, compare, report."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from errno import EACCES
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid
from rich.console import Console
from safetensors.numpy import save_file

from clients.toolkit.solving.solvers import one_thread
from fl_admm_strategies import Models
from fl_admm_strategies.runtime.models import FOLDER as MODELS_FOLDER
from fl_admm_strategies.runtime.saving.files import lock_folder, replacing

from ..experiments.loading import changed_settings, load_experiment, load_settings
from ..experiments.run_config import RunConfig
from ..methods import FedAvg, Federation, History, Method, completed, grid_of, run_method
from ..methods.measures import legend
from ..problems import Problem
from ..reports import (
    Experiment,
    Finished,
    MethodReport,
    Report,
    Result,
    plots,
    report_of,
    results_table,
    row_of,
    write_metrics_line,
    write_result,
    write_text,
)
from ..settings.constructor import Built
from ..settings.tables import Settings, published_rows
from .host import Engine, Host
from .newcomers import run_newcomers

_SETTINGS = "experiment.toml"
CHECKPOINTS = "checkpoints"


def prepare(config: RunConfig) -> Experiment:
    """Load an experiment's settings and data, and build its strategy and what it starts from.

    Raises
    ------
    ValueError, FileNotFoundError
        If settings or data are not usable, or do not go together.
    """
    problem = load_experiment(config)
    settings = problem.settings
    federation, report = _federation(problem, settings.algorithm, settings.client)
    federation = replace(federation, fixed={**federation.fixed, **report.fixed})
    strategy = federation.strategy()
    for table in settings.baselines.methods().values():  # what is wrong with one is said now
        _federation(problem, completed(table, settings.algorithm), table.client)[0].strategy()
    return Experiment(federation, report, strategy, federation.initial_arrays(strategy))


def federations(config: RunConfig) -> dict[str, Federation]:
    """Return the methods of an experiment by name: its own first, then those of ``[baselines]``."""
    experiment = prepare(config)
    problem, settings = experiment.problem, experiment.settings
    found = {settings.algorithm.name: experiment.federation}
    for name, table in settings.baselines.methods().items():
        found[name], _ = _federation(problem, completed(table, settings.algorithm), table.client)
    return found


def _federation(problem: Problem, method: Built, client: Built) -> tuple[Federation, MethodReport]:
    """Return a method over a problem, with the defaults that the data decide, and its report."""
    report = report_of(type(method).builds, type(problem))
    defaults = report.defaults(problem)
    missing = {name: value for name, value in defaults.items() if getattr(method, name) is None}
    return Federation(problem, method, client, missing), report


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
        whole run was usable; once all is written, if a method of ``[baselines]`` came to no end.
    """
    experiment = prepare(config)
    out = results_folder(config, experiment.settings)
    with lock_folder(out / CHECKPOINTS):  # until the last file is written
        return _run_in(out, grid, config, experiment, engine, console)


def _run_in(
    out: Path,
    grid: Grid,
    config: RunConfig,
    experiment: Experiment,
    engine: str,
    console: Console,
) -> Result:
    settings, strategy, problem = experiment.settings, experiment.strategy, experiment.problem
    if changed := _changed(out, settings):
        differences = "; ".join(f"{key} {how}" for key, how in changed.items())
        console.print(
            f"Resuming with other settings: {differences}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    write_text(out / _SETTINGS, settings.to_toml())
    training = settings.training
    with _recorded(out / "metrics.jsonl", strategy) as (on_round, seconds_so_far):
        history = run_method(
            problem,
            strategy,
            grid,
            experiment.arrays,
            num_rounds=training.num_rounds,
            title=experiment.report.title(strategy),
            evaluate_every=training.evaluate_every,
            stop=experiment.report.stop_rule(experiment),
            on_round=on_round,
            checkpoint_dir=out / CHECKPOINTS,
            checkpoint_every=training.checkpoint_every,
            resume=config.resume,
            collect=training.collect_models,
        )
        seconds = seconds_so_far()
    state = strategy.state_dict()
    with replacing(out / "state.safetensors", sum(a.nbytes for a in state.values())) as written:
        save_file(state, written)
    models = strategy.models()
    models.save(out / MODELS_FOLDER)
    if not history.rounds:
        raise RuntimeError(
            f"no client could evaluate a model, so there is nothing to report. The models are in "
            f"{out}; the warnings above say why."
        )
    baselines, failed = _run_baselines(experiment, out, console)
    newcomers = run_newcomers(experiment, console)
    finished = Finished(experiment, history.last, seconds, out)
    report = experiment.report.report(finished)
    cells = dict(history.last.cells)
    for row, more in report.cells.items():
        cells[row] = {**cells.get(row, {}), **more}
    result = Result(
        experiment=Path(config.experiment).stem,
        algorithm=history.title,
        data=problem.data.name,
        metric=problem.metric,
        models=history.last.models,
        traffic=strategy.traffic,
        seconds=seconds,
        rounds=len(strategy.train_metrics),
        engine=engine,
        seed=settings.seed,
        published=published_rows(settings),
        cells=cells,
        baselines={own.title: own.last for own in baselines},
        new_clients=newcomers.scores,
        note=report.note,
        legend=(
            *_attack_legend(problem),
            *report.legend,
            *legend(settings.report),
            *newcomers.legend,
        ),
        extra={**_attack_extra(problem), **report.extra, **newcomers.extra},
    )
    write_result(out / "result.json", result)
    _draw_metric(finished, history, baselines, result, report.levels)
    console.print(results_table(result))
    console.print()
    for part in (*report.body, *newcomers.body):
        console.print(part)
        console.print()
    _print_files(console, out, report, settings, models)
    if failed:
        errors = "\n".join(f"{name}: {error}" for name, error in failed.items())
        raise RuntimeError(
            "the results above are complete but for the baselines that came to no end; the same "
            f"command with --resume runs only the baselines again.\n{errors}"
        )
    return result


def _attack_legend(problem: Problem) -> list[str]:
    """Say who was malicious, where anybody was."""
    if not problem.malicious or problem.attack is None:
        return []
    return [
        f"Malicious: {len(problem.malicious)} of {problem.num_clients} clients "
        f"({problem.attack.kind}); all numbers are of the others."
    ]


def _attack_extra(problem: Problem) -> dict[str, Any]:
    if not problem.malicious or problem.attack is None:
        return {}
    return {"attack": problem.attack.kind, "malicious": sorted(problem.malicious)}


def _run_baselines(
    experiment: Experiment, out: Path, console: Console
) -> tuple[list[History], dict[str, Exception]]:
    """Run the methods of ``[baselines]`` after the experiment, in this process whatever its engine.

    They have its problem, seed and start, and as many rounds as it had; so their numbers are the
    same on all engines. Why a method came to no end is returned by its name: what the others
    measured is not lost with it.
    """
    found: list[History] = []
    failed: dict[str, Exception] = {}
    for name in experiment.settings.baselines.methods():
        console.print(f"For comparison, on the same data: {name} ...", highlight=False)
        try:
            found.append(_run_baseline(name, experiment, out / _metrics_file(name)))
        except (RuntimeError, ValueError) as error:
            failed[name] = error
    return found, failed


def _run_baseline(name: str, experiment: Experiment, path: Path) -> History:
    problem, settings = experiment.problem, experiment.settings
    num_rounds = max(experiment.strategy.traffic)
    table = settings.baselines.methods()[name]
    method = completed(table, settings.algorithm)
    federation, _ = _federation(problem, method, table.client)
    strategy = federation.strategy()
    path.unlink(missing_ok=True)
    one_each = issubclass(method.builds, FedAvg)
    nodes = Host(Engine.INPROCESS).num_nodes(problem.num_clients, one_each=one_each)
    with (
        one_thread(),
        grid_of(federation, nodes) as grid,
        _recorded(path, strategy) as (on_round, _),
    ):
        history = run_method(
            problem,
            strategy,
            grid,
            federation.initial_arrays(strategy),
            num_rounds=num_rounds,
            evaluate_every=settings.training.evaluate_every,
            on_round=on_round,
        )
    if num_rounds not in history.rounds:
        raise RuntimeError("no client could evaluate a model; the errors above say why.")
    return history


@contextmanager
def _recorded(
    path: Path, strategy: Method
) -> Iterator[tuple[Callable[[int, Mapping[str, float]], None], Callable[[], float]]]:
    """Open a file of rounds; yield what writes one, and what says how long the run has taken.

    Where a resumed run reports rounds again, their lines are replaced; the seconds go on from the
    last line that is kept.
    """
    earlier: float | None = None  # seconds of what is resumed, once it is known where
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

        def seconds() -> float:
            # Of a resumed run that had all of its rounds, none is reported again.
            done = _drop_from(path, sys.maxsize) if earlier is None else 0.0
            return done + time.monotonic() - began

        yield on_round, seconds


def _drop_from(path: Path, server_round: int) -> float:
    """Remove the rounds of a metrics file that come again; return the seconds of those before."""
    size, seconds = 0, 0.0
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):  # a kill may cut the last
            break
        record = json.loads(line)
        if record["round"] >= server_round:
            break
        size, seconds = size + len(line), record["seconds"]
    os.truncate(path, size)
    return float(seconds)


def results_folder(config: RunConfig, settings: Settings) -> Path:
    """Make the folder of a run, or find that of the run to resume.

    Raises
    ------
    ValueError
        If there can be no such folder, or it has something in it that is not to be resumed, or the
        run to resume has another seed, other data, another model or another algorithm.
    RuntimeError
        If the run in the folder is still going on.
    """
    try:
        return _results_folder(config, settings)
    except OSError as error:
        raise ValueError(_no_folder(config.out or Path("runs"), error)) from None


def _no_folder(folder: Path, error: OSError) -> str:
    """Say why there can be no results folder, and what to do."""
    why = (error.strerror or str(error)).lower()
    if isinstance(error, NotADirectoryError | FileExistsError):
        file = next((p for p in (folder, *folder.parents) if p.is_file()), None)
        why = why if file is None else f"{file} is a file"
    return f"the results folder {folder} cannot be used: {why}. Give a folder to write to as --out."


def _results_folder(config: RunConfig, settings: Settings) -> Path:
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
        if not os.access(wanted, os.W_OK):
            raise PermissionError(EACCES, os.strerror(EACCES))
        if config.resume:
            with lock_folder(wanted / CHECKPOINTS):
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


def _metrics_file(baseline: str) -> str:
    return f"metrics-{baseline}.jsonl"


def _draw_metric(
    run: Finished,
    history: History,
    baselines: list[History],
    result: Result,
    levels: Mapping[str, float],
) -> None:
    own = _curves(history, result)
    compared = {
        row_of(baseline.title, kind): curve
        for baseline in baselines
        for kind, curve in _curves(baseline, result).items()
    }
    if compared:  # whose is whose
        own = {row_of(history.title, kind): curve for kind, curve in own.items()}
    published = {
        f"{method}, published: {row[result.metric.published]:g}": row[result.metric.published]
        for method, row in result.published.items()
        if method == result.algorithm and result.metric.published in row
    }
    plots.metric_over_rounds(
        {**own, **compared},
        ylabel=result.metric.axis,
        picture=run.picture("metric.png"),
        compared=compared,
        levels={**published, **levels},
    )


def _curves(history: History, result: Result) -> dict[str, list[tuple[int, float]]]:
    """Return the curve of every kind of model."""
    rounds = {server_round: scores.models for server_round, scores in history.rounds.items()}
    return {
        kind: [
            (server_round, result.metric.scale * models[kind].mean)
            for server_round, models in rounds.items()
            if kind in models
        ]
        # Of any round: a kind may appear late, where nobody had it at first.
        for kind in dict.fromkeys(kind for models in rounds.values() for kind in models)
    }


def _print_files(
    console: Console, out: Path, report: Report, settings: Settings, models: Models
) -> None:
    kinds = {"global": models.global_ is not None, "cluster": models.clusters}
    there = " and ".join(
        kind for kind, some in {**kinds, "client": models.personal}.items() if some
    )
    files = {
        "metric.png": "the metric over the rounds",
        **report.files,
        "result.json": "the numbers above",
        "metrics.jsonl": "every round, with the metrics of every client",
        **{
            _metrics_file(name): "the same of a method run for comparison"
            for name in settings.baselines.methods()
        },
        _SETTINGS: "the settings: run this file for the same numbers",
        **({f"{MODELS_FOLDER}/": f"the models ({there}) as safetensors"} if there else {}),
        "state.safetensors": "the server's state, with all the models",
    }
    console.print(f"Results: [bold]{out.resolve()}[/bold]", soft_wrap=True)
    width = max(map(len, files))
    for file, what in files.items():
        console.print(f"  {file:<{width}} {what}", highlight=False)
    if not models.personal and not settings.training.collect_models and "stay" in models.absent:
        console.print(
            "The clients' own models stayed with them. With --set training.collect-models=true\n"
            "they are sent after the last round.",
            style="dim",
            soft_wrap=True,
        )
