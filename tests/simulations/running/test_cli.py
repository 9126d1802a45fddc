"""The command line as a person meets it: what it says, and its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from simulations.experiments.loading import load_settings
from simulations.methods import METHODS
from simulations.running import cli
from simulations.running.host import Host
from tests.support.federation import assert_same_bits
from tests.support.refusals import names

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("flower_logger_as_before")


def invoke(*arguments: str) -> tuple[int, str]:
    """Run the command line in this process; return its exit code and all it printed."""
    result = CliRunner().invoke(cli.cli, list(arguments))
    return result.exit_code, result.output


def start(
    *arguments: str, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m simulations`` as a process of its own, from a folder that is not ours."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")}
    return subprocess.run(
        [sys.executable, "-m", "simulations", *arguments],
        cwd=cwd,
        env={**clean, "PYTHONPATH": str(ROOT), "COLUMNS": "80", **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_list_methods_names_every_method_with_its_paper() -> None:
    code, output = invoke("list", "--methods")
    assert code == 0
    lines = output.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(METHODS)
    flat = " ".join(output.split())
    for name, strategy in METHODS.items():
        # Its own, not that of the method it derives from: one line in the class.
        assert vars(strategy).get("paper"), f"{name}: add paper = ... to {strategy.__name__}"
        assert strategy.paper in flat


def test_describe_shows_a_setting_and_names_what_it_does_not_know() -> None:
    code, output = invoke("describe", "digits-fpfc")
    assert code == 0
    settings = tomllib.loads(output)
    assert settings["algorithm"]["penalty"] == "auto"
    assert settings["data"]["options"]["clients"] == 12  # a default of the data set
    code, output = invoke("describe", "synthetic-s1", "--profile", "quik")
    assert code == 1
    assert names(output, "quik", "quick")


@pytest.fixture
def not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that starts an engine; there is no CUDA device."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(cli, "_run", lambda *_: pytest.fail("the run was started"))


@pytest.mark.usefixtures("not_run")
@pytest.mark.parametrize(("out", "why"), [("file", "directory"), ("full", "not empty")])
def test_a_results_folder_that_cannot_be_is_a_sentence(out: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    code, output = invoke("run", "digits-fpfc", "--out", str(tmp_path / out))
    assert code == 1
    assert names(output, tmp_path / out, why, "--out")
    assert "Errno" not in output


@pytest.mark.usefixtures("not_run")
@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        ("digits-fpcf", 1, ["digits-fpcf", "digits-fpfc"]),
        ("housing-bodyfat --data-root .", 1, ["housing.data", "--data-root"]),
        ("digits-fpfc --engine raj", 2, ["raj", "ray", "inprocess"]),
        ("digits-fpfc --gpus-per-client 0.5", 1, ["gpus-per-client", "CUDA"]),
        ("digits-fpfc --gpus-per-client 0.5 --engine inprocess", 1, ["client.device"]),
    ],
)
def test_what_cannot_be_is_said_before_an_engine_starts(
    arguments: str, code: int, named: list[str]
) -> None:
    found, output = invoke("run", *arguments.split())
    assert found == code
    assert names(output, *named)
    assert "Traceback" not in output


def test_workers_and_gpus_are_rays() -> None:
    backend = Host(workers=8, gpus_per_client=0.25).ray_config(verbose=True)
    assert backend["client_resources"] == {"num_cpus": 1, "num_gpus": 0.25}
    assert backend["init_args"]["num_cpus"] == 8


@pytest.mark.slow
def test_a_run_on_ray_shows_no_noise_and_gives_the_bits_of_the_other_engines(
    tmp_path: Path,
) -> None:
    penalty = 'algorithm.penalty={ type = "scad", lam = 0.6 }'  # the search takes more rounds
    few = ("run", "digits-fpfc", "--set", "training.num-rounds=4", "--set", penalty)
    done = start(*few, cwd=tmp_path)  # the defaults: Ray, a node for each client, runs/
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no progress bar where there is no terminal
    first, second, third, *_ = done.stdout.splitlines()
    assert first == load_settings("digits-fpfc").title
    assert second == "12 clients, 4 rounds; starting the engine (ray) ..."
    assert third.startswith("FPFC on digits-fpfc")
    for noise in ("INFO", "WARNING", "DEPRECATED", "ClientAppActor", "ray::", "[ROUND"):
        assert noise not in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if "/runs/" not in line)
    (folder,) = (tmp_path / "runs").glob("digits-fpfc-*")
    assert f"Results: {folder}" in done.stdout
    expected = load_file(folder / "state.safetensors")

    packed = ("--engine", "inprocess", "--workers", "2", "--nodes", "3", "--out", "packed")
    other = start(*few, *packed, cwd=tmp_path)
    assert other.returncode == 0, other.stderr
    assert_same_bits(load_file(tmp_path / "packed" / "state.safetensors"), expected)


@pytest.mark.parametrize(
    ("started", "words"),
    [
        ("/somewhere/bin/fl-admm", "fl-admm run digits-fpfc"),
        ("/somewhere/simulations/__main__.py", "python -m simulations run digits-fpfc"),
    ],
)
def test_what_goes_on_with_a_run_is_the_program_that_started_it(
    started: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [started, "run", "digits-fpfc", "--set", "algorithm.lr=0.1 "])
    command = f"{words} --set 'algorithm.lr=0.1 ' --out {tmp_path} --resume"
    assert f"go on with: {command}" in cli.resuming(tmp_path)
