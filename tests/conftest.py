"""Settings for every test: no telemetry, no update check, one thread, some workers."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

# Read when flwr, ray and numpy are imported, so before the imports below.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
# The workers of pytest-xdist share the processors, and the last bit of a sum depends on the number
# of threads.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from hypothesis import settings

from fl_admm_strategies.hosting import workers
from fl_admm_strategies.maths.pairs import kernels_numpy, store
from tests.support.refusals import Warned, warnings_in

_MOST_WORKERS = 4

# A machine that is busy with other work must not fail a test.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    """Have the processes that run clients import once what the slow tests share.

    The fast ones run clients of NumPy only there, and do not wait for PyTorch.
    """
    shared = [*workers._PRELOAD, "numba", "tests.support.cases"]
    workers._PRELOAD = [] if without_slow_tests(config) else shared
    gc.disable()  # while tests are collected: to look for garbage among them takes seconds
    if without_slow_tests(config) and not measuring(config):  # numba compiles for many seconds
        store.fastest_kernels = lambda: kernels_numpy


def without_slow_tests(config: pytest.Config) -> bool:
    return "not slow" in config.option.markexpr


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Use one thread, as Ray's and the grid's workers do: the last bit of a sum could differ."""
    import torch  # here: the process that only hands out the tests needs none

    torch.set_num_threads(1)


def measuring(config: pytest.Config) -> bool:
    return bool(config.getoption("benchmark_enable"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import, for the fast tests, the folders that have none: seconds of other libraries."""
    left_out = [] if measuring(config) else ["apps", "benchmarks"]
    ignored = [Path(__file__).with_name(name) for name in left_out]
    return (without_slow_tests(config) and collection_path in ignored) or None


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many workers run the tests: none for a benchmark, or for a few files."""
    few = config.args and all("::" in name or name.endswith(".py") for name in config.args)
    if few or measuring(config):
        return 0
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(mine or 1, _MOST_WORKERS)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep benchmarks, but where they are asked for, and variants of cases to the slow tests."""
    for item in items:
        if "benchmark" in getattr(item, "fixturenames", ()) and not measuring(item.config):
            item.add_marker(pytest.mark.slow)
        callspec = getattr(item, "callspec", None)
        case = callspec.params.get("case") if callspec else None
        if getattr(case, "variant", False) and item.get_closest_marker("long") is None:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture
def flower_logger_as_before() -> Iterator[None]:
    """Undo what the command line does to Flower's logger, which all tests share."""
    logger = logging.getLogger("flwr")
    level, filters = logger.level, list(logger.filters)
    yield
    logger.setLevel(level)
    logger.filters[:] = filters


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Warned:
    """Return what gives the warnings so far, all or those that name some words."""
    return lambda *named: warnings_in(caplog.records, *named)
