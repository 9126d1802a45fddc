"""What is compared: the methods, their settings and search spaces, the seeds, as a TOML file."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tomli_w
from pydantic import Field, ValidationError, field_validator

from fl_admm_strategies.runtime.common.settings import parameters_of

from ..data.registry import checked_options
from ..experiments.catalogue import read_toml
from ..experiments.loading import change, checked, explained, raw_settings
from ..methods import strategy_named
from ..settings.section import Section
from ..settings.wording import unknown

_LENGTHS = (("local_epochs", "personal_epochs"), ("local_steps",), ("local_rounds",))
"""Settings by which clients train for longer; a method has one of these lines."""
_SECTIONS = ("data", "model", "training", "algorithm", "client", "attack", "report")


def optuna() -> Any:
    """Return Optuna.

    Raises
    ------
    RuntimeError
        If it is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise RuntimeError(
            "tune needs Optuna, which is not installed: pip install 'fl-admm-strategies[compare]'."
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def space_of(key: str, text: str) -> Any:
    """Return Optuna's distribution for ``log:0.01:1``, ``linear:0:1`` or ``int:1:10``.

    Raises
    ------
    ValueError
        If the text is none of these.
    """
    distributions = optuna().distributions
    kind, *bounds = text.split(":")
    try:
        low, high = bounds
        if kind == "int":
            return distributions.IntDistribution(int(low), int(high))
        if kind in ("log", "linear"):
            return distributions.FloatDistribution(float(low), float(high), log=kind == "log")
    except ValueError:
        pass
    raise ValueError(
        f"tune: {key} is {text!r}, expected log:LOW:HIGH with 0 < LOW <= HIGH, linear:LOW:HIGH or "
        "int:LOW:HIGH."
    )


class ComparisonPlan(Section):
    """A comparison: a TOML file, or the options of the command line."""

    methods: dict[str, dict[str, Any]] = Field(min_length=1)
    """The methods by alias: ``name`` (left out: the alias) and the method's settings. What is left
    out is as in `experiment`'s ``[baselines]``. Or a list of ``METHOD`` and ``ALIAS=METHOD``."""
    experiment: str = "compare"
    """The experiment or TOML file that has the data, the model, the rounds and the settings."""
    profile: str = ""
    """One of its profiles."""
    data: str | None = None
    """Another data set than the experiment's: its name, or ``module:function``."""
    seeds: int | tuple[int, ...] = 5
    """How many seeds, from 0 on, or which."""
    tune: dict[str, str] = Field(default_factory=dict)
    """Spaces by setting: ``lr`` of every method that has it, ``ALIAS.lr`` of one."""
    work: float | None = Field(default=None, gt=0)
    """Gradients of a client in a round, in passes over its samples: the same for all methods, as
    near as whole epochs or steps allow. Left out, epochs are what the settings say."""
    budget: int = Field(default=20, ge=1)
    """Trials in which the settings of each method are tuned, by validation samples."""
    sweep: dict[str, list[Any]] = Field(default_factory=dict)
    """Values by setting, each of which is run: ``attack.ratio``, ``fpfc.nu`` of one method or
    ``nu`` of every one that has it; of several settings all combinations."""
    target: float | None = None
    """A value of the metric: rounds and bytes until the mean over clients was as good."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Changes of the experiment, and of a method by its alias: dotted key = value."""

    @field_validator("methods", mode="before")
    @classmethod
    def _listed(cls, given: Any) -> Any:
        """Turn a list of names into tables."""
        if not isinstance(given, list):
            return given
        named = [str(entry).partition("=") for entry in given]
        aliases = [alias for alias, _, _ in named]
        if twice := [alias for alias in aliases if aliases.count(alias) > 1]:
            raise ValueError(
                f"has {twice[0]!r} twice: give one of them an alias, such as "
                f"{twice[0]}-2={twice[0]}."
            )
        return {alias: {"name": name} if name else {} for alias, _, name in named}

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seeds."""
        return tuple(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds

    @property
    def points(self) -> list[dict[str, Any]]:
        """The combinations of what is swept; one that is empty where nothing is."""
        return [dict(zip(self.sweep, at, strict=True)) for at in product(*self.sweep.values())]

    def only(self, aliases: Sequence[str]) -> ComparisonPlan:
        """Return the comparison of some of its methods.

        Raises
        ------
        ValueError
            If it does not have one of them.
        """
        for alias in aliases:
            if alias not in self.methods:
                raise unknown("method of the comparison", alias, [*self.methods])
        left_out = self.methods.keys() - {*aliases}

        def kept(table: Mapping[str, Any]) -> dict[str, Any]:
            return {k: v for k, v in table.items() if k.partition(".")[0] not in left_out}

        names = ("methods", "tune", "set", "sweep")
        return self.model_copy(update={name: kept(getattr(self, name)) for name in names})

    def method_of(self, alias: str) -> str:
        """Return the name of the method that an alias stands for."""
        return str(self.methods[alias].get("name", alias))

    def spaces_of(self, alias: str) -> dict[str, Any]:
        """Return what is tuned of a method: its own spaces before those of all methods."""
        spaces = {}
        for key, text in self.tune.items():
            owner, dot, setting = key.partition(".")
            if dot and owner == alias:
                spaces[setting] = space_of(key, text)
            elif not dot and self._has(alias, key) and f"{alias}.{key}" not in self.tune:
                spaces[key] = space_of(key, text)
        return spaces

    def _has(self, alias: str, key: str) -> bool:
        return key.replace("-", "_") in parameters_of(strategy_named(self.method_of(alias)))

    def lengths_of(self, alias: str) -> tuple[str, ...]:
        """Return the settings of a method that say how long a client trains in a round."""
        used = parameters_of(strategy_named(self.method_of(alias)))
        lines = (tuple(name for name in names if name in used) for names in _LENGTHS)
        found: tuple[str, ...] = next(filter(None, lines), ())
        return tuple(name.replace("_", "-") for name in found)

    def raw_settings(
        self,
        alias: str,
        seed: int,
        tuned: Mapping[str, Any],
        point: Mapping[str, Any] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Return the experiment of a cell: one baseline alone, which is the method."""
        raw = raw_settings(self.experiment, self.profile, (), seed)
        if self.data is not None:
            raw["data"] = {"name": self.data}
        own = {key: value for key, value in self.methods[alias].items() if key != "name"}
        for key, value in {**self.set, **point}.items():
            owner, dot, setting = key.partition(".")
            if not dot:
                own |= {key: value} if self._has(alias, key) else {}
            elif owner == alias:
                own[setting] = value
            elif owner not in self.methods:
                change(raw, key, copy.deepcopy(value))
        method, algorithm = self.method_of(alias), raw.get("algorithm", {})
        table = dict(raw.get("baselines", {}).get(method, {}))
        if not table and algorithm.get("name") == method:
            table = {key: value for key, value in algorithm.items() if key != "name"}
            table |= {"client": raw["client"]} if "client" in raw else {}
        for key in ("profiles", "published", "newcomers"):
            raw.pop(key, None)
        raw["baselines"] = {method: table}
        for key, value in copy.deepcopy(own | dict(tuned)).items():
            change(table, key, value)
        return raw

    def check(self) -> None:
        """Refuse what cannot be run, before anything runs.

        Raises
        ------
        ValueError
            The message says which alias, key or setting.
        """
        seeds = self.all_seeds
        if not seeds or len({*seeds}) < len(seeds) or min(seeds) < 0:
            raise ValueError(f"seeds is {self.seeds!r}, expected a number > 0, or different seeds.")
        for alias in self.methods:
            if alias in _SECTIONS or not alias.replace("-", "").replace("_", "").isalnum():
                raise ValueError(
                    f"methods: {alias!r} is no alias; take letters, digits, - and _, and no name "
                    "of a section."
                )
            strategy_named(self.method_of(alias), "method")
        for option in ("tune", "set", "sweep"):
            known = [*self.methods] if option == "tune" else [*_SECTIONS, *self.methods]
            for key in getattr(self, option):
                owner, dot, _ = key.partition(".")
                if (dot or option == "set") and owner not in known:
                    raise unknown(f"method or section of --{option}", owner, known)
                if not dot and not any(self._has(alias, key) for alias in self.methods):
                    raise ValueError(f"{option}: none of the methods has a setting {key!r}.")
        for key in (*self.tune, *self.sweep):
            if key in self.tune and key in self.sweep:
                raise ValueError(f"tune and sweep have {key!r} both: leave one of them out.")
            if self.work is not None and any(
                key.rpartition(".")[2] in self.lengths_of(a) for a in self.methods
            ):
                raise ValueError(f"{key!r} follows from work: leave one of them out.")
        if wrong := next((key for key, values in self.sweep.items() if not values), None):
            raise ValueError(f"sweep: {wrong} has no values, expected {wrong}=VALUE,VALUE,...")
        for alias, point in product(self.methods, self.points):
            for end in ("low", "high"):  # both ends, so that no trial is refused
                at = {k: getattr(space, end) for k, space in self.spaces_of(alias).items()}
                raw = self.raw_settings(alias, seeds[0], at, point)
                data = checked(raw, f"{self.experiment}: {alias}").data
                checked_options(data.name, data.options)

    def to_toml(self) -> str:
        """Return it as a file that `read` reads back."""
        return tomli_w.dumps(self.model_dump(by_alias=True, exclude_none=True))


def read(file: Path | None, options: Mapping[str, Any]) -> ComparisonPlan:
    """Read a comparison from a file, with options of the command line before what it has.

    Raises
    ------
    ValueError
        If it is not usable.
    """
    raw = {} if file is None else read_toml(file, "comparison")
    try:
        comparison = ComparisonPlan.model_validate({**raw, **options})
    except ValidationError as error:
        name = "on the command line" if file is None else str(file)
        raise ValueError(explained(f"comparison {name}", error)) from None
    comparison.check()
    return comparison
