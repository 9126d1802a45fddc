"""Methods by name, and the client that goes with each.

A method is known by its class: every strategy that the library exports is one, every client that
`clients` exports names its strategy. There is no list to extend.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from typing import Any

from flwr.client import NumPyClient

import clients as client_package
import fl_admm_strategies as library
from clients import MethodClient
from fl_admm_strategies import StatefulStrategy
from fl_admm_strategies.runtime.common.settings import parameters_of

from ..problems import PROBLEMS, Problem
from ..settings.imported import imported, is_import
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
