"""What an experiment is: the tables of its TOML file."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import tomli_w
from pydantic import Field, SkipValidation

from ..attacks import Attack
from .constructor import Built, table_of
from .section import Section

Published = Literal[
    "accuracy", "rmse", "objective", "num", "ari", "f1", "auc", "cr", "time", "cost"
]
Deviation = Literal["accuracy-std", "rmse-std", "f1-std", "auc-std"]
"""Columns of a published table, and deviations over the paper's seeds: shares in percent, rounds of
communication, seconds on the authors' machine, parameters sent both ways."""


class DataSettings(Section):
    """Which data set, and its options."""

    name: str
    """The data set."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The options of its loader."""


class TrainingSettings(Section):
    """How the federation runs: the same for the algorithm and all baselines."""

    num_rounds: int = Field(ge=1)
    """Rounds of communication."""
    fraction_train: float = Field(default=1.0, gt=0, le=1)
    """Fraction of the clients that train in a round."""
    evaluate_every: int = Field(default=10, ge=1)
    """Evaluate on all clients every so many rounds, and after the last one."""
    batch_size: int | None = Field(default=None, ge=1)
    """Mini-batch size; left out, clients take full-gradient steps."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Momentum of SGD on the clients."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of SGD on the clients, multiplied by the step size, not by a loss's weight."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Write a checkpoint every so many rounds; ``--resume`` continues from the last one."""
    cohort: Literal["auto"] | bool = "auto"
    """Whether the clients of a node train together, as one stack of models. It is faster for small
    models, and equal up to rounding. "auto": from 16 clients on, where the model gains by it."""
    collect_models: bool = False
    """Whether the clients send the personal models that stay with them after the last round."""
    client_state: Literal["context", "folder"] = "context"
    """Where clients keep their state: in Flower's context, which ends with the run, or in the
    results folder, so that a resumed run gives the same bits."""


AttackTable: Any = table_of(Attack, withheld={"seed": "It is seed, for all of the experiment."})
"""The table ``[attack]``: malicious clients, the same for the algorithm and all baselines."""


class AlgorithmTable(Built):
    """The table ``[algorithm]``: the parameters of the strategy's constructor."""

    name: str
    """The method."""


class BaselineTable(Built):
    """A table ``[baselines.NAME]``: likewise, and under ``client`` those of its client."""

    client: SkipValidation[Built]


class Baselines(Section):
    """The table ``[baselines]``: methods to run on the same data for comparison."""

    def methods(self) -> dict[str, BaselineTable]:
        """Return their tables by name, in the order of the file."""
        fields = type(self).model_fields
        return {str(field.alias): getattr(self, name) for name, field in fields.items()}


class ReportSettings(Section):
    """The table ``[report]``: what is measured and shown. A method may have more."""

    metrics: tuple[Literal["f1", "auc"], ...] = ()
    """Test metrics of a classification beside the accuracy: F1 weighted by class, the area under
    the ROC curve."""
    loss_variance: bool = False
    """Report the variance of the test loss over the clients, the fairness of FLAME's paper."""


class NewcomerSettings(Section):
    """The table ``[newcomers]``: clients that the run does not know, and that join it afterwards.

    As in section 6.4.2 of FPFC's paper; `FPFC.newcomers`.
    """

    share: float = Field(default=0.2, gt=0, lt=1)
    """Share of the clients, of every true cluster where these are known."""
    num_rounds: int = Field(default=50, ge=1)
    """Rounds in which each trains and is sent its anchor."""
    published: bool = False
    """The paper's procedure; by default they begin at the model of the group that suits them."""


class Settings(Section):
    """An experiment, complete and checked.

    Which fields the tables `model`, `algorithm`, `client`, `report` and `baselines` have depends on
    the data set and the methods: `loading.load_settings` makes a subclass that has them.
    """

    title: str
    """One line for `python -m simulations list`."""
    seed: int = Field(default=0, ge=0)
    """Seed of all that is random: data, initial model, sampled clients, the clients' batches."""
    data: DataSettings
    model: SkipValidation[Any] = None
    """Left out where the data set has its model."""
    training: TrainingSettings
    algorithm: SkipValidation[AlgorithmTable]
    client: SkipValidation[Built] = Built()
    """Parameters of the clients that their data do not give."""
    attack: AttackTable | None = None
    """Malicious clients; by default there are none. All metrics are of the others."""
    report: SkipValidation[ReportSettings] = ReportSettings()
    baselines: SkipValidation[Baselines] = Baselines()
    newcomers: NewcomerSettings | None = None
    """Clients to hold out until the run is over; by default none."""
    published: dict[str, dict[Published | Deviation, float]] = Field(default_factory=dict)
    """Rows of published tables, by method."""
    profiles: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Named sets of changes, e.g. a short `quick` run: dotted key = value."""

    def to_toml(self) -> str:
        """Return the settings as a file that `load_settings` reads back."""
        return tomli_w.dumps(self.model_dump(by_alias=True, exclude_none=True))


def given(table: Section, without: Collection[str] = ()) -> list[str]:
    """Return ``name=value`` of what is not a table's default."""
    values = {name: getattr(table, name) for name in type(table).model_fields}
    return [
        f"{field.alias}={_text(values[name])}"
        for name, field in type(table).model_fields.items()
        if name not in without and values[name] is not None and values[name] != field.default
    ]


def _text(value: Any) -> str:
    if isinstance(value, Section):
        kind = getattr(value, "type", "")
        return f"{kind}({', '.join(given(value, without=('type',)))})"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
