"""The package `clients` without PyTorch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import clients


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_every_exported_name_is_there() -> None:
    for name in clients.__all__:
        assert getattr(clients, name).__name__ == name
    assert set(clients.__all__) <= set(dir(clients))


@pytest.mark.slow
def test_plain_steps_do_not_load_the_compiler() -> None:
    """The first `torch.optim.Optimizer` of a process imports it: 1.3 s and 71 MB."""
    code = """
import sys, torch
from torch import nn
from clients.toolkit.data.batches import split_batch
from clients.toolkit.data.minibatches import Minibatches
from clients.toolkit.solving.objective import LocalObjective
from clients.toolkit.solving.solvers import LocalProblem, descend_until, gradient_descent
model, data = nn.Linear(2, 1), Minibatches(torch.ones(4, 2), torch.ones(4, 1), 2)
problem = LocalProblem(model, data, nn.MSELoss(), split_batch, torch.device("cpu"))
gradient_descent(problem, LocalObjective(), lr=0.1, epochs=2, full_batch=False, max_grad_norm=1.0)
descend_until(problem, LocalObjective(), tolerance=0.0, lr=0.1, max_steps=2)
print("torch._dynamo" in sys.modules)
"""
    assert python(code).stdout == "False\n"


@pytest.mark.slow
def test_clients_of_numpy_only_do_not_load_torch_and_the_others_say_what_to_install() -> None:
    names = "FedMCADMMClient, FedGiALinearClient, LeastSquares, MethodClient, Ratings, client_app"
    found = python(f"""
import sys
from clients import {names}
print('torch' in sys.modules)
sys.modules['torch'] = None
from clients import FPFCClient
""")
    assert found.stdout == "False\n"
    last = found.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: FPFCClient needs PyTorch")
    assert "pip install 'fl-admm-strategies[torch]'" in last
