"""Clients that were held out of an experiment, and join the groups that its run found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rich.console import Console

from fl_admm_strategies import Local, StatefulStrategy

from ..methods import Federation, baseline_table, client_of, completed, run_here
from ..problems import Problem
from ..problems.scores import ModelScores
from ..reports import Finished, ReportContent


def run_newcomers(run: Finished, console: Console) -> tuple[dict[str, ModelScores], ReportContent]:
    """Let the clients that were held out join after the run, in this process on any engine.

    Then each trains alone, from the experiment's initial model, with the same step size and epochs
    for as many rounds: the row LOCAL of FPFC's Table 3.

    Returns
    -------
    dict of str to ModelScores
        What they score, by what they did; empty where no clients were held out.
    Report
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
