"""``python -m simulations`` and ``fl-admm``: run experiments, with an exit code that is true."""

from __future__ import annotations

import os
import signal

# Ctrl-C while all is being imported ends the process silently; `run` has its own.
signal.signal(signal.SIGINT, signal.SIG_DFL)

# Before anything imports Flower or Ray: no telemetry unless the user turns it on
# (FLWR_TELEMETRY_ENABLED=1), no update check, no warning of Ray's about accelerators.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

from .running.cli import main  # noqa: E402 - that is the import

signal.signal(signal.SIGINT, signal.default_int_handler)

if __name__ == "__main__":  # not in worker processes, nor for `fl-admm`
    main()
