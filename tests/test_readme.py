"""Every snippet of the README and of the guides runs, and every command is one that there is."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import clients
import fl_admm_strategies
from fl_admm_strategies import (
    FPFC,
    InProcessGrid,
    SmoothedSCAD,
    StatefulStrategy,
    run_in_process,
)
from simulations.running import cli
from tests.support.federation import client_fn_of, dataset, initial_arrays, make_model

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


DROP_IN = page("drop-in.md")
CURRENT_SERVER, CURRENT_CLIENT, LEGACY_SERVER, LEGACY_CLIENT = blocks("diff", DROP_IN)


def test_the_readmes_ten_lines_are_those_of_the_guide() -> None:
    """In the order in which the guide has them, without its handlers and what stays."""
    said = [block.splitlines() for block in blocks("diff")]
    assert sum(map(len, said)) == 10
    for lines, full in zip(said, (CURRENT_SERVER, CURRENT_CLIENT), strict=True):
        remaining = iter(full.splitlines())
        assert all(line in remaining for line in lines)


def after(diff: str) -> str:
    """Return a file as it is with the change made."""
    return "".join(line[1:] for line in diff.splitlines(True) if not line.startswith("-"))


@pytest.fixture(autouse=True)
def _users_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put in place the module `task` of the reader's project: a model and data."""
    task = types.ModuleType("task")

    def load_data(partition: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
        data = dataset(partition)
        return DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=64)

    task.Net, task.load_data = make_model, load_data  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "task", task)


def execute(source: str, namespace: dict[str, Any] | None = None) -> dict[str, Any]:
    names: dict[str, Any] = {} if namespace is None else namespace
    # A module's `from __future__` flags must not leak into the reader's code.
    exec(compile(source, "README.md", "exec", dont_inherit=True), names)
    return names


@pytest.mark.parametrize(
    ("server", "client"),
    [(CURRENT_SERVER, CURRENT_CLIENT), (LEGACY_SERVER, LEGACY_CLIENT)],
    ids=["current", "legacy"],
)
def test_the_changed_project_runs(server, client, caplog):
    caplog.set_level(logging.INFO, logger="flwr")
    run_in_process(execute(after(server))["app"], execute(after(client))["app"], 6)
    messages = [record.getMessage() for record in caplog.records]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert any("SmoothedSCAD(lam=0.6" in message for message in messages)


def test_a_training_loop_of_the_readers_own_runs() -> None:
    def train(net, loader, epochs, lr, device, objective):
        (x, y), optimizer = next(iter(loader)), torch.optim.SGD(net.parameters(), lr=lr)
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        objective.add_gradient(net)
        optimizer.step()
        return loss.item()

    def test(net, loader, device):
        return 0.5, 0.25

    (own,) = [block for block in blocks("python") if "def measure(self, problem)" in block]
    made = execute(own, {"FPFCClient": clients.FPFCClient, "train": train, "test": test})
    strategy = FPFC(SmoothedSCAD(lam=0.6))
    with InProcessGrid(clients.client_app(client_fn_of(made["OwnClient"])), 4) as grid:
        strategy.start(grid, initial_arrays(), 2)
    assert {found["personal-accuracy"] for found in strategy.evaluate_metrics[2].values()} == {0.25}


@pytest.mark.slow
def test_the_notebook_runs() -> None:
    notebook, _ = blocks("python", DROP_IN)
    names = execute(notebook, execute(after(CURRENT_CLIENT)))
    strategy = names["strategy"]
    assert isinstance(strategy, FPFC)
    assert strategy.clusters().shape == (12,)
    assert np.isfinite(strategy.diagnostics().stationarity)


