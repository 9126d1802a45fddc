"""One run of an experiment: train, write down every round, compare, report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flwr.serverapp import Grid
from rich.console import Console
from rich.markdown import Markdown

from fl_admm_strategies import Local, StatefulStrategy
from fl_admm_strategies.runtime.models import FOLDER as MODELS_FOLDER
from fl_admm_strategies.runtime.saving import checkpoints
from fl_admm_strategies.runtime.saving import history as histories
from fl_admm_strategies.runtime.saving.files import link_file, lock_folder

from .. import reports
from ..experiments.experiment import Experiment, RunConfig, load_experiment
from ..methods import (
    Federation,
    ScoreHistory,
    baseline_table,
    client_of,
    completed,
    run_here,
    run_method,
)
from ..problems import Problem
from ..problems.scores import ModelScores
from ..reports import Finished, ReportContent, Result
from . import folder


@dataclass(frozen=True)
class PreparedRun:
    """An experiment, and where its results go.

    Attributes
    ----------
    experiment : Experiment
    out : Path
        The results folder, which is there.
    resume : bool
        Continue the run in that folder, where there is one.
    engine : str
        What runs the clients, for the report.
    """

    experiment: Experiment
    out: Path
    resume: bool
    engine: str


def prepare(config: RunConfig, engine: str) -> PreparedRun:
    """Read all that a run needs, and make or find its folder.

    Raises
    ------
    ValueError, FileNotFoundError
        If settings, data or the folder are not usable, or do not go together.
    RuntimeError
        If the run to resume is still going on.
    """
    experiment = load_experiment(config)
    settings, resume = experiment.settings, config.resume
    out = folder.results_folder(config.out, experiment.name, settings, resume=resume)
    return PreparedRun(experiment, out, resume, engine)


def run_experiment(run: PreparedRun, grid: Grid, console: Console) -> Result:
    """Run an experiment on a grid and write its results folder.

    Parameters
    ----------
    run : PreparedRun
    grid : Grid
        Of any engine, with the clients of the experiment.
    console : Console
        Where the tables go.

    Returns
    -------
    Result
        What ``result.json`` holds.

    Raises
    ------
    RuntimeError
        If not one reply, or not one evaluation, of the whole run was usable; once all is written,
        if a method of ``[baselines]`` came to no end.
    """
    with lock_folder(run.out / folder.CHECKPOINTS):  # until the last file is written
        finished, history = _train(run, grid, console)
        return _report(run, finished, history, console)


def _train(run: PreparedRun, grid: Grid, console: Console) -> tuple[Finished, ScoreHistory]:
    """Run the experiment's method, and save its models."""
    experiment, settings, out = run.experiment, run.experiment.settings, run.out
    federation, training = experiment.federation, settings.training
    strategy = federation.strategy()
    arrays = federation.initial_arrays(strategy)
    if changed := folder.changes_in(out, settings):
        line = f"Resuming with other settings: {'; '.join(changed)}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    reports.write_text(out / folder.SETTINGS, settings.to_toml())
    began = time.monotonic()
    history = run_method(
        experiment.problem,
        strategy,
        grid,
        arrays,
        num_rounds=training.num_rounds,
        title=experiment.report.title(strategy),
        evaluate_every=training.evaluate_every,
        stop=experiment.report.stop_rule(strategy, experiment.problem),
        checkpoint_dir=out / folder.CHECKPOINTS,
        checkpoint_every=training.checkpoint_every,
        resume=run.resume,
        collect=training.collect_models,
    )
    seconds = time.monotonic() - began
    link_file(out / folder.CHECKPOINTS / histories.FILE, out / folder.metrics_file())
    checkpoints.finish(out / folder.CHECKPOINTS, strategy.last_round, out / folder.STATE)
    strategy.models().save(out / MODELS_FOLDER)
    if not history.rounds:
        raise RuntimeError(
            f"no client could evaluate a model, so there is nothing to report. The models are in "
            f"{out}; the warnings above say why."
        )
    finished = Finished(history.title, federation, strategy, arrays, history.last, seconds, out)
    return finished, history


def _report(
    run: PreparedRun, finished: Finished, history: ScoreHistory, console: Console
) -> Result:
    """Run what the experiment compares with, and show and write all that came out."""
    experiment, problem, settings = run.experiment, finished.problem, finished.settings
    strategy = finished.strategy
    baselines, failed = _run_baselines(experiment, max(strategy.traffic), run.out, console)
    new_clients, newcomers = run_newcomers(finished, console)
    report = experiment.report.report(finished)
    legend = [*newcomers.legend, *report.legend]
    extra = {**newcomers.extra, **report.extra}
    if attack := problem.attack if problem.malicious else None:
        legend.append(
            f"Malicious: {len(problem.malicious)} of {problem.num_clients} clients "
            f"({attack.kind}); all numbers are of the others."
        )
        extra |= {"attack": attack.kind, "malicious": sorted(problem.malicious)}
    result = Result(
        experiment=experiment.name,
        algorithm=finished.title,
        data=problem.data.name,
        metric=problem.metric,
        models=history.last.models,
        traffic=strategy.traffic,
        seconds=finished.seconds,
        rounds=len(strategy.train_metrics),
        engine=run.engine,
        seed=settings.seed,
        published=settings.published,
        cells={
            row: {**history.last.cells.get(row, {}), **report.cells.get(row, {})}
            for row in {**history.last.cells, **report.cells}
        },
        baselines={baseline.title: baseline.last for baseline in baselines},
        new_clients=new_clients,
        legend=legend,
        extra=extra,
    )
    reports.write_result(run.out / folder.RESULT, result)
    _draw_metric(finished, history, baselines, result)
    parts = [*reports.results_table(result), *report.body, *newcomers.body]
    console.print(Markdown(reports.as_markdown(parts)))
    console.print(f"Results: [bold]{run.out.resolve()}[/bold]", soft_wrap=True)
    models = strategy.models()
    if not models.personal and "stay" in models.absent:
        line = "The clients' personal models stayed with the clients; with --set"
        console.print(f"{line} training.collect-models=true they are sent after the last round.")
    if failed:
        errors = "\n".join(f"{name}: {error}" for name, error in failed.items())
        raise RuntimeError(
            "the results above are complete, but some baselines failed. The same command with "
            f"--resume runs only the baselines again.\n{errors}"
        )
    return result


