"""Every strategy that a converted app makes."""

from __future__ import annotations

import pytest

from fl_admm_strategies import StatefulStrategy


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[StatefulStrategy]:
    """Return the strategies that an app will make."""
    strategies: list[StatefulStrategy] = []
    plain = StatefulStrategy.__post_init__

    def watched(self: StatefulStrategy) -> None:
        strategies.append(self)
        plain(self)

    monkeypatch.setattr(StatefulStrategy, "__post_init__", watched)
    return strategies
