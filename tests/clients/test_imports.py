"""The package `clients` without PyTorch."""

from __future__ import annotations

import subprocess
import sys

import clients


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_every_exported_name_is_there() -> None:
    for name in clients.__all__:
        assert getattr(clients, name).__name__ == name
    assert set(clients.__all__) <= set(dir(clients))
    assert sorted(name for names in clients._HOME.values() for name in names) == sorted(
        clients.__all__
    )


def test_clients_that_need_numpy_only_do_not_load_torch() -> None:
    names = "FedMCADMMClient, FedGiALinearClient, LeastSquares, MethodClient, Ratings, client_app"
    code = f"import sys; from clients import {names}; print('torch' in sys.modules)"
    assert python(code).stdout == "False\n"


def test_without_torch_the_others_say_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None; from clients import FPFCClient"
    last = python(code).stderr.splitlines()[-1]
    assert last == (
        "ModuleNotFoundError: FPFCClient needs PyTorch, which is not installed. Install it with "
        "pip install 'fl-admm-strategies[torch]'."
    )
