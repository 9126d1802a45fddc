"""A cell of a comparison: one method, one seed, one run, one file."""

from __future__ import annotations

import hashlib
import json
import resource
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from flwr.app import Context, Message, MessageType
from flwr.clientapp import ClientApp
from torch import Tensor

from fl_admm_strategies import __version__

from ..data import Data, FederatedData
from ..data.federated import Samples, with_validation
from ..experiments.experiment import baseline_of, load_data, problem_with
from ..experiments.loading import checked
from ..methods import ScoreHistory, run_here
from ..problems import Problem, TorchProblem
from ..reports import as_json, write_text
from ..settings.imported import imported, is_import
from ..settings.tables import Settings


@dataclass(frozen=True)
class Cell:
    """What is run, as a worker process gets it.

    Attributes
    ----------
    alias, method : str
    raw : dict
        The tables of the experiment; the method is its one baseline.
    held_out : bool
        Settings are chosen by validation samples, held out of the training samples where the data
        have none: no run trains on them.
    on_validation : bool
        The models are measured on these: the test samples of the other runs are out of reach.
    data_root : Path or None
    """

    alias: str
    method: str
    raw: dict[str, Any]
    held_out: bool
    on_validation: bool
    data_root: Path | None

    @property
    def seed(self) -> int:
        """The seed of everything random."""
        return int(self.raw.get("seed", 0))

    def path(self, folder: Path) -> Path:
        """Return its file, named by all that the numbers follow from."""
        names = (self.raw["data"]["name"], self.raw.get("model", {}).get("name", ""), self.method)
        facts = [
            json.dumps(self.raw, sort_keys=True, default=str),
            __version__,
            *(_source(name) for name in names if is_import(name)),
            str((self.held_out, self.on_validation)),
        ]
        digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:12]
        kind = "trial" if self.on_validation else "seed"
        return folder / f"{self.alias}-{kind}-{self.seed}-{digest}.json"


@cache
def _source(name: str) -> str:
    """Return the digest of the user's module, so that a changed one is not taken for the same."""
    imported("function", name)
    file = import_module(name.partition(":")[0]).__file__
    return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


