"""What runs the clients of an experiment, and whether that can be."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Engine(StrEnum):
    """What runs the clients."""

    RAY = "ray"
    INPROCESS = "inprocess"


@dataclass(frozen=True)
class Host:
    """The engine of a run: the options of `simulations run` of these names.

    With the environment variable ``RAY_ADDRESS`` of Ray it is the cluster there.
    """

    engine: Engine = Engine.RAY
    workers: int | None = None
    nodes: int | None = None
    gpus_per_client: float = 0.0

    def check(self) -> None:
        """Raise ValueError for options that exclude each other, or for what is not there."""
        if not self.gpus_per_client:
            return
        given = f"--gpus-per-client is {self.gpus_per_client}"
        if self.engine is not Engine.RAY:
            raise ValueError(
                f"{given}, but --engine is {self.engine.value}, which does not use Ray. Leave it "
                "out: in-process clients use the GPU that client.device says."
            )
        import torch  # here: takes seconds, and all commands import this module

        if not torch.cuda.device_count():  # Ray would wait for it
            raise ValueError(
                f"{given}, but PyTorch finds no CUDA device on this machine. Leave it out."
            )

    def num_nodes(self, num_clients: int) -> int:
        """Return how many nodes host so many clients; the results do not depend on it.

        A message to a node costs milliseconds, whatever it holds, and Flower's engine more with
        every node. Two nodes a worker, so that none waits long for another.
        """
        wanted = self.nodes or 2 * (self.workers or os.cpu_count() or 1)
        return min(num_clients, wanted)

    def ray_config(self, verbose: bool) -> dict[str, Any]:
        """Return the backend_config of Flower's engine."""
        init_args: dict[str, Any] = {"include_dashboard": False}
        if not os.environ.get("RAY_ADDRESS"):
            init_args["address"] = "local"  # not a cluster that another user started here
        if not verbose:
            init_args |= {"log_to_driver": False, "logging_level": "ERROR"}
        if self.workers:
            init_args["num_cpus"] = self.workers
        resources = {"num_cpus": 1, "num_gpus": self.gpus_per_client}
        return {"client_resources": resources, "init_args": init_args}
