"""The two halves of the Flower App: a ServerApp that runs an experiment, and its clients.

Given no settings, as `flwr run` loads them, they take the run configuration of their context.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from flwr.app import Context
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from rich.console import Console

from clients import client_app

from ..experiments.experiment import RunConfig, load_experiment, read_run_config
from ..methods import Federation
from .run import PreparedRun, prepare, run_experiment


def make_server_app(run: PreparedRun | None = None) -> ServerApp:
    """Return the ServerApp that runs an experiment on the grid it is given, and reports.

    Parameters
    ----------
    run : PreparedRun, optional
        By default the one of the context's run configuration.
    """
    made = ServerApp()

    @made.main()
    def main(grid: Grid, context: Context) -> None:
        prepared = run or prepare(read_run_config(context.run_config), "flwr run")
        run_experiment(prepared, grid, Console())

    return made


def make_client_app(config: RunConfig | None = None) -> ClientApp:
    """Return the ClientApp with the clients of an experiment.

    Parameters
    ----------
    config : RunConfig, optional
        By default the context's run configuration.
    """
    if config is not None and config.out is not None:  # a worker runs in another folder
        config = replace(config, out=config.out.absolute())

    def config_of(context: Context) -> RunConfig:
        return config or read_run_config(context.run_config)

    return client_app(
        lambda context: _build_client(config_of(context), context),
        num_clients=lambda context: _federation(config_of(context)).problem.num_clients,
        cohort=lambda context: _federation(config_of(context)).problem.settings.training.cohort,
        keep_clients=True,
    )


@lru_cache(maxsize=2)  # a client is built for every message, so settings are read once a process
def _federation(config: RunConfig) -> Federation:
    return load_experiment(config).federation


def _build_client(config: RunConfig, context: Context) -> Client:
    # One thread: the engines run clients side by side, and a sum's bits depend on how many threads
    # share it, so this is also what makes all engines agree.
    torch.set_num_threads(1)
    federation, folder = _federation(config), None
    if federation.problem.settings.training.client_state == "folder":
        if config.out is None:
            raise ValueError("client-state = 'folder' needs a results folder: give out")
        folder = config.out / "clients"
    return federation.build_client(context, folder).to_client()
