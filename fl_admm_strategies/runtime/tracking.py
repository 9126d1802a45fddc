"""What was measured, to experiment trackers and as a table; each needs its package."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from .callbacks import OnRound
from .strategy import StatefulStrategy


def to_tensorboard(strategy: StatefulStrategy, log_dir: str, *, per_client: bool = True) -> OnRound:
    """Return a callback that writes every round to TensorBoard (``pip install tensorboard``).

    Parameters
    ----------
    strategy : StatefulStrategy
        Whose clients' metrics are written.
    log_dir : str
        A folder for each run.
    per_client : bool (default: True)
        Write the metrics of every client as well, as ``client-3/train-loss``.

    Returns
    -------
    callable
        For ``start(on_round=...)``.

    Raises
    ------
    ImportError
        If the package is missing.
    """
    writer = _imported("tensorboard.summary", "tensorboard").Writer(log_dir)

    def on_round(server_round: int, metrics: Mapping[str, float]) -> None:
        for name, value in _scalars(strategy, server_round, metrics, per_client).items():
            writer.add_scalar(name, value, server_round)
        writer.flush()

    return on_round


def to_wandb(strategy: StatefulStrategy, *, per_client: bool = True) -> OnRound:
    """Return a callback that logs every round to the run of ``wandb.init``.

    Parameters, return value and ImportError are those of `to_tensorboard`.

    Raises
    ------
    RuntimeError
        If there is no such run yet.
    """
    wandb = _imported("wandb", "wandb")
    if (own := wandb.run) is None:
        raise RuntimeError(
            "There is no run of Weights & Biases to log to. Call wandb.init(project=..., "
            "config=strategy.settings()) first."
        )

    def on_round(server_round: int, metrics: Mapping[str, float]) -> None:
        own.log(_scalars(strategy, server_round, metrics, per_client), step=server_round)

    return on_round


def to_mlflow(strategy: StatefulStrategy, *, per_client: bool = True) -> OnRound:
    """Return a callback that logs every round to MLflow's active run, or starts one.

    Parameters, return value and ImportError are those of `to_tensorboard`. Letters that MLflow has
    no room for in a name are underscores.
    """
    mlflow = _imported("mlflow", "mlflow")

    def on_round(server_round: int, metrics: Mapping[str, float]) -> None:
        found = _scalars(strategy, server_round, metrics, per_client)
        named = {_mlflow_name(name): value for name, value in found.items()}
        mlflow.log_metrics(named, step=server_round)

    return on_round


def metrics_frame(strategy: StatefulStrategy) -> Any:
    """Return all that was measured in a run as a pandas frame, a row for each number.

    Returns
    -------
    pandas.DataFrame
        With columns ``round``, ``phase`` ("train", "evaluate" or "server"), ``client`` (missing
        for what is aggregated), ``metric`` and ``value``.

    Raises
    ------
    ImportError
        If pandas is missing.

    Examples
    --------
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=60)
    >>> frame = metrics_frame(strategy)
    >>> means = frame[frame["client"].isna()]
    >>> table = means.pivot(index="round", columns=["phase", "metric"], values="value")
    """
    pandas, result = _imported("pandas", "pandas"), strategy.run.record.result
    aggregated = {
        "train": result.train_metrics_clientapp,
        "evaluate": result.evaluate_metrics_clientapp,
        "server": result.evaluate_metrics_serverapp,
    }
    by_client = {"train": strategy.train_metrics, "evaluate": strategy.evaluate_metrics}
    rows: list[tuple[Any, ...]] = [
        (server_round, phase, None, *item)
        for phase, rounds in aggregated.items()
        for server_round, metrics in rounds.items()
        for item in metrics.items()
    ]
    rows += [
        (server_round, phase, client, *item)
        for phase, of_clients in by_client.items()
        for server_round, clients in of_clients.items()
        for client, own in clients.items()
        for item in own.items()
    ]
    frame = pandas.DataFrame(rows, columns=["round", "phase", "client", "metric", "value"])
    return frame.astype({"client": "UInt64"})  # the id of a node is one


def _imported(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{package} is not installed. Do: pip install {package}") from error


def _scalars(
    strategy: StatefulStrategy, server_round: int, metrics: Mapping[str, Any], per_client: bool
) -> dict[str, float]:
    """Return the numbers of a round by name; lists are left out, as no tracker has them as one."""
    found = {name: value for name, value in metrics.items() if not isinstance(value, list)}
    if per_client:
        both = ("train-", strategy.train_metrics), ("", strategy.evaluate_metrics)
        for prefix, rounds in both:
            for client, own in rounds.get(server_round, {}).items():
                found |= {f"client-{client}/{prefix}{name}": v for name, v in own.items()}
    return found


def _mlflow_name(name: str) -> str:
    """Return a metric's name, a client's own choice, as one that MLflow takes."""
    client = re.match(r"client-\d+/", name)
    prefix = client[0] if client else ""
    return prefix + re.sub(r"[^\w -]", "_", name.removeprefix(prefix), flags=re.ASCII)
