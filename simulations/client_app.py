"""The ClientApp that `flwr run` loads; its settings come from the run configuration."""

from .running.apps import make_client_app

app = make_client_app()
