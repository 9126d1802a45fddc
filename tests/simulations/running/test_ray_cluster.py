"""Clients on a Ray cluster of several nodes: here two, both on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from simulations.experiments.experiment import RunConfig
from simulations.running import cli
from tests.simulations.quick_runs import run
from tests.support.federation import assert_same_bits
from tests.support.refusals import names

ROOT = Path(__file__).parents[3]
FEW = ("training.num-rounds=2",)
pytestmark = pytest.mark.usefixtures("flower_logger_as_before")


@pytest.fixture(scope="module")
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


def simulations(folder: Path, *arguments: str) -> None:
    """Run a command of the app in a folder; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "simulations", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_on_a_cluster_has_the_bits_of_one_in_this_process(
    address: str, tmp_path: Path
) -> None:
    here = run(RunConfig("digits-fpfc", changes=FEW, out=tmp_path / "here"), nodes=1)
    options = ("--ray-address", address, "--set", *FEW, "--out", "there")
    simulations(tmp_path, "run", "digits-fpfc", *options)
    assert_same_bits(
        load_file(tmp_path / "there" / "state.safetensors"), load_file(here / "state.safetensors")
    )


@pytest.mark.parametrize(
    ("address", "options"),
    [
        ("127.0.0.1:1", ["--engine", "inprocess"]),
        ("127.0.0.1:1", ["--workers", "2"]),
        ("127.0.0.1:1", []),  # where nobody answers
        ("auto", []),
        ("ray://127.0.0.1:10001", []),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(address: str, options: list[str]) -> None:
    arguments = ["run", "digits-fpfc", "--ray-address", address, *options]
    result = CliRunner().invoke(cli.cli, arguments)
    assert result.exit_code == 1
    assert names(result.output, "--ray-address", address, *options[:1])
