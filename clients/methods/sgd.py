"""The client of FedAvg; strategy and paper are in `fl_admm_strategies.FedAvg`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_admm_strategies import FedAvg, FedAvgFT
from fl_admm_strategies.algorithms.fedavg import FedAvgInstruction
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.runtime.messages.records import ARRAYS, GROUPS, to_json

from ..toolkit.round.torch_client import TorchClient
from ..toolkit.solving.objective import LocalObjective
from ..toolkit.solving.steps import MethodSteps, Minimisation, Reply, Scalars, Steps


class SGDClient(TorchClient[FedAvgInstruction]):
    """Client of `FedAvg`, and of Flower's own: E epochs from w. It keeps nothing.

    Under Flower's own FedAvg the step size ``lr``, ``local-epochs`` (default: 1) and the run's
    ``seed`` (default: 0) are in ``train_config``. Parameters are those of `TorchClient`.

    Examples
    --------
    >>> strategy = flwr.serverapp.strategy.FedAvg(fraction_train=0.5)
    >>> config = ConfigRecord({"lr": 0.1, "local-epochs": 3, "seed": 1})
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), train_config=config)
    """

    strategy = FedAvg
    instruction = FedAvgInstruction

    def run_round(self, parameters: list[NDArray[Any]], config: Scalars) -> Steps[Reply]:
        """Take part in a round of either FedAvg.

        Raises
        ------
        ValueError
            If there is no step size, nothing to train on, or the arrays are not of this model.
        """
        if "lr" not in config:
            self.check_sender(config)
            raise ValueError(
                "The message has no setting 'lr', the step size. Start the strategy with "
                'train_config=ConfigRecord({"lr": 0.1, "local-epochs": 1, "seed": 0}).'
            )
        if GROUPS not in config:
            plain = {GROUPS: to_json({ARRAYS: self.model_arrays.names}), "local-epochs": 1}
            config = plain | config
        return (yield from super().run_round(parameters, config))

    def steps(self, asked: FedAvgInstruction, config: Scalars) -> MethodSteps:
        """Run x <- x - eta grad f_i(x) from w; upload x."""
        self.load(asked.arrays)
        metrics = yield Minimisation(LocalObjective(), asked.lr, asked.local_epochs)
        return self.arrays(), metrics

    def models(self, parameters: list[NDArray[Any]], config: Scalars) -> dict[str, Arrays]:
        """Return the model of an evaluation, which Flower's FedAvg calls otherwise, by its kind."""
        (model,) = super().models(parameters, config).values()
        return {"global": model}

    def seed(self, config: Scalars) -> None:
        """Make torch's randomness that of this client in this round.

        Flower's own FedAvg sends the run's seed to all clients. A client makes of it the seed that
        a strategy of this library would have sent.
        """
        if "run" not in config:
            client = int(self.context.node_config.get("partition-id", self.context.node_id))
            words = [int(config.get("seed", 0)), client, int(config.get("server-round", 0))]
            seed = np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(1)
            config = {**config, "seed": int(seed)}
        super().seed(config)


class FedAvgFTClient(SGDClient):
    """Client of `FedAvgFT`: trains as FedAvg's, and fine-tunes w to evaluate it. It keeps nothing.

    Parameters are those of `TorchClient`.
    """

    strategy = FedAvgFT
