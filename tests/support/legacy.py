"""Runs under Flower's legacy API."""

from __future__ import annotations

from typing import Any

from flwr.app import ArrayRecord, Context, RecordDict
from flwr.server import History, ServerAppComponents, ServerConfig
from flwr.serverapp import Grid, ServerApp

from fl_admm_strategies import LegacyServer, StatefulStrategy


class KeepingServer(LegacyServer):
    """A server that keeps its history, as Flower only logs it."""

    def fit(self, num_rounds: int, timeout: float | None) -> tuple[History, float]:
        self.history, seconds = super().fit(num_rounds, timeout)
        return self.history, seconds


def app_of(server: LegacyServer, num_rounds: int) -> ServerApp:
    """Return a `ServerApp` with a `server_fn`."""

    def server_fn(context: Context) -> ServerAppComponents:
        return ServerAppComponents(server=server, config=ServerConfig(num_rounds=num_rounds))

    return ServerApp(server_fn=server_fn)


def run_legacy(
    grid: Grid,
    strategy: StatefulStrategy,
    arrays: ArrayRecord,
    num_rounds: int,
    context: Context | None = None,
    **options: Any,
) -> History:
    """Run a strategy over a grid whose clients are of the legacy API; return Flower's history."""
    server = KeepingServer(strategy, arrays, **options)
    own = context or Context(1, 1, {}, RecordDict(), {})
    app_of(server, num_rounds)(grid=grid, context=own)
    return server.history
