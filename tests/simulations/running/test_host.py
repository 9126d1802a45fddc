"""How many nodes host an experiment's clients."""

from __future__ import annotations

import pytest

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
