"""Settings for every test: no telemetry, no update check, one thread."""

import logging
import os
from collections.abc import Iterator

# Read when flwr and ray are imported, so before the import below.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"

import pytest
import torch

# Ray's and the grid's workers use one thread; with more here the last bit of a sum could differ.
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of cases that are variants of others to the slow ones."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        case = callspec.params.get("case") if callspec else None
        if getattr(case, "variant", False) and item.get_closest_marker("long") is None:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def flower_logger_as_before() -> Iterator[None]:
    """Undo what the command line does to Flower's logger, which all tests share."""
    logger = logging.getLogger("flwr")
    level, filters = logger.level, list(logger.filters)
    yield
    logger.setLevel(level)
    logger.filters[:] = filters
