"""What runs the clients of an experiment, and whether that can be."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

_OF_A_CLUSTER = 128  # nodes on a cluster: two for each of 64 CPUs, more than most have

_CONNECT_TIMEOUT = 3.0  # seconds for a cluster to answer; Ray itself would try for two minutes


class Engine(StrEnum):
    """What runs the clients."""

    RAY = "ray"
    INPROCESS = "inprocess"


@dataclass(frozen=True)
class Host:
    """The engine of a run: the options of `simulations run` of these names."""

    engine: Engine = Engine.RAY
    workers: int | None = None
    nodes: int | None = None
    ray_address: str | None = None
    gpus_per_client: float = 0.0

    def check(self) -> None:
        """Raise ValueError for options that exclude each other, or for what is not there."""
        if self.engine is not Engine.RAY:
            given = {"--ray-address": self.ray_address, "--gpus-per-client": self.gpus_per_client}
            if wrong := [f"{name} is {value}" for name, value in given.items() if value]:
                raise ValueError(
                    f"{' and '.join(wrong)}, but --engine is {self.engine.value}, which does not "
                    "use Ray: leave it out. In-process clients use the GPU that client.device says."
                )
        elif self.ray_address is not None:
            self._check_cluster(self.ray_address)
        elif self.gpus_per_client:
            import torch  # here: takes seconds, and all commands import this module

            if not torch.cuda.device_count():  # Ray would wait for it
                raise ValueError(
                    f"--gpus-per-client is {self.gpus_per_client}, but PyTorch finds no CUDA "
                    "device on this machine. Leave it out."
                )

    def _check_cluster(self, address: str) -> None:
        if self.workers:
            raise ValueError(
                f"--workers is {self.workers}, but the cluster at --ray-address {address} has as "
                "many workers as its nodes have CPUs. Leave --workers out, or give `ray start "
                "--num-cpus` on each of them."
            )
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT).close()
        except (OSError, OverflowError, ValueError) as error:
            raise ValueError(
                f"Nothing answers at --ray-address {address} ({error}), expected HOST:PORT. Start "
                "a cluster with `ray start --head` on one machine, which shows it, and `ray start "
                "--address=HOST:PORT` on the others."
            ) from None

    def num_nodes(self, num_clients: int) -> int:
        """Return how many nodes host so many clients; the results do not depend on it.

        A message to a node costs milliseconds, whatever it holds, and Flower's engine more with
        every node. Two nodes a worker, so that none waits long for another.
        """
        if self.nodes is not None:
            return min(self.nodes, num_clients)
        workers = self.workers or os.cpu_count() or 1
        return min(num_clients, 2 * workers if self.ray_address is None else _OF_A_CLUSTER)

    def ray_config(self, verbose: bool) -> dict[str, Any]:
        """Return the backend_config of Flower's engine."""
        init_args: dict[str, Any] = {"include_dashboard": False}
        if self.ray_address is not None:
            init_args = {"address": self.ray_address}
        elif not os.environ.get("RAY_ADDRESS"):
            init_args["address"] = "local"  # not a cluster that another user started here
        if not verbose:
            init_args |= {"log_to_driver": False, "logging_level": "ERROR"}
        if self.workers:
            init_args["num_cpus"] = self.workers
        resources = {"num_cpus": 1, "num_gpus": self.gpus_per_client}
        return {"client_resources": resources, "init_args": init_args}
