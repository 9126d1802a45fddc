"""The ServerApp that `flwr run` loads; its settings come from the run configuration."""

from .running.apps import make_server_app

app = make_server_app()
