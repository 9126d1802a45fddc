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


@pytest.fixture
def flower_logger_as_before() -> Iterator[None]:
    """Undo what the command line does to Flower's logger, which all tests share."""
    logger = logging.getLogger("flwr")
    level, filters = logger.level, list(logger.filters)
    yield
    logger.setLevel(level)
    logger.filters[:] = filters
