"""Every method, every promise: see `checks.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.checks import Check, checks_of
from tests.support.cases import AT_ANY_PACE, Case


@pytest.mark.parametrize(
    ("case", "check"),
    [
        pytest.param(case, check, id=f"{case.name}-{check.__name__.removeprefix('check_')}")
        for case in AT_ANY_PACE
        for check in checks_of(case)
    ],
)
def test_promises(case: Case, check: Check, tmp_path: Path) -> None:
    check(case, tmp_path)
