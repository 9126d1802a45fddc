"""A small run for the tests of checkpoints: clients with a memory, and nothing that takes time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.client import NumPyClient
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from clients import client_app
from clients.toolkit.round.memory import Memory
from fl_admm_strategies import FedADMM, InProcessGrid, made_by
from fl_admm_strategies.runtime.messages.records import split_groups

NUM_CLIENTS = 4
ROUNDS = 6  # of a run that is not interrupted


class Averaging(NumPyClient):
    """FedADMM's client for f_i(u) = 1/2 |u - i|^2, which one step of length 1/(alpha + rho) solves.

    It keeps u_i and pi_i/rho, as FedADMM wants it with ``duals="client"``.
    """

    def __init__(self, context: Context, state_dir: str | os.PathLike[str] | None) -> None:
        self.client = int(context.node_config["partition-id"])
        self.memory = Memory(context, state_dir)

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        groups = split_groups(parameters, config)
        w, rule = groups["model"]["x"], json.loads(config["rule"])
        weight = rule["rho"] / rule["share"]
        if "start" in groups:
            held = {"u": groups["start"].get("begin", w), "dual": np.zeros_like(w)}
        else:
            held = self.memory.require(config)
        u = (self.client + weight * (w - held["dual"])) / (1 + weight)
        dual = held["dual"] + (u - w)
        self.memory.keep(config, {"u": u, "dual": dual})
        change = (u - held["u"]) + (u - w)
        return (
            [change],
            10 + self.client,
            {"loss": float(np.square(u - self.client).mean()), **made_by("FedADMM")},
        )

    def evaluate(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        (w,) = parameters
        return float(np.square(w - self.client).mean()), 10, {"steps": 3, **made_by("FedADMM")}


def new_grid(state_dir: str | os.PathLike[str] | None = None) -> InProcessGrid:
    def client_fn(context: Context) -> Any:
        return Averaging(context, state_dir).to_client()

    return InProcessGrid(client_app(client_fn), NUM_CLIENTS)


def new_strategy(**settings: Any) -> FedADMM:
    defaults: dict[str, Any] = {
        "published": True,
        "rho": 0.1,
        "duals": "client",
        "fraction_train": 0.5,
        "fraction_evaluate": 0.5,
        "seed": 1,
    }
    return FedADMM(**defaults | settings)


def first() -> ArrayRecord:
    return ArrayRecord({"x": Array(np.array([0.25, -1.0, 3.0]))})


def centrally(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"first": float(arrays["x"].numpy()[0]), "round": server_round})


def start(
    strategy: FedADMM,
    num_rounds: int,
    *,
    state_dir: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Result:
    options = {"evaluate_fn": centrally, "evaluate_every": 2, **options}
    return strategy.start(new_grid(state_dir), first(), num_rounds, **options)


def measured(strategy: FedADMM, result: Result) -> dict[str, Any]:
    """Return everything that was measured in a run."""
    return {
        "train": strategy.train_metrics,
        "evaluate": strategy.evaluate_metrics,
        "traffic": strategy.traffic,
        "means": [
            {server_round: dict(record) for server_round, record in means.items()}
            for means in (
                result.train_metrics_clientapp,
                result.evaluate_metrics_clientapp,
                result.evaluate_metrics_serverapp,
            )
        ],
        "model": {name: array.numpy().tolist() for name, array in result.arrays.items()},
    }


class Killed(BaseException):
    """Ends a run from the inside, as the end of its process would: nothing is saved."""


def killer(last: int) -> Callable[..., None]:
    """Return an `on_round` that ends the run in a round, before its checkpoint."""

    def on_round(server_round: int, metrics: Any) -> None:
        if server_round == last:
            raise Killed

    return on_round
