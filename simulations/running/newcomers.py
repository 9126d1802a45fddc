"""Clients that were held out of an experiment, and join the groups that its run found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console, RenderableType
from rich.text import Text

from fl_admm_strategies import Local, StatefulStrategy
from fl_admm_strategies.algorithms.fpfc.newcomers import FPFCNewcomers

from ..methods import Federation, baseline_table, client_of, completed, run_here
from ..problems import Problem
from ..problems.scores import ModelScores
from ..reports import Finished, Report
from ..reports.base import NONE
from ..reports.table import small_table

_KINDS = ("personal", "cluster")  # of models, in the table
_MOST_ROWS = 30  # of the table, which fits on a screen or two


def run_newcomers(run: Finished, console: Console) -> tuple[dict[str, ModelScores], Report]:
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
        return {}, Report()
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
    body, found = _render(run, problem, (strategy, joined), (local, alone))
    line = (
        f"New clients: held out of the run, {rounds} rounds each after it. Local: as many from the "
        "initial model, on their data alone."
    )
    report = Report(legend=(line,), body=body, extra={"newcomers": found})
    return {run.title: joined, local.title: alone}, report


def _local(problem: Problem) -> Federation:
    """Return training alone, with the step size and epochs of the experiment's algorithm."""
    kind = type(problem)
    client = client_of(Local, kind)
    assert client is not None  # it learns from all that FPFC learns from
    table = baseline_table(Local, frozenset(), client, kind).model_validate({})
    return Federation(problem, completed(table, problem.settings.algorithm), table.client)


def _last(strategy: StatefulStrategy) -> Mapping[int, Mapping[str, float]]:
    return strategy.evaluate_metrics[max(strategy.evaluate_metrics)]


def _render(
    run: Finished,
    problem: Problem,
    joined: tuple[FPFCNewcomers, ModelScores],
    local: tuple[Local, ModelScores],
) -> tuple[list[RenderableType], dict[str, Any]]:
    strategy = joined[0]
    groups, metric = strategy.groups(), problem.metric
    together, alone = _last(strategy), _last(local[0])
    true, of_group = problem.data.true_clusters, _true_of(run)
    headers = ("True cluster", "Group", metric.header, "of the group", "Local")
    table = small_table("New clients, which the run did not know", "Client", *headers)
    right = 0
    for client, group in groups.items():
        kind = None if true is None else int(true[client])
        right += kind is not None and group is not None and of_group.get(group) == kind
        values = [together.get(client, {}).get(f"{k}-{metric.key}") for k in _KINDS]
        values.append(alone.get(client, {}).get(f"personal-{metric.key}"))
        if client < _MOST_ROWS:
            table.add_row(
                str(client),
                NONE if kind is None else str(kind + 1),
                "alone" if group is None else str(group),
                *(NONE if value is None else metric.text(value) for value in values),
            )
    if len(groups) > _MOST_ROWS:
        table.add_row("...", "", "", "", "", "")
    without = sum(group is None for group in groups.values())
    sentence = f"{len(groups) - without} of {len(groups)} new clients joined a group"
    if true is not None and without < len(groups):
        sentence += f", {right} of them that of their kind"
    group_mean, own_mean, alone_mean = (
        metric.text(scores.models[method.kinds[kind]].mean, unit=True)
        for (method, scores), kind in (
            (joined, "cluster"),
            (joined, "personal"),
            (local, "personal"),
        )
    )
    sentence += (
        f". Mean {metric.measure} of their groups' models: {group_mean}, of their own: {own_mean}, "
        f"alone on their own data: {alone_mean}. The models of the run are as they were."
    )
    found = {
        "groups": groups,
        "right": right if true is not None else None,
        "clients": {client: dict(metrics) for client, metrics in together.items()},
        "alone": {client: dict(metrics) for client, metrics in alone.items()},
    }
    return [table, Text(sentence)], found


def _true_of(run: Finished) -> dict[int, int]:
    """Return the true cluster of most of a group's clients, by group."""
    true = run.problem.data.true_clusters
    if true is None:
        return {}
    members: dict[int, list[int]] = {}
    for client, group in run.strategy.models().cluster_of.items():
        members.setdefault(group, []).append(int(true[client]))
    return {group: int(np.bincount(reported).argmax()) for group, reported in members.items()}
