"""The ClientApp: it builds the client that an experiment asks for.

``app`` is the one `flwr run` loads and takes its settings from the run configuration;
`make_client_app` is the same with the settings given, for engines without a run configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import torch
from flwr.app import Context
from flwr.client import Client
from flwr.clientapp import ClientApp

from clients import client_app
from clients.toolkit.round.app import Cohort

from .config import RunConfig, read_run_config
from .loading import load_experiment
from .methods import Federation


@lru_cache(maxsize=2)  # a client is built for every message, so settings are read once a process
def _federation(config: RunConfig) -> Federation:
    problem = load_experiment(config)
    return Federation(problem, problem.settings.algorithm, problem.settings.client)


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


def _num_clients(config: RunConfig) -> int:
    return _federation(config).problem.num_clients


def _cohort(config: RunConfig) -> Cohort:
    return _federation(config).cohort


def make_client_app(run_config: Mapping[str, object]) -> ClientApp:
    """Return the ClientApp of an experiment, whatever context it runs in."""
    config = read_run_config(run_config)
    if config.out is not None:  # a worker's folder may be another
        config = replace(config, out=config.out.absolute())
    return client_app(
        lambda context: _build_client(config, context),
        num_clients=lambda _: _num_clients(config),
        cohort=lambda _: _cohort(config),
    )


app = client_app(
    lambda context: _build_client(read_run_config(context.run_config), context),
    num_clients=lambda context: _num_clients(read_run_config(context.run_config)),
    cohort=lambda context: _cohort(read_run_config(context.run_config)),
)
