"""Settings for every test: no telemetry, no update check, one thread."""

import os

# Read when flwr and ray are imported, so before the import below.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"

import torch

# Ray's and the grid's workers use one thread; with more here the last bit of a sum could differ.
torch.set_num_threads(1)
