"""Clients that were held out of an experiment, and join the groups that its run found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from rich.console import Console, RenderableType
from rich.text import Text

from clients.toolkit.solvers import one_thread
from fl_admm_strategies.algorithms.fpfc_newcomers import FPFCNewcomers

from .host import Engine, Host
from .methods import grid_of, run_method
from .problems import Problem
from .reports import Experiment
from .reports.clusters import small_table
from .scores import ModelScores

TITLE = "New clients"
_MOST_ROWS = 30


@dataclass(frozen=True)
class Joined:
    """What came of the new clients, for the report; all of it is empty where there are none."""

    scores: Mapping[str, ModelScores] = field(default_factory=dict)
    body: Sequence[RenderableType] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


def run_newcomers(experiment: Experiment, console: Console) -> Joined:
    """Let the clients that were held out join after the run, in this process whatever its engine.

    Raises
    ------
    RuntimeError
        If not a single one of them could evaluate a model.
    """
    problem, settings = experiment.problem.newcomers, experiment.settings
    if problem is None or settings.newcomers is None:
        return Joined()
    console.print(f"{problem.num_clients} new clients, each by itself ...", highlight=False)
    strategy = experiment.strategy.newcomers(
        min_available_nodes=problem.num_clients, seed=settings.seed
    )
    num_rounds = settings.newcomers.num_rounds
    nodes = Host(Engine.INPROCESS).num_nodes(problem.num_clients, one_each=False)
    federation = replace(experiment.federation, problem=problem)
    with one_thread(), grid_of(federation, nodes) as grid:
        arrays = experiment.strategy.global_arrays
        history = run_method(
            problem, strategy, grid, arrays, num_rounds=num_rounds, evaluate_every=num_rounds
        )
    if not history.rounds:
        raise RuntimeError("no new client could evaluate a model; the warnings above say why.")
    own = strategy.evaluate_metrics[max(strategy.evaluate_metrics)]
    return _told(experiment, problem, strategy, history.last, own)


def _told(
    experiment: Experiment,
    problem: Problem,
    strategy: FPFCNewcomers,
    scores: ModelScores,
    own: Mapping[int, Mapping[str, float]],
) -> Joined:
    groups, metric = strategy.groups(), problem.metric
    true, of_group = problem.data.true_clusters, _true_of(experiment)
    table = small_table("New clients, which the run did not know")
    for header in ("Client", "True cluster", "Group", metric.header, "of the group"):
        table.add_column(header, justify="right")
    right = 0
    for client, group in groups.items():
        is_right = true is not None and group is not None and of_group.get(group) == true[client]
        right += is_right
        values = [own.get(client, {}).get(f"{k}-{metric.key}") for k in ("personal", "cluster")]
        if client < _MOST_ROWS:
            table.add_row(
                str(client),
                "–" if true is None else str(true[client]),
                "alone" if group is None else str(group),
                *("–" if value is None else metric.text(value, unit=False) for value in values),
            )
    if len(groups) > _MOST_ROWS:
        table.add_row("...", "", "", "", "")
    alone = sum(group is None for group in groups.values())
    sentence = f"{len(groups) - alone} of {len(groups)} new clients joined a group"
    if true is not None:
        sentence += f", {right} of them that of their kind"
    own_mean = scores.models[strategy.kinds["personal"]].mean
    sentence += (
        f". Mean {metric.measure} of their own models: {metric.text(own_mean, unit=True)}. The "
        "models of the run are as they were."
    )
    found = {
        "groups": groups,
        "right": right if true is not None else None,
        "clients": {client: dict(metrics) for client, metrics in own.items()},
    }
    return Joined({TITLE: scores}, (table, Text(sentence)), {"newcomers": found})


def _true_of(experiment: Experiment) -> dict[int, int]:
    """Return the true cluster of most of a group's clients, by group."""
    true = experiment.problem.data.true_clusters
    if true is None:
        return {}
    members: dict[int, list[int]] = {}
    for client, group in experiment.strategy.models().cluster_of.items():
        members.setdefault(group, []).append(int(true[client]))
    return {group: int(np.bincount(own).argmax()) for group, own in members.items()}
