"""The two halves of the Flower App: a ServerApp that runs an experiment, and its clients.

Given no settings, as `flwr run` loads them, they take the run configuration of their context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import torch
from flwr.app import Context
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from rich.console import Console

from clients import client_app
from clients.toolkit.round.app import Cohort

from ..experiments.loading import load_experiment
from ..experiments.run_config import RunConfig, read_run_config
from ..methods import Federation
from .run import run_experiment


def make_server_app(
    run_config: Mapping[str, object] | None = None, *, engine: str = "flwr run"
) -> ServerApp:
    """Return the ServerApp of an experiment: it runs it on the grid that it is given, and reports.

    Parameters
    ----------
    run_config : mapping, optional
        As `read_run_config` takes it; by default that of the context.
    engine : str
        What runs the clients, for the report.
    """
    given = None if run_config is None else read_run_config(run_config)
    made = ServerApp()

    @made.main()
    def main(grid: Grid, context: Context) -> None:
        config = given or read_run_config(context.run_config)
        run_experiment(grid, config, engine=engine, console=Console())

    return made


def make_client_app(run_config: Mapping[str, object] | None = None) -> ClientApp:
    """Return the ClientApp of an experiment: it builds the clients that this asks for.

    Parameters
    ----------
    run_config : mapping, optional
        As `read_run_config` takes it; by default that of the context.
    """
    given = None if run_config is None else read_run_config(run_config)
    if given is not None and given.out is not None:  # a worker's folder may be another
        given = replace(given, out=given.out.absolute())

    def config_of(context: Context) -> RunConfig:
        return given or read_run_config(context.run_config)

    return client_app(
        lambda context: _build_client(config_of(context), context),
        num_clients=lambda context: _federation(config_of(context)).problem.num_clients,
        cohort=lambda context: _cohort(config_of(context)),
    )


@lru_cache(maxsize=2)  # a client is built for every message, so settings are read once a process
def _federation(config: RunConfig) -> Federation:
    problem = load_experiment(config)
    return Federation(problem, problem.settings.algorithm, problem.settings.client)


def _cohort(config: RunConfig) -> Cohort:
    return _federation(config).cohort


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
