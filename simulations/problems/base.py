"""A problem: data of one kind, and what clients are made of over them, whatever the method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from flwr.app import ArrayRecord

from ..attacks import LABELS, Attack
from ..settings.section import Section
from ..settings.tables import Settings
from .scores import Metric, ModelScores, ScoreSummary, column_means, score

Metrics = Mapping[str, float]


class Problem(ABC):
    """What is learned in an experiment.

    Parameters
    ----------
    settings : Settings
        The experiment's; `check` has passed them.
    data : object
        What the data set's loader returned, a `data_type`.
    """

    data_type: ClassVar[type]
    """What the loader returns. Its ``clients`` has one entry per client, its ``name`` the data
    set's name."""
    model_table: ClassVar[type[Section] | None] = None
    """The table ``[model]``, where there is one."""
    needs: ClassVar[frozenset[str]]
    """Parameters of a client's constructor by which a client for such data is known."""
    gives: ClassVar[frozenset[str]]
    """All parameters that `client_arguments` has."""

    def __init__(self, settings: Settings, data: Any) -> None:
        self.settings = settings
        self.data = data
        self.newcomers: Self | None = None
        """The clients that were held out, where some were: a problem of its own."""
        table = settings.attack
        self.attack: Attack | None = None if table is None else table.build(seed=settings.seed)
        if (
            self.attack
            and self.attack.kind == LABELS
            and getattr(data, "num_classes", None) is None
        ):
            raise ValueError(
                f"attack.kind is {LABELS!r}, but data set {settings.data.name!r} has no classes: "
                "take another kind."
            )
        self.malicious = self.attack.malicious(self.num_clients) if self.attack else frozenset()
        """The clients that attack, as `self.attack` says."""

    @classmethod
    @abstractmethod
    def check(cls, settings: Settings) -> None:
        """Refuse tables that do not go with such data, before these are loaded.

        Raises
        ------
        ValueError
            The message says which and what to do.
        """

    @staticmethod
    def refuse_samples(settings: Settings, why: str, **more: Any) -> None:
        """Raise ValueError for settings of models that learn from samples, and for `more`."""
        training, report = settings.training, settings.report
        given = {
            "training.batch-size": training.batch_size,
            "training.momentum": training.momentum,
            "training.weight-decay": training.weight_decay,
            "report.metrics": report.metrics,
            "report.loss-variance": report.loss_variance,
            **more,
        }
        if wrong := [name for name, value in given.items() if value]:
            raise ValueError(
                f"data set {settings.data.name!r} {why}: leave {' and '.join(wrong)} out."
            )

    @abstractmethod
    def initial_arrays(self, strategy: Any) -> ArrayRecord:
        """Return what a strategy starts from, a function of the settings alone."""

    @abstractmethod
    def client_arguments(self, client_id: int) -> dict[str, Any]:
        """Return arguments of a client's constructor; those that it does not have are left out."""

    @property
    @abstractmethod
    def metric(self) -> Metric:
        """What heads the results."""

    @property
    def num_clients(self) -> int:
        """The number of clients m."""
        return len(self.data.clients)

    def score_of(self, kind: str, clients: Mapping[int, Metrics]) -> ScoreSummary | None:
        """Return the metric of a kind of model in one evaluation; None where no client has it.

        Clients report ``KIND-METRIC``.
        """
        key = f"{kind}-{self.metric.key}"
        values = [reported[key] for reported in clients.values() if key in reported]
        return score(values, self.metric) if values else None

    def scores(self, kinds: Mapping[str, str], clients: Mapping[int, Metrics]) -> ModelScores:
        """Summarise one evaluation.

        Parameters
        ----------
        kinds : mapping of str to str
            The kinds of models that the method has, with their titles.
        clients : mapping of int to mapping of str to float
            What every client reported.
        """
        found = {title: self.score_of(kind, clients) for kind, title in kinds.items()}
        cells = {title: column_means(clients.values(), kind) for kind, title in kinds.items()}
        return ModelScores(
            models={title: one for title, one in found.items() if one is not None},
            cells={title: means for title, means in cells.items() if means},
        )
