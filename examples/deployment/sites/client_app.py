"""What runs at a site."""

from pathlib import Path

from flwr.app import Context
from torch import nn

from clients import FedADMMClient, FLAMEClient, FPFCClient, accuracy, client_app

from .task import load_data, make_model

CLIENTS = {
    "fpfc": FPFCClient,
    "async-fpfc": FPFCClient,
    "flame": FLAMEClient,
    "fedadmm": FedADMMClient,
}


def client_fn(context: Context):
    """Return the client of a site; where its data and its state are, its SuperNode knows."""
    train, test = load_data(context.node_config["data"])
    client_class = CLIENTS[context.run_config["strategy"]]
    return client_class(
        context,
        make_model(),
        train,
        nn.CrossEntropyLoss(),
        test_loader=test,
        metrics={"accuracy": accuracy},
        device="auto",  # the site's GPU, where it has one
        state_dir=Path(context.node_config["state"]) / context.run_config["name"],
    )


app = client_app(client_fn)