class Gradients:
    """Counts the samples whose loss had its gradient computed in training, in every inner step.

    `sizes` are the clients' numbers of training samples.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.count = 0
        self._sizes = sizes
        self._after: dict[int, int] = {}
        self._in_training = False

    def around(self, app: ClientApp) -> Callable[[Message, Context], Message]:
        """Return an app whose messages say whether clients train or adapt to be evaluated."""

        def answer(message: Message, context: Context) -> Message:
            self._in_training = message.metadata.message_type.startswith(MessageType.TRAIN)
            return app(message, context)

        return answer

    def watch(self, loss: Tensor, samples: int) -> None:
        """Count a loss when its gradient is: the mean over samples, or one entry a sample."""
        if not (self._in_training and loss.requires_grad):
            return

        def add(gradient: Tensor) -> None:
            # In a stack of clients one entry a sample; those of the padding have weight 0.
            self.count += samples if loss.ndim == 0 else int(torch.count_nonzero(gradient))

        loss.register_hook(add)  # type: ignore[no-untyped-call]

    def end_round(self, server_round: int, metrics: object) -> None:
        """Note that a round is over."""
        self._after[server_round] = self.count

    def passes(self, train_metrics: Mapping[int, Collection[int]]) -> list[float]:
        """Return by round the passes over its samples that a client made, given who trained."""
        found, before = [], 0
        for server_round, count in self._after.items():
            if met := sum(self._sizes[c] for c in train_metrics.get(server_round, ())):
                found.append((count - before) / met)
            before = count
        return found


def count_gradients(problem: Problem) -> Gradients | None:
    """Have the clients of a problem count their gradients; None where no loss is differentiated."""
    if not isinstance(problem, TorchProblem):
        return None
    gradients = Gradients([len(client.train[1]) for client in problem.data.clients])
    # A stack of clients takes a copy of the loss, which has the hook as well.
    problem.loss_fn.register_forward_hook(
        lambda module, given, loss: gradients.watch(loss, len(given[1]))
    )
    return gradients


def run(cell: Cell) -> dict[str, Any]:
    """Run a cell in this process.

    Returns
    -------
    dict
        What its file holds, see `_measured`.

    Raises
    ------
    ValueError, RuntimeError
        If the method refuses its settings, or its models are not finite in the end.
    """
    settings = checked(cell.raw, cell.alias)
    problem = problem_with(settings, _data(cell, settings))
    gradients = count_gradients(problem)
    federation = baseline_of(problem, cell.method)
    strategy = federation.strategy()
    watching: dict[str, Any] = {}
    if gradients is not None:
        watching = {"around": gradients.around, "on_round": gradients.end_round}
    began = time.process_time()
    history = run_here(federation, strategy, num_rounds=settings.training.num_rounds, **watching)
    measured = _measured(problem, strategy, history)
    return {
        "alias": cell.alias,
        "seed": cell.seed,
        "settings": settings.to_toml(),
        "seconds": time.process_time() - began,
        "memory": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "gradients": None if gradients is None else gradients.count,
        "passes": None if gradients is None else gradients.passes(strategy.train_metrics),
        **measured,
    }


def _data(cell: Cell, settings: Settings) -> Data:
    data = load_data(settings, cell.data_root)
    if not cell.held_out:
        return data
    if not isinstance(data, FederatedData):
        raise ValueError(
            f"tune is given, but data set {settings.data.name!r} has no validation samples: that "
            "is for data of samples. Leave it out."
        )
    data = with_validation(data, settings.seed)
    if cell.on_validation:
        clients = [replace(one, test=cast(Samples, one.validation)) for one in data.clients]
        data = replace(data, clients=clients)
    return data


def _measured(problem: Problem, strategy: Any, history: ScoreHistory) -> dict[str, Any]:
    """Return what a run is compared by.

    ``models`` has the scores after the last round by kind of model, the first of them the main one,
    and every client's value; ``curves`` the means over the clients by round; ``traffic`` the bytes
    down and up by round.
    """
    metric, last = problem.metric, strategy.last_round
    if not strategy.train_metrics.get(last):
        raise RuntimeError(
            f"no upload of round {last}, the last, was usable: the clients' models diverged."
        )
    reported = strategy.evaluate_metrics[last]
    models = {}
    for kind, title in strategy.kinds.items():
        if title not in history.last.models:
            continue
        key = f"{kind}-{metric.key}"
        values = {c: metrics[key] for c, metrics in reported.items() if key in metrics}
        score = history.last.models[title]
        models[title] = {
            **{name: getattr(score, name) for name in ("mean", "std", "worst", "best")},
            "clients": values,
            "cells": history.last.cells.get(title, {}),
        }
    main = next(iter(models))
    if not torch.tensor(float(models[main]["mean"])).isfinite():
        raise RuntimeError(f"the {main} diverged: its {metric.measure} is not finite.")
    curves: dict[str, list[tuple[int, float]]] = {title: [] for title in models}
    for server_round, scores in history.rounds.items():
        for title in models.keys() & scores.models.keys():
            curves[title].append((server_round, scores.models[title].mean))
    return {
        "method": history.title,
        "form": strategy.form,
        "data": problem.data.name,
        "num_clients": problem.num_clients,
        "metric": metric.key,
        "models": models,
        "curves": curves,
        "traffic": [(number, *moved) for number, moved in sorted(strategy.traffic.items())],
        "trained": sum(len(clients) for clients in strategy.train_metrics.values()),
    }


def work(cell: Cell, path: Path) -> None:
    """Run a cell in a process of its own and write its file: the numbers, or why there are none."""
    try:
        found = run(cell)
    except Exception as error:
        expected = isinstance(error, ValueError | RuntimeError | OSError)
        kind = "" if expected else f"{type(error).__name__}: "
        found = {"alias": cell.alias, "seed": cell.seed, "error": f"{kind}{error}"}
    write_text(path, as_json(found) + "\n")


def read(path: Path) -> dict[str, Any] | None:
    """Read a cell's file; None where there is none."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # a file that is cut short is none
        return None
    return found
