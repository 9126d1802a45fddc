"""Both halves of a method over a problem, and how they are run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient
from flwr.serverapp import Grid

from clients import AttackingClient, client_app
from fl_admm_strategies import InProcessGrid, Models
from fl_admm_strategies.runtime.callbacks import StopRule
from fl_admm_strategies.runtime.messages import Metrics
from fl_admm_strategies.runtime.record import Traffic
from fl_admm_strategies.runtime.settings import parameters_of

from ..problems import Problem
from ..scores import ModelScores
from ..settings import Built


class Method(Protocol):
    """What the app asks of a strategy. Every `StatefulStrategy` has it, and the app's `FedAvg`."""

    @property
    def kinds(self) -> Mapping[str, str]:
        """The kinds of models and their titles."""

    @property
    def title(self) -> str:
        """The name in tables."""

    @property
    def train_metrics(self) -> Mapping[int, Mapping[int, Metrics]]:
        """Metrics by round and client."""

    @property
    def evaluate_metrics(self) -> Mapping[int, Mapping[int, Metrics]]:
        """Likewise."""

    @property
    def traffic(self) -> Mapping[int, Traffic]:
        """Bytes by round."""

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = ...,
        *,
        evaluate_every: int = ...,
        stop: StopRule | None = ...,
        on_round: Callable[[int, Mapping[str, float]], None] | None = ...,
        progress: bool | None = ...,
        checkpoint_dir: Any = ...,
        checkpoint_every: int = ...,
        resume: bool = ...,
        collect: bool = ...,
    ) -> Any:
        """Run."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state as plain arrays."""

    def models(self) -> Models:
        """Return all models."""


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
    fixed : mapping of str to Any
        Parameters of the strategy that are not the file's to give.
    """

    problem: Problem
    method: Built
    client: Built
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def strategy(self, **more: Any) -> Any:
        """Build the strategy; `more` come before the settings."""
        settings = self.problem.settings
        decided = {
            "fraction_train": settings.training.fraction_train,
            "min_available_nodes": self.problem.num_clients,
            "seed": settings.seed,
        }
        known = parameters_of(type(self.method).builds)
        decided = {name: value for name, value in decided.items() if name in known}
        return self.method.build(**{**decided, **self.fixed, **more})

    def build_client(self, context: Context, state_dir: Path | None = None) -> NumPyClient:
        """Build the client ``context.node_config["partition-id"]``."""
        given = {
            "context": context,
            "state_dir": state_dir,
            **self.problem.client_arguments(int(context.node_config["partition-id"])),
        }
        known = parameters_of(type(self.client).builds)
        client: NumPyClient = self.client.build(**{k: v for k, v in given.items() if k in known})
        client_id = int(context.node_config["partition-id"])
        if self.problem.attack is not None and client_id in self.problem.malicious:
            return AttackingClient(client, self.problem.attack, client_id)
        return client


@dataclass(frozen=True)
class History:
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
    strategy: Method,
    grid: Grid,
    arrays: ArrayRecord,
    *,
    num_rounds: int,
    title: str | None = None,
    **options: Any,
) -> History:
    """Run a method on a grid; return what its models scored, round by round.

    Parameters
    ----------
    problem : Problem
        Says what is measured.
    strategy : Method
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
    evaluated = strategy.evaluate_metrics
    return History(
        title or strategy.title,
        {
            server_round: problem.scores(strategy.kinds, clients)
            for server_round, clients in evaluated.items()
        },
    )


def grid_of(federation: Federation, num_nodes: int) -> InProcessGrid:
    """Return a grid of this process with the clients of a federation on some nodes."""
    app = client_app(federation.build_client, num_clients=federation.problem.num_clients)
    return InProcessGrid(app, num_nodes)
