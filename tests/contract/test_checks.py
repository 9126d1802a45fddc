"""Every method, every promise: see `checks.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.checks import (
    Check,
    check_noise_or_a_refusal,
    check_one_bad_client_has_its_share_at_most,
    checks_of,
)
from tests.support.cases import AT_ANY_PACE, Case

# Each runs a method several times; the fast tests have the method that does so in the least time.
LONG = (check_noise_or_a_refusal, check_one_bad_client_has_its_share_at_most)


@pytest.mark.parametrize(
    ("case", "check"),
    [
        pytest.param(
            case,
            check,
            id=f"{case.name}-{check.__name__.removeprefix('check_')}",
            marks=[pytest.mark.slow] if check in LONG and case.name != "FedMC-ADMM" else [],
        )
        for case in AT_ANY_PACE
        for check in checks_of(case)
    ],
)
def test_promises(case: Case, check: Check, tmp_path: Path) -> None:
    check(case, tmp_path)
