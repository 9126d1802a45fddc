"""The client of Flower's own FedAvg: descend on one's own loss from the model received."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.runtime.messages.records import split_groups

from ..toolkit.round.torch_client import TorchClient
from ..toolkit.solving.objective import LocalObjective
from ..toolkit.solving.steps import MethodSteps, Minimisation, Reply, Scalars, Steps


class SGDClient(TorchClient[Any]):
    """Client of Flower's `FedAvg`, and of any strategy that sends a model and a configuration.

    The configuration has ``lr``, the step size, and ``local-epochs`` (default: 1). Everybody gets
    the same one, so the client's randomness of a round follows from its ``seed`` (default: 0), the
    run's, with the client's id and ``server-round``. Parameters are those of `TorchClient`.

    Examples
    --------
    >>> strategy = FedAvg(fraction_train=0.5)
    >>> config = ConfigRecord({"lr": 0.1, "local-epochs": 3, "seed": 1})
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), train_config=config)
    """

    strategy: ClassVar[Any] = FedAvg

    def run_round(self, parameters: list[NDArray[Any]], config: Scalars) -> Steps[Reply]:
        """Take some epochs from the model received; upload the result.

        Raises
        ------
        ValueError
            If there is no step size, nothing to train on, or the arrays are not of this model.
        """
        self.check_sender(config)
        if "lr" not in config:
            raise ValueError(
                "The message has no setting 'lr', the step size. Start the strategy with "
                'train_config=ConfigRecord({"lr": 0.1, "local-epochs": 1, "seed": 0}).'
            )
        num_examples = self.train_size()
        with self.seeded(config):
            received = self._received(parameters, config)
            upload, metrics = yield from self.steps(received, config)
        return list(upload.values()), num_examples, metrics

    def steps(self, asked: Arrays, config: Scalars) -> MethodSteps:
        """Descend on f_i from a model."""
        self.load(asked)
        epochs = int(config.get("local-epochs", 1))
        metrics = yield Minimisation(LocalObjective(), float(config["lr"]), epochs)
        return self.arrays(), metrics

    def test(self, parameters: list[NDArray[Any]], config: Scalars) -> tuple[float, int, Scalars]:
        """Evaluate the model on the test data: ``global-loss`` and ``global-METRIC``."""
        with self.seeded(config):
            return self.evaluate_models({"global": self._received(parameters, config)})

    def _received(self, parameters: list[NDArray[Any]], config: Scalars) -> Arrays:
        (model,) = split_groups(parameters, config, list(self.arrays())).values()
        return model

    @contextmanager
    def seeded(self, config: Scalars) -> Iterator[None]:
        """Make torch's randomness that of this client in this round."""
        client = int(self.context.node_config.get("partition-id", self.context.node_id))
        words = [int(config.get("seed", 0)), client, int(config.get("server-round", 0))]
        seed = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(1))
        with super().seeded({**config, "seed": seed}):
            yield
