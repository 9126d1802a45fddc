"""Runs under Flower's legacy API, in both of its ways."""

from __future__ import annotations

from typing import Any

from flwr.app import Context, RecordDict
from flwr.server import LegacyContext, ServerAppComponents, ServerConfig
from flwr.server.workflow import DefaultWorkflow
from flwr.serverapp import Grid, ServerApp

from fl_admm_strategies import LegacyStrategy


def run_workflow(
    grid: Grid, legacy: LegacyStrategy, num_rounds: int, context: Context | None = None
) -> Any:
    """Run Flower's workflow over a grid; return its `History`."""
    own = context or Context(1, 1, {}, RecordDict(), {})
    legacy_context = LegacyContext(own, ServerConfig(num_rounds=num_rounds), strategy=legacy)
    DefaultWorkflow()(grid, legacy_context)
    return legacy_context.history


def with_workflow(legacy: LegacyStrategy, num_rounds: int) -> ServerApp:
    """Return a `ServerApp` with a main function, whose attribute `history` the run sets."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        app.history = run_workflow(grid, legacy, num_rounds, context)  # type: ignore[attr-defined]

    return app


def with_server_fn(legacy: LegacyStrategy, num_rounds: int) -> ServerApp:
    """Return a `ServerApp` with a `server_fn`."""

    def server_fn(context: Context) -> ServerAppComponents:
        return ServerAppComponents(strategy=legacy, config=ServerConfig(num_rounds=num_rounds))

    return ServerApp(server_fn=server_fn)
