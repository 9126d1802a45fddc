"""How many nodes host an experiment's clients."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from simulations.running import cli
from simulations.running.host import Engine, Host


@pytest.mark.parametrize(
    ("host", "num_clients", "expected"),
    [
        (Host(), 1000, 6),
        (Host(), 5, 5),
        (Host(workers=2), 1000, 4),
        (Host(Engine.INPROCESS), 1000, 6),
        (Host(Engine.INPROCESS, workers=0), 1000, 6),
        (Host(nodes=7), 1000, 7),
        (Host(nodes=7), 5, 5),
        (Host(ray_address="10.0.0.1:6379"), 1000, 128),
    ],
)
def test_nodes_follow_from_the_cores(
    host: Host, num_clients: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert host.num_nodes(num_clients) == expected


@pytest.mark.usefixtures("flower_logger_as_before")
def test_a_run_packs_its_clients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[int] = []
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    monkeypatch.setattr(cli, "_run", lambda run, config, nodes, host, verbose: found.append(nodes))
    options = ["run", "fedadmm-digits", "--engine", "inprocess", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(cli.cli, options)
    assert result.exit_code == 0, result.output
    assert found == [6]  # of 10 clients