def _run_baselines(
    experiment: Experiment, num_rounds: int, out: Path, console: Console
) -> tuple[list[ScoreHistory], dict[str, Exception]]:
    """Run the methods of ``[baselines]`` after the experiment, in this process whatever its engine.

    They have its problem, seed and start, and as many rounds as it had; so their numbers are the
    same on all engines. Why a method came to no end is returned by its name: what the others
    measured is not lost with it.
    """
    found: list[ScoreHistory] = []
    failed: dict[str, Exception] = {}
    for name, federation in experiment.baselines.items():
        console.print(f"For comparison, on the same data: {name} ...", highlight=False)
        try:
            found.append(_run_baseline(federation, num_rounds, out / folder.metrics_file(name)))
        except (RuntimeError, ValueError) as error:
            failed[name] = error
    return found, failed


def _run_baseline(federation: Federation, num_rounds: int, path: Path) -> ScoreHistory:
    strategy = federation.strategy()
    measured, record = histories.History(path), strategy.run.record
    return run_here(
        federation,
        strategy,
        num_rounds=num_rounds,
        on_round=lambda server_round, _: measured.append(record.entry(server_round)),
    )


def _draw_metric(
    run: Finished, history: ScoreHistory, baselines: list[ScoreHistory], result: Result
) -> None:
    """Draw the metric of every kind of model by round; a kind may appear in any round."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for method in (history, *baselines):
        for server_round, scores in method.rounds.items():
            for kind, score in scores.models.items():
                # With baselines beside it a curve says which method it is of.
                name = reports.row_of(method.title, kind) if baselines else kind
                point = server_round, result.metric.scale * score.mean
                curves.setdefault(name, []).append(point)
    own = result.published.get(result.algorithm, {}).get(result.metric.key)
    reports.plots.curves(
        curves,
        ylabel=result.metric.axis,
        picture=run.picture("metric.png"),
        compared=[reports.row_of(one.title, kind) for one in baselines for kind in one.last.models],
        levels={} if own is None else {f"{result.algorithm}, published: {own:g}": own},
        marks=result.extra.get("marks"),
    )


def run_newcomers(run: Finished, console: Console) -> tuple[dict[str, ModelScores], ReportContent]:
    """Let the clients that were held out join after the run, in this process on any engine.

    Then each trains alone, from the experiment's initial model, with the same step size and epochs
    for as many rounds: the row LOCAL of FPFC's Table 3.

    Returns
    -------
    dict of str to ModelScores
        What they score, by what they did; empty where no clients were held out.
    ReportContent
        What there is to say of it.

    Raises
    ------
    RuntimeError
        If not a single one of them could evaluate a model.
    """
    problem, settings = run.problem.newcomers, run.settings
    if problem is None or settings.newcomers is None:
        return {}, ReportContent()
    console.print(f"{problem.num_clients} new clients, each by itself ...", highlight=False)
    rounds = settings.newcomers.num_rounds
    strategy = run.strategy.newcomers(
        published=settings.newcomers.published,
        min_available_nodes=problem.num_clients,
        seed=settings.seed,
    )
    federation, arrays = replace(run.federation, problem=problem), run.strategy.global_arrays
    joined = run_here(federation, strategy, arrays, num_rounds=rounds, evaluate_every=rounds).last
    federation = _local(problem)
    local = federation.strategy(fraction_train=1.0)
    alone = run_here(federation, local, num_rounds=rounds, evaluate_every=rounds).last
    groups = strategy.groups()
    joined_some = sum(group is not None for group in groups.values())
    sentence = (
        f"{joined_some} of {len(groups)} new clients joined a group. The models of the run are as "
        "they were."
    )
    found = {"groups": groups, "clients": _last(strategy), "alone": _last(local)}
    line = (
        f"New clients: held out of the run, {rounds} rounds each after it. Local: as many from the "
        "initial model, on their data alone."
    )
    report = ReportContent(legend=(line,), body=(sentence,), extra={"newcomers": found})
    return {run.title: joined, local.title: alone}, report


def _local(problem: Problem) -> Federation:
    """Return training alone, with the step size and epochs of the experiment's algorithm."""
    kind = type(problem)
    client = client_of(Local, kind)
    assert client is not None  # it learns from all that FPFC learns from
    table = baseline_table(Local, client, kind).model_validate({})
    return Federation(problem, completed(table, problem.settings.algorithm), table.client)


def _last(strategy: StatefulStrategy) -> Mapping[int, Mapping[str, float]]:
    return strategy.evaluate_metrics[max(strategy.evaluate_metrics)]
