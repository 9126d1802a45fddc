"""What the app asks of an algorithm, and how most of the algorithms answer.

An algorithm of the app is the table ``[algorithm]`` of an experiment: its settings, and methods
that build the strategy, a client and the report out of them. Running, writing and comparing are
the app's, once, and know no algorithm by name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient
from pydantic import Field
from torch import nn

from clients import accuracy, rmse
from clients.toolkit.torch_client import MetricFn
from fl_admm_strategies.runtime.strategy import Metrics, StatefulStrategy, StopRule
from simulations.data import ClientData, FederatedData, full_batch, minibatches
from simulations.models import build, initialise, loss_of
from simulations.report import METRICS, Metric, Report, Score, column_means, score
from simulations.section import Section

if TYPE_CHECKING:
    from simulations.settings import Settings


@dataclass(frozen=True)
class Experiment:
    """An experiment that is ready to run, or has run.

    Attributes
    ----------
    settings : Settings
        All of the file, with the changes.
    data : object
        What the data set's loader returned, e.g. `FederatedData`.
    strategy : StatefulStrategy
        The algorithm's; after the run it holds the state and all metrics.
    arrays : ArrayRecord
        What the strategy starts from.
    """

    settings: Settings
    data: Any
    strategy: StatefulStrategy
    arrays: ArrayRecord


class Algorithm(Section):
    """Base of the settings of every algorithm: the table ``[algorithm]`` of an experiment.

    In all methods `settings` is the whole experiment and `data` what its data set's loader
    returned, of the type `data_type`.
    """

    data_type: ClassVar[type] = FederatedData
    """What the algorithm learns from; an experiment with other data is refused."""
    models: ClassVar[Mapping[str, str]] = {
        "personal": "personal model",
        "global": "one global model",
    }
    """The groups of the strategy's `evaluate_orders` that are reported, and their titles."""

    name: str

    @property
    @abstractmethod
    def title(self) -> str:
        """The algorithm's name as the published tables have it."""

    @abstractmethod
    def strategy(self, settings: Settings, data: Any, **base: Any) -> StatefulStrategy:
        """Build the strategy; `base` are the parameters of `StatefulStrategy`."""

    @abstractmethod
    def initial_arrays(self, settings: Settings, data: Any) -> ArrayRecord:
        """Return what the strategy starts from, a function of the settings alone."""

    @abstractmethod
    def client(self, context: Context, settings: Settings, data: Any) -> NumPyClient:
        """Build the client ``context.node_config["partition-id"]``."""

    @abstractmethod
    def metric(self, data: Any) -> Metric:
        """Return what heads the results; clients report it as ``KIND-METRIC``."""

    def check(self, settings: Settings, data: Any) -> None:
        """Refuse an experiment that cannot run.

        Raises
        ------
        ValueError
            If the data are not what the algorithm learns from, or a part of the file does not go
            with it.
        """
        if not isinstance(data, self.data_type):
            raise ValueError(
                f"data set {settings.data.name!r} is {type(data).__name__}, algorithm "
                f"{self.name!r} learns from {self.data_type.__name__}: use another data set or "
                "another algorithm."
            )
        if settings.baselines is not None and not isinstance(self, TorchAlgorithm):
            raise ValueError(
                f"[baselines] train a PyTorch model, algorithm {self.name!r} has none: leave the "
                "table out."
            )

    def stop_rule(self, experiment: Experiment) -> StopRule | None:
        """Return when the run ends early; it may read ``experiment.strategy``. None: never."""
        return None

    def scores(self, data: Any, clients: Mapping[int, Metrics]) -> dict[str, Score]:
        """Summarise one evaluation round by model title: the table's rows, the curves' points.

        Parameters
        ----------
        data : object
            What the run learned from.
        clients : mapping of int to mapping of str to float
            What every client reported.
        """
        metric = self.metric(data)
        found = {
            title: [own[key] for own in clients.values() if (key := f"{kind}-{metric.key}") in own]
            for kind, title in self.models.items()
        }
        return {title: score(values, metric) for title, values in found.items() if values}

    def cells(self, clients: Mapping[int, Metrics]) -> dict[str, dict[str, float]]:
        """Return the table's further columns that the clients of a round reported themselves."""
        found = {title: column_means(clients.values(), k) for k, title in self.models.items()}
        return {title: means for title, means in found.items() if means}

    def report(self, experiment: Experiment, out: Path) -> Report:
        """Say what the metric's table and curves do not; draw plots of one's own into `out`."""
        return Report()


class TorchAlgorithm(Algorithm):
    """Base of the algorithms that train the model of the table ``[model]`` on samples."""

    lr: float
    local_epochs: int = Field(default=10, ge=1)

    @abstractmethod
    def torch_client(
        self, context: Context, model: nn.Module, own: ClientData, **local: Any
    ) -> NumPyClient:
        """Build a client of `model`; `local` are the other parameters of `TorchClient`."""

    def client(self, context: Context, settings: Settings, data: Any) -> NumPyClient:
        """Build the client of a partition over the model, the data and the loss they ask for."""
        client_id = int(context.node_config["partition-id"])
        return self.torch_client(
            context,
            _model(settings, data),
            data.clients[client_id],
            **local_problem(settings, data, client_id),
        )

    def initial_arrays(self, settings: Settings, data: Any) -> ArrayRecord:
        """Return the model's initial weights."""
        assert settings.model is not None  # `check` has seen to it
        model = initialise(_model(settings, data), settings.seed, settings.model.init)
        return ArrayRecord(model.state_dict())

    def test_metrics(self, data: FederatedData) -> dict[str, MetricFn]:
        """Return what is measured on the test data; a name in `COLUMNS` becomes a column."""
        return {"accuracy": accuracy} if data.task == "classification" else {"rmse": rmse}

    def metric(self, data: Any) -> Metric:
        """Return the accuracy of a classification, the RMSE of a regression."""
        return METRICS["accuracy" if data.task == "classification" else "rmse"]

    def check(self, settings: Settings, data: Any) -> None:
        """Refuse what cannot run, an experiment without a model among it."""
        super().check(settings, data)
        if settings.model is None:
            raise ValueError(
                f"[model] is missing: algorithm {self.name!r} trains a PyTorch model, e.g. "
                'name = "softmax".'
            )


def local_problem(settings: Settings, data: FederatedData, client_id: int) -> dict[str, Any]:
    """Return a client's data, loss and metrics as the parameters of `TorchClient`."""
    assert isinstance(settings.algorithm, TorchAlgorithm)
    assert settings.model is not None  # `check` has seen to it
    own, batch_size = data.clients[client_id], settings.training.batch_size
    return {
        "train_loader": full_batch(*own.train)
        if batch_size is None
        else minibatches(*own.train, batch_size),
        "loss_fn": loss_of(settings.model.name),
        "test_loader": full_batch(*own.test),
        "metrics": settings.algorithm.test_metrics(data),
        "full_batch": batch_size is None,
    }


def _model(settings: Settings, data: FederatedData) -> nn.Module:
    assert settings.model is not None  # `check` has seen to it
    return build(settings.model.name, data)
