"""Every strategy that a converted app makes."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from fl_admm_strategies import StatefulStrategy


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[StatefulStrategy]:
    """Return the strategies that an app will make."""
    strategies: list[StatefulStrategy] = []
    plain = StatefulStrategy.__init__

    @functools.wraps(plain)
    def watched(self: StatefulStrategy, **settings: Any) -> None:
        strategies.append(self)
        plain(self, **settings)

    monkeypatch.setattr(StatefulStrategy, "__init__", watched)
    return strategies
