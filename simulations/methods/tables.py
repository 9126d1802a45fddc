"""The tables of a method: settings from the constructors of its strategy and its client."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from fl_admm_strategies import SampledStrategy
from fl_admm_strategies.maths.schedules import epochs_in, rate_in
from fl_admm_strategies.runtime.common.settings import parameters_of

from ..problems import Problem
from ..settings.constructor import Built, table_of
from ..settings.tables import AlgorithmTable, BaselineTable

_ALL_CLIENTS = "All clients of the data set take part, training.fraction-train of them in a round."
_CHOSEN = {"max_norm", "privacy", "wire_dtype"}
_OF_THE_RUN = {
    **dict.fromkeys(
        parameters_of(SampledStrategy).keys() - _CHOSEN, "The app leaves it at its default."
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
def algorithm_table(strategy: type, fixed: frozenset[str]) -> type[AlgorithmTable]:
    """Return the table ``[algorithm]`` of a strategy.

    Parameters
    ----------
    strategy : type
    fixed : frozenset of str
        Parameters that the app sets.
    """
    return table_of(
        strategy,
        base=AlgorithmTable,
        withheld={**_OF_THE_RUN, **dict.fromkeys(fixed, "The app's report needs it as it is.")},
    )


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
