"""The data sets by name, and `load`, which checks options and keeps what it loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

from pydantic import TypeAdapter, ValidationError

from fl_admm_strategies.maths.checks import rules_of

from ..settings.imported import imported, is_import
from ..settings.wording import unknown
from .federated import FederatedData, check
from .files import data_root as resolve_root
from .har import uci_har
from .housing_bodyfat import housing_bodyfat
from .images import cifar10, digits, digits_swap, images_swap, mnist_family
from .partitioned import partitioned
from .ratings import MOVIELENS, RatingsData, movielens, synthetic_ratings
from .synthetic import SCENARIOS, synthetic
from .tabular import TabularData, qsar, synthetic_v1

Data: TypeAlias = FederatedData | RatingsData | TabularData
Loader = Callable[..., Data]

# A loader takes (seed, root); its keyword-only parameters are its options.
DATASETS: dict[str, Loader] = {
    "digits-swap": digits_swap,
    **{f"synthetic-{scenario}": partial(synthetic, scenario) for scenario in SCENARIOS},
    "housing-bodyfat": housing_bodyfat,
    "mnist-swap": partial(images_swap, "MNIST", "mnist-swap"),
    "fashion-mnist-swap": partial(images_swap, "FashionMNIST", "fashion-mnist-swap"),
    "digits": partial(partitioned, digits, "digits"),
    "mnist": partial(partitioned, partial(mnist_family, "MNIST"), "mnist"),
    "fashion-mnist": partial(partitioned, partial(mnist_family, "FashionMNIST"), "fashion-mnist"),
    "cifar10": partial(partitioned, cifar10, "cifar10"),
    "uci-har": uci_har,
    **{name: partial(movielens, name) for name in MOVIELENS},
    "synthetic-ratings": synthetic_ratings,
    "synthetic-v1": synthetic_v1,
    "qsar": qsar,
}


def kind_of(name: str) -> type:
    """Return the kind of data that a data set is, without loading it.

    A function of the user's own returns `FederatedData` unless its annotation says otherwise.

    Raises
    ------
    ValueError
        If there is no data set of this name.
    """
    kind: type = get_type_hints(loader_of(name)).get("return", FederatedData)
    return kind


def _loader(name: str) -> Loader:
    if is_import(name):
        return imported("data set", name)
    if name not in DATASETS:
        raise unknown("data set", name, [*DATASETS, "yourmodule:function"])
    return DATASETS[name]


def loader_of(name: str) -> Callable[..., Data]:
    """Return the function that loads a data set, whose docstring says what its options mean."""
    loader = _loader(name)
    while isinstance(loader, partial):
        loader = loader.func
    return loader


def options_of(name: str) -> dict[str, Any]:
    """Return the options of a data set with their defaults."""
    return {
        p.name: p.default
        for p in inspect.signature(_loader(name)).parameters.values()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    }


def checked_options(name: str, options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return all options of a loader, defaults filled in, sorted: the key of the cache.

    Raises
    ------
    ValueError
        If one is unknown, of the wrong kind, or does not pass what its annotation says.
    """
    loader = loader_of(name)
    known, hints, rules = options_of(name), get_type_hints(loader), rules_of(loader)
    for option, value in options.items():
        if option not in known:
            raise unknown(f"option of data set {name}", option, sorted(known))
        kind = hints.get(option, Any)
        try:
            TypeAdapter(kind).validate_python(value, strict=True)  # no text for a number
        except ValidationError:
            wanted = kind.__name__ if isinstance(kind, type) else str(kind).removeprefix("typing.")
            raise ValueError(
                f"option {option} of data set {name} is {value!r}, expected {wanted}."
            ) from None
        if option in rules:
            rules[option](option, value)
    return tuple(sorted((known | options).items()))


@lru_cache(maxsize=2)  # images take 0.2 GB
def _load(name: str, seed: int, root: Path, options: tuple[tuple[str, Any], ...]) -> Data:
    data = _loader(name)(seed, root, **dict(options))
    if is_import(name) and kind_of(name) is FederatedData:
        check(name, data)
    return data


def load(name: str, seed: int, data_root: Path | str | None = None, **options: Any) -> Data:
    """Load a federated data set; a process does so once and shares the copy.

    The result is a function of the arguments (and of the files) alone, so that every worker
    process builds the same.

    Parameters
    ----------
    name : str
        A key of `DATASETS`, or ``module:function``: a function of the user's own with the same
        parameters, ``function(seed, root, *, option=default)``.
    seed : int
        Decides everything random about the data, not negative.
    data_root : Path or str or None
        Folder of the data files; None for ``$FL_ADMM_DATA``, else ``~/.cache/fl-admm-strategies``.
    **options
        Options of the data set, see its loader.

    Returns
    -------
    FederatedData, RatingsData or TabularData
        Samples, ratings or local losses, as the data set has it. Shared: not to be written into.

    Raises
    ------
    ValueError
        If the name, an option or the seed is not valid, or a file is damaged.
    FileNotFoundError
        If a file is missing and cannot be downloaded.
    """
    return _load(name, seed, resolve_root(data_root), checked_options(name, options))
