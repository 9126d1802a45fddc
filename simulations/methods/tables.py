"""The tables of a method: settings from the constructors of its strategy and its client."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from flwr.client import NumPyClient

import clients as client_package
import fl_admm_strategies as library
from clients import MethodClient
from fl_admm_strategies import StatefulStrategy
from fl_admm_strategies.maths.schedules import epochs_in, rate_in
from fl_admm_strategies.runtime.common.settings import parameters_of

from ..problems import PROBLEMS, Problem
from ..settings.constructor import Built, table_of
from ..settings.imported import imported, is_import
from ..settings.tables import AlgorithmTable, BaselineTable
from ..settings.wording import unknown
from .robust import ROBUST

_SPELLED = {
    "AsyncFPFC": "async-fpfc",
    "FedMCADMM": "fedmc-admm",
    "LGFedAvg": "lg-fedavg",
    "LpProj": "lp-proj",
    "LpProjADMM": "lp-proj-admm",
    "MultiKrum": "multi-krum",
    "PFedMeMatched": "pfedme-matched",
}
"""Names that are no class name in small letters."""


def _strategies() -> Iterable[type]:
    for exported in vars(library).values():
        strategy = isinstance(exported, type) and issubclass(exported, StatefulStrategy)
        if strategy and not inspect.isabstract(exported):
            yield exported
    yield from ROBUST


def _name(strategy: type) -> str:
    return _SPELLED.get(strategy.__name__, strategy.__name__.lower())


METHODS: dict[str, type[StatefulStrategy]] = {
    _name(strategy): strategy for strategy in sorted(_strategies(), key=_name)
}
"""The strategies by the name that a file gives them."""


def _is_client(found: object) -> bool:
    return (
        isinstance(found, type) and issubclass(found, MethodClient) and hasattr(found, "strategy")
    )


_EXPORTED = [getattr(client_package, name) for name in client_package.__all__]
CLIENTS: list[type[NumPyClient]] = list(filter(_is_client, _EXPORTED))
"""The clients; each has its strategy as a class attribute."""


def strategy_named(name: str, kind: str = "algorithm") -> type:
    """Return a strategy: one of `METHODS`, or ``module:class``, with its client in that module.

    Raises
    ------
    ValueError
        If there is none of this name; `kind` says what was to be named.
    """
    if is_import(name):
        found: Any = imported(kind, name)
        if isinstance(found, type) and issubclass(found, StatefulStrategy):
            return found
        raise ValueError(f"{kind} {name!r} is no strategy, expected a class of StatefulStrategy.")
    if name not in METHODS:
        raise unknown(kind, name, list(METHODS))
    return METHODS[name]


def client_of(strategy: type, problem: type[Problem]) -> type[NumPyClient] | None:
    """Return the client of a strategy that learns from a kind of data; None if there is none."""
    return next((c for c in _clients_of(strategy) if _learns(c, problem)), None)


def data_of(strategy: type) -> list[type]:
    """Return the kinds of data that a method learns from."""
    clients = _clients_of(strategy)
    return [p.data_type for p in PROBLEMS if any(_learns(client, p) for client in clients)]


def _clients_of(strategy: type) -> list[type[NumPyClient]]:
    """Return the clients of a strategy, or of the nearest one that it derives from."""
    beside = [c for c in vars(sys.modules[strategy.__module__]).values() if _is_client(c)]
    for owner in strategy.__mro__:
        found = [client for client in (*CLIENTS, *beside) if client.strategy is owner]
        if found:
            return found
    return []


def _learns(client: type, problem: type[Problem]) -> bool:
    return problem.needs <= parameters_of(client).keys()


_ALL_CLIENTS = "All clients of the data set take part, training.fraction-train of them in a round."
_CHOSEN = {"max_norm", "privacy", "wire_dtype"}
_OF_THE_RUN = {
    **dict.fromkeys(
        parameters_of(StatefulStrategy).keys() - _CHOSEN, "The app leaves it at its default."
    ),
    "fraction_train": "It is training.fraction-train.",
    "seed": "It is seed, for all of the experiment.",
    **dict.fromkeys(("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"), _ALL_CLIENTS),
    "fraction_evaluate": "All clients evaluate, training.evaluate-every says when.",
}
"""Parameters of a strategy that the app gives, and why a table cannot; a baseline may have a share
of clients of its own."""
_LENT = ("lr", "local_epochs")
"""Parameters that a baseline takes from the algorithm where its table leaves them out."""


@lru_cache
def algorithm_table(strategy: type) -> type[AlgorithmTable]:
    """Return the table ``[algorithm]`` of a strategy."""
    return table_of(strategy, base=AlgorithmTable, withheld=_OF_THE_RUN)


@lru_cache
def client_table(client: type, problem: type[Problem]) -> type[Built]:
    """Return the table ``[client]``: what the problem and the app do not give."""
    withheld = {
        "context": "Flower gives it.",
        "state_dir": "It is training.client-state.",
        **dict.fromkeys(problem.gives, "It follows from [data], [model] and [training]."),
    }
    return table_of(client, withheld=withheld, complete=False)


@lru_cache
def baseline_table(strategy: type, client: type, problem: type[Problem]) -> type[BaselineTable]:
    """Return the table ``[baselines.NAME]`` of a method."""
    of_client = client_table(client, problem)
    return table_of(
        strategy,
        base=BaselineTable,
        withheld={name: why for name, why in _OF_THE_RUN.items() if name != "fraction_train"},
        left_out={*_LENT, "fraction_train"},
        client=(of_client, default_of(of_client)),
    )


def default_of(table: type[Built]) -> Any:
    """Return a table's default as that of a field: no settings, unless some are required."""
    required = any(field.is_required() for field in table.model_fields.values())
    return ... if required else table()


def completed(baseline: BaselineTable, algorithm: AlgorithmTable) -> BaselineTable:
    """Return a baseline's table with the algorithm's step size and epochs where it has none.

    Of ones that change, a baseline that takes none but a number has those of round 1, epochs that
    differ by client those of client 0. The step size of an inner problem (pFedMe, Lp-Proj) is
    another thing: the method's own default.
    """
    lent = {}
    for name in _LENT:
        if name == "lr" and "inner_steps" in baseline.parameters:
            continue
        value = getattr(algorithm, name, None)
        if name not in baseline.parameters or getattr(baseline, name) is not None or value is None:
            continue
        if isinstance(value, Built) and name not in baseline.objects:
            made = value.build()
            value = rate_in(1, made) if name == "lr" else epochs_in(1, 0, made)
        lent[name] = value
    return baseline.model_copy(update=lent)
