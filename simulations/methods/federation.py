"""Both halves of a method over a problem, and how they are run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from torch import nn

from clients import client_app
from clients.toolkit.solving.solvers import one_thread
from fl_admm_strategies import InProcessGrid, StatefulStrategy
from fl_admm_strategies.runtime.common.settings import parameters_of

from ..attacks import AttackingClient
from ..problems import Problem
from ..problems.scores import ModelScores
from ..settings.constructor import Built
from .measures import finished

_NODES = 2 * (os.cpu_count() or 1)  # the results do not depend on it


@dataclass(frozen=True)
class Federation:
    """A method with its settings, and the problem that it is to solve.

    Attributes
    ----------
    problem : Problem
    method : Built
        The table of the strategy's constructor.
    client : Built
        That of its client's.
    """

    problem: Problem
    method: Built
    client: Built

    def strategy(self, **more: Any) -> Any:
        """Build the strategy; `more` come before the settings."""
        settings = self.problem.settings
        decided = {
            "fraction_train": settings.training.fraction_train,
            "min_available_nodes": self.problem.num_clients,
            "seed": settings.seed,
        }
        known = parameters_of(type(self.method).builds)
        if getattr(self.method, "fraction_train", None) is not None:
            del decided["fraction_train"]  # a baseline's own
        decided = {name: value for name, value in decided.items() if name in known}
        return self.method.build(**{**decided, **more})

    def initial_arrays(self, strategy: Any) -> ArrayRecord:
        """Return what a strategy starts from: the problem's, unless its clients need two heads."""
        if self._heads is None:
            return self.problem.initial_arrays(strategy)
        model = self._with_heads(self.problem.client_arguments(0)["model"])
        return ArrayRecord(model.state_dict())

    @property
    def _heads(self) -> Any:
        """The kind of model with two heads that the clients take; None where any will do."""
        return getattr(type(self.client).builds, "heads", None)

    def _with_heads(self, model: nn.Module) -> nn.Module:
        """Return a model as the clients take it; what is new in it is of the seed."""
        if self._heads is None:
            return model
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.problem.settings.seed)
            two_headed: nn.Module = self._heads.of(model)
        return two_headed

    def build_client(self, context: Context, state_dir: Path | None = None) -> NumPyClient:
        """Build the client ``context.node_config["partition-id"]``."""
        given = {
            "context": context,
            "state_dir": state_dir,
            **self.problem.client_arguments(int(context.node_config["partition-id"])),
        }
        known = parameters_of(type(self.client).builds)
        if "model" in given:
            given["model"] = self._with_heads(given["model"])
        client: NumPyClient = self.client.build(**{k: v for k, v in given.items() if k in known})
        client_id = int(context.node_config["partition-id"])
        if self.problem.attack is not None and client_id in self.problem.malicious:
            return AttackingClient(client, self.problem.attack, client_id)
        return client


@dataclass(frozen=True)
class ScoreHistory:
    """What the models of a method scored.

    Attributes
    ----------
    title : str
        The method's.
    rounds : dict of int to ModelScores
        By round, as far as it was evaluated.
    """

    title: str
    rounds: dict[int, ModelScores]

    @property
    def last(self) -> ModelScores:
        """The scores after the last round."""
        return self.rounds[max(self.rounds)]


def run_method(
    problem: Problem,
    strategy: StatefulStrategy,
    grid: Grid,
    arrays: ArrayRecord,
    *,
    num_rounds: int,
    title: str | None = None,
    **options: Any,
) -> ScoreHistory:
    """Run a method on a grid; return what its models scored, round by round.

    Parameters
    ----------
    problem : Problem
        Says what is measured.
    strategy : StatefulStrategy
        Holds the state and every client's metrics of every round afterwards.
    grid : Grid
        Of any engine, with the method's clients.
    arrays : ArrayRecord
        What it starts from.
    num_rounds : int
    title : str, optional
        By default the strategy's.
    **options
        Further ones of `StatefulStrategy.start`.
    """
    strategy.start(grid, arrays, num_rounds, **options)
    rounds = {
        server_round: problem.scores(strategy.kinds, clients)
        for server_round, clients in strategy.evaluate_metrics.items()
    }
    if rounds:
        last = max(rounds)
        rounds[last] = finished(problem, strategy, rounds[last], strategy.evaluate_metrics[last])
    return ScoreHistory(title or strategy.title, rounds)


def run_here(
    federation: Federation,
    strategy: StatefulStrategy,
    arrays: ArrayRecord | None = None,
    *,
    num_rounds: int,
    around: Callable[[ClientApp], Any] = lambda app: app,
    **options: Any,
) -> ScoreHistory:
    """Run a method in this process, whatever engine its experiment has; see `run_method`.

    It starts from what its federation does, and is evaluated as often as its settings say, unless
    `arrays` and ``evaluate_every`` are given. `around` may put something between the server's
    messages and the clients' app.

    Raises
    ------
    RuntimeError
        If the models were not evaluated after the last round.
    """
    problem = federation.problem
    options = {"evaluate_every": problem.settings.training.evaluate_every, **options}
    start = federation.initial_arrays(strategy) if arrays is None else arrays
    cohort = problem.settings.training.cohort
    app = client_app(federation.build_client, num_clients=problem.num_clients, cohort=cohort)
    with one_thread(), InProcessGrid(around(app), min(_NODES, problem.num_clients)) as grid:
        history = run_method(problem, strategy, grid, start, num_rounds=num_rounds, **options)
    if strategy.last_round not in history.rounds:
        raise RuntimeError(
            "no client could evaluate a model after the last round; the errors above say why."
        )
    return history