@pytest.mark.slow  # a process of its own, which imports PyTorch
def test_a_project_with_a_module_clients_of_its_own_can_have_ours(tmp_path: Path) -> None:
    _, snippet = blocks("python", DROP_IN)
    (tmp_path / "clients.py").write_text("MINE = True\n")
    (tmp_path / "app.py").write_text(
        f"{snippet}\nimport clients\nassert clients.MINE\n"
        "assert FPFCClient.__module__.startswith('fl_admm_clients.')\n"
        "assert client_app.__module__.startswith('fl_admm_clients.')\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])  # as when the app's folder comes first
    environment = {**os.environ, "PYTHONPATH": paths}
    subprocess.run([sys.executable, tmp_path / "app.py"], check=True, env=environment)


@pytest.mark.slow
def test_the_tutorial_gives_what_it_shows() -> None:
    cells = [c for c in json.loads(page("tutorial.ipynb"))["cells"] if c["cell_type"] == "code"]
    names: dict[str, Any] = {}
    with mpl.rc_context({"backend": "Agg"}):
        for cell in cells:
            execute("".join(cell["source"]), names)
    shown = [
        output["data"]["text/plain"] for c in cells for output in c["outputs"] if "data" in output
    ]
    assert [repr(names["strategy"].clusters())] in shown


def test_the_reference_has_every_public_name_and_where_settings_are_said() -> None:
    said = set(re.findall(r"^::: ([\w.]+)$", "".join(map(page, REFERENCE)), flags=re.MULTILINE))
    public = {f"{p.__name__}.{name}" for p in (clients, fl_admm_strategies) for name in p.__all__}
    kit = ("Attack", "AttackingClient", "attacked_client_fn")
    assert said >= public | {f"simulations.attacks.{name}" for name in kit}


REFERENCE = [f"api/{name}.md" for name in ("clients", "running", "strategies")]
METHODS = re.findall(
    r"^\| .* \| `(\w+\(.*\))` \| (.*) \|$", page("methods/README.md"), flags=re.MULTILINE
)


def test_the_table_of_methods_names_what_there_is() -> None:
    strategies = [type(eval(source, vars(fl_admm_strategies).copy())) for source, _ in METHODS]
    exported = [getattr(fl_admm_strategies, name) for name in fl_admm_strategies.__all__]
    assert set(strategies) == {
        thing
        for thing in exported
        if isinstance(thing, type)
        and issubclass(thing, StatefulStrategy)
        and thing not in (StatefulStrategy, StatefulStrategy)
    }
    named = {name for _, cell in METHODS for name in re.findall(r"`(\w+)`", cell)}
    bases = {"MethodClient", "MirrorClient", "TorchClient"}
    assert named == {n for n in clients.__all__ if n.endswith("Client")} - bases


PAGES = {"README.md": README} | {
    path.name: page(path.name) for path in sorted((ROOT / "docs").glob("*.md"))
}


def commands(text: str = README) -> list[str]:
    return [line for block in blocks("sh", text) for line in block.splitlines()]


def test_the_ci_script_runs_the_readmes_own_commands() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    run = re.findall(r'^readme "(.*)"$', script, flags=re.MULTILINE)
    assert run == [line for line in commands() if line.startswith("python3.11 -m venv")]
    assert len(run) == 2


@pytest.mark.usefixtures("flower_logger_as_before")
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(part, marks=[pytest.mark.slow] * (name != "README.md"))
        for name, text in PAGES.items()
        for line in commands(text)
        for part in line.split(" && ")
        if "-m simulations" in part
    ],
)
def test_the_commands_name_what_there_is(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no interrupted run of somebody's own to resume
    monkeypatch.setattr(cli, "_run", lambda *_: None)  # everything but the run itself
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)  # as on the machine it is meant for
    arguments = shlex.split(command.split("-m simulations ")[1])
    result = CliRunner().invoke(cli.cli, arguments)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "path",
    [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_pictures_and_files_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)(\S*?)\)", text):
        file, _, heading = target.partition("#")
        assert not file or (path.parent / file).is_file(), target
        if heading:
            linked = (path.parent / file).read_text(encoding="utf-8") if file else text
            headings = re.findall(r"^#+ (.*)$", linked, flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert heading in slugs, target
