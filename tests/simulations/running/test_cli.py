"""The command line as a person meets it: what it says, and its exit code."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.app import Context
from flwr.client import Client
from flwr.clientapp import ClientApp
from safetensors.numpy import load_file
from typer.testing import CliRunner

from clients import client_app
from simulations.experiments.catalogue import experiment_names, read_experiment
from simulations.experiments.loading import load_settings
from simulations.methods import METHODS
from simulations.running import cli
from simulations.running.host import Host
from tests.support.federation import assert_same_bits

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


def test_list_shows_every_experiment_on_80_columns() -> None:
    code, output = invoke("list")
    assert code == 0
    lines = output.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == experiment_names()
    flat = " ".join(output.split())
    for name in experiment_names():
        settings = read_experiment(name)
        profiles = f" profiles: {', '.join(settings['profiles'])}" if "profiles" in settings else ""
        assert f"{name} {settings['title']}{profiles}" in flat


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
    assert "algorithm.penalty = auto" in output
    assert "a cluster (Remark 2)" in " ".join(output.split())
    for arguments, message in (
        (("digits-fpcf",), "unknown experiment 'digits-fpcf'. Did you mean 'digits-fpfc'?"),
        (("synthetic-s1", "--profile", "quik"), "'quik'. Did you mean 'quick'?"),
    ):
        code, output = invoke("describe", *arguments)
        assert code == 1
        assert message in output
        assert "run" not in output


@pytest.mark.parametrize(
    ("engine", "found", "why"),
    [
        ("inprocess", 1, "gpus-per-client is 0.5, but only Ray deals out GPUs"),
        ("ray", 0, "gpus-per-client is 0.5, but PyTorch finds no CUDA device on this machine"),
    ],
)
def test_a_share_of_a_gpu_that_nobody_could_give_is_refused(
    monkeypatch: pytest.MonkeyPatch, engine: str, found: int, why: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: found)
    code, output = invoke("run", "digits-fpfc", "--gpus-per-client", "0.5", "--engine", engine)
    assert code == 1
    assert why in " ".join(output.split())


def test_a_share_of_a_gpu_is_passed_to_ray() -> None:
    backend = Host(workers=8, gpus_per_client=0.25).ray_config(verbose=True)
    assert backend["client_resources"] == {"num_cpus": 1, "num_gpus": 0.25}
    assert Host().ray_config(verbose=True)["client_resources"]["num_gpus"] == 0


@pytest.mark.parametrize(
    ("out", "why"),
    [
        ("file", "{0}/file is a file"),
        ("file/below", "{0}/file is a file"),
        ("n" * 300, "file name too long"),
        ("closed", "permission denied"),
    ],
)
def test_a_results_folder_that_cannot_be_is_a_sentence(
    out: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir()
    # Root may write anywhere, and tests may be run by root.
    shut = lambda path, mode: mode != os.W_OK or Path(path).name != "closed"  # noqa: E731
    monkeypatch.setattr(os, "access", shut)
    monkeypatch.setattr(cli, "_run", lambda *_: pytest.fail("the run was started"))
    folder = tmp_path / out
    code, output = invoke("run", "digits-fpfc", "--out", str(folder))
    assert code == 1
    expected = f"the results folder {folder} cannot be used: {why.format(tmp_path)}. Give a folder"
    assert expected in output
    assert "Errno" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits-fpcf"], "unknown experiment 'digits-fpcf'. Did you mean 'digits-fpfc'?"),
        (["mine.toml"], "there is no experiment file mine.toml"),
        (["digits-fpfc", "--profile", "quick"], "unknown profile of digits-fpfc 'quick'"),
        (
            ["digits-fpfc", "--set", "algorithm.lam=1"],
            "algorithm.lam: is not a parameter of FPFC. Did",
        ),
        (["digits-fpfc", "--set", "training.num-rounds=0"], "training.num-rounds"),
        (["digits-fpfc", "--set", "data.name=digit"], "unknown data set 'digit'. Did you mean"),
        (["digits-fpfc", "--set", "data.options.clinets=3"], "Did you mean 'clients'?"),
        (["digits-fpfc", "--set", "data.options.clients=many"], "option clients of data set"),
        (["digits-fpfc", "--set", "model.name=softmx"], "unknown model 'softmx'"),
        (
            ["synthetic-s4", "--set", "algorithm.penalty.lam=-1"],
            "algorithm.penalty.lam is -1.0, exp",
        ),
        (["digits-fpfc", "--set", "algorithm.nu=0"], "algorithm.nu is 0.0, expected a"),
        (
            ["digits-fpfc", "--set", "baselines.fedprx={}"],
            "unknown baseline 'fedprx'. Did you mean",
        ),
    ],
)
def test_a_bad_experiment_is_refused_before_an_engine_starts(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_run", lambda *_: pytest.fail("the run was started"))
    code, output = invoke("run", *arguments)
    assert code == 1
    assert output.startswith("The run failed. ")
    assert message in output
    assert "Traceback" not in output


def test_an_unknown_engine_is_refused() -> None:
    code, output = invoke("run", "digits-fpfc", "--engine", "raj")
    assert code == 2
    assert "'raj' is not one of 'ray', 'inprocess'" in output


def test_a_missing_data_file_is_one_screen_that_says_where_to_put_it(tmp_path: Path) -> None:
    code, output = invoke("run", "housing-bodyfat", "--data-root", str(tmp_path))
    assert code == 1
    assert f"'housing.data' not found in {tmp_path / 'housing-bodyfat'}. Put it there" in output
    assert "--data-root" in output
    assert "FL_ADMM_DATA" in output
    assert len(output.splitlines()) < 24


def test_a_results_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    code, output = invoke("run", "digits-fpfc", "--engine", "inprocess", "--out", str(tmp_path))
    assert code == 1
    assert "is not empty; give another --out, or --resume" in output
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def _broken_client_app(run_config: object) -> ClientApp:
    def client_fn(context: Context) -> Client:
        raise OSError("the disk is full")

    return client_app(client_fn, num_clients=12)


def test_clients_that_always_fail_fail_the_run_with_their_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simulations.running.apps.make_client_app", _broken_client_app)
    code, output = invoke(
        *("run", "digits-fpfc", "--engine", "inprocess", "--out", str(tmp_path / "out")),
        *("--set", "training.num-rounds=3"),
    )
    assert code == 1
    assert "The last refusal: client 11" in output
    assert "the disk is full" in output


# A rate of 1e30 makes every client return infinity or NaN.
DIVERGING = ("run", "digits-fpfc", "--set", "algorithm.lr=1e30")


@pytest.mark.slow
def test_on_ray_a_run_that_fails_in_every_round_says_so_in_one_screen(tmp_path: Path) -> None:
    done = start(*DIVERGING, "--set", "training.num-rounds=8", "--nodes", "2", cwd=tmp_path)
    assert done.returncode == 1
    assert len((done.stdout + done.stderr).splitlines()) < 24
    assert "client 0 refused: 'weight' holds NaN or infinity" in done.stderr
    assert "more warnings follow; --verbose shows them all" in done.stderr
    assert "The run failed. No client could train in the first " in done.stderr
    assert "Traceback" not in done.stderr


def test_verbose_shows_flowers_messages_and_the_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = (*DIVERGING, "--set", "training.num-rounds=2", "--engine", "inprocess")
    result = CliRunner().invoke(cli.cli, [*short, "--verbose", "--out", str(tmp_path / "a")])
    assert result.exit_code == 1
    assert isinstance(result.exception, RuntimeError)  # Python prints its traceback
    shown = [record.getMessage() for record in caplog.records]
    assert any("Starting FPFC strategy" in message for message in shown)
    assert sum("refused" in message for message in shown) == 2 * 6

    caplog.clear()
    code, output = invoke(*short, "--out", str(tmp_path / "b"))
    assert code == 1
    assert "The run failed. " in output
    assert "The last refusal: client " in output
    assert not any(record.levelno < logging.WARNING for record in caplog.records)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "telemetry"),
    [({}, "0"), ({"FLWR_TELEMETRY_ENABLED": "1"}, "1")],
)
def test_telemetry_is_off_unless_the_user_turns_it_on(
    env: dict[str, str], telemetry: str, tmp_path: Path
) -> None:
    # What Flower has read at import, and what the processes of Ray inherit.
    program = (
        "import os, runpy, sys\n"
        "sys.argv = ['simulations', 'list']\n"
        "try: runpy.run_module('simulations', run_name='__main__', alter_sys=True)\n"
        "except SystemExit: pass\n"
        "from flwr.supercore.telemetry import FLWR_TELEMETRY_ENABLED as read\n"
        "print('telemetry', read, os.environ['FLWR_TELEMETRY_ENABLED'])\n"
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**clean, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == f"telemetry {telemetry} {telemetry}"
