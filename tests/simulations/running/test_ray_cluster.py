"""Clients on a Ray cluster of several nodes: here two, both on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from simulations.experiments.experiment import RunConfig
from tests.simulations.quick_runs import run
from tests.support.federation import assert_same_bits

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.slow


@pytest.fixture
def address() -> Iterator[str]:
    """Start a head and a worker node with a processor each; return where they are."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patched:
        # Where others look for a cluster on this machine: none of them asked for this one.
        patched.setattr("ray._private.utils.write_ray_address", lambda *_: None)
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
        )
    try:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        cluster.shutdown()


def test_a_run_on_a_cluster_has_the_bits_of_one_in_this_process(
    address: str, tmp_path: Path
) -> None:
    few = "training.num-rounds=2"
    here = run(RunConfig("digits-fpfc", changes=(few,), out=tmp_path / "here"), nodes=1)
    command = ["-m", "simulations", "run", "digits-fpfc", "--set", few, "--out", "there"]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": address},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_bits(
        load_file(tmp_path / "there" / "state.safetensors"), load_file(here / "state.safetensors")
    )
