"""The app as Flower loads it: ``simulations.server_app:app`` and ``simulations.client_app:app``."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from fl_admm_strategies import run_in_process
from simulations import client_app, server_app
from simulations.experiments.experiment import RunConfig
from tests.simulations.quick_runs import TINY, run
from tests.support.federation import assert_same_bits

ROOT = Path(__file__).parents[3]
CHANGES = ("training.num-rounds=4", "training.evaluate-every=2")


@pytest.mark.slow
def test_the_app_takes_its_settings_from_the_run_configuration(tmp_path: Path) -> None:
    made = run(RunConfig("fedadmm-digits", changes=TINY, out=tmp_path / "made"), nodes=4)
    expected = load_file(made / "state.safetensors")
    app = str(tmp_path / "app")
    config = {"experiment": "fedadmm-digits", "set": ";".join(TINY), "out": app}
    run_in_process(server_app.app, client_app.app, 2, run_config=config)
    assert_same_bits(load_file(tmp_path / "app" / "state.safetensors"), expected)


@pytest.fixture
def superlink(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Start a private SuperLink; yield the environment in which `flwr run` finds it."""
    ports = []
    with socket.socket() as first, socket.socket() as second:
        for port in (first, second):
            port.bind(("127.0.0.1", 0))
            ports.append(str(port.getsockname()[1]))
    scripts = str(Path(sys.executable).parent)  # Flower looks for its own commands on the PATH
    env = {
        **os.environ,
        "PATH": scripts + os.pathsep + os.environ["PATH"],
        "FLWR_HOME": str(tmp_path / "flwr"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": ports[0],
        "FLWR_LOCAL_CONTROL_API_PORT": ports[1],
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }
    # Started here as `flwr run` would start it, but as a child that can be stopped again.
    with (tmp_path / "superlink.log").open("w") as log:
        process = subprocess.Popen(
            [
                *("flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess"),
                *("--host", "127.0.0.1", "--port", ports[0]),
                "--disable-runtime-dependency-installation",
            ],
            env=env,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + 60
        while not _is_up(f"http://127.0.0.1:{ports[0]}/health"):
            assert process.poll() is None, (tmp_path / "superlink.log").read_text()
            assert time.monotonic() < deadline, "the SuperLink did not start within a minute"
            time.sleep(0.2)
        yield env
    finally:
        process.terminate()
        process.wait(timeout=30)


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1):
            return True
    except (urllib.error.URLError, OSError):
        return False


@pytest.mark.slow
def test_flwr_run_gives_the_bits_of_the_command_line(
    superlink: dict[str, str], tmp_path: Path
) -> None:
    """The command of docs/experiments.md, from the repository's root."""
    made = run(RunConfig("digits-fpfc", changes=CHANGES, out=tmp_path / "made"), nodes=12)
    expected = load_file(made / "state.safetensors")
    out = tmp_path / "flwr run"
    done = subprocess.run(
        [
            *("flwr", "run", ".", "--stream", "--federation-config"),
            "num-supernodes=12 client-resources-num-cpus=1",
            *("--run-config", f"set='{';'.join(CHANGES)}' out='{out}'"),
        ],
        cwd=ROOT,
        env=superlink,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    # Flower's exit code is 0 even for a failed run, so the results speak.
    assert (out / "state.safetensors").is_file(), done.stdout + done.stderr
    assert_same_bits(load_file(out / "state.safetensors"), expected)
    assert f"Results: {out}" in done.stdout
