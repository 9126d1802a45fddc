"""The ServerApp: it runs an experiment on whatever grid it is given, and reports.

``app`` is the one `flwr run` loads; `make_server_app` is the same with the settings given, for
engines without a run configuration.
"""

from __future__ import annotations

from collections.abc import Mapping

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from rich.console import Console

from .config import RunConfig, read_run_config
from .experiment import run_experiment


def make_server_app(run_config: Mapping[str, object], *, engine: str) -> ServerApp:
    """Return the ServerApp of an experiment.

    Parameters
    ----------
    run_config : mapping
        As `read_run_config` takes it.
    engine : str
        What runs the clients, for the report.
    """
    config = read_run_config(run_config)
    made = ServerApp()

    @made.main()
    def main(grid: Grid, context: Context) -> None:
        _run(grid, config, engine)

    return made


def _run(grid: Grid, config: RunConfig, engine: str) -> None:
    run_experiment(grid, config, engine=engine, console=Console())


app = ServerApp()


@app.main()
def _main(grid: Grid, context: Context) -> None:
    _run(grid, read_run_config(context.run_config), "flwr run")
