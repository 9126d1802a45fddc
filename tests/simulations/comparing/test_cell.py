"""A cell: its numbers, the gradients it counts, what it may see, and data of the user's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from simulations.comparing import cell as cells
from simulations.comparing.cell import Cell
from simulations.comparing.comparison import read
from simulations.data import load
from simulations.data.registry import _load
from tests.support.pace import fast
from tests.support.refusals import names, refused

SHORT = {"training.num-rounds": 2, "algorithm.local-epochs": 3}

OWN = """
import torch
from simulations.data import ClientData, FederatedData

SIZES = [6, 9, 20]


def load(seed, root, *, test=0.0, classes=2, kind=torch.int64):
    generator = torch.Generator().manual_seed(seed)

    def samples(n, scale):
        x = torch.randn(n, 4, generator=generator)
        return x + scale, (x[:, 0] > 0).to(kind)

    clients = [ClientData(samples(n, 0), None, samples(5, test)) for n in SIZES]
    return FederatedData("mine", clients, None, "classification", (4,), classes)


def nothing(seed, root):
    return [1, 2]
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "minedata.py").write_text(OWN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "minedata", raising=False)
    return "minedata:load"


def cell_of(
    method: str, trial: bool = False, held_out: bool = False, data: str = "digits-swap", **set_: Any
) -> Cell:
    changes = SHORT | {key.replace("__", "."): value for key, value in set_.items()}
    comparison = read(None, {"methods": [method], "data": data, "set": changes})
    return Cell(method, method, comparison.raw_settings(method, 1, {}), held_out, trial, None)


def batch_sizes(n: int, count: int) -> list[int]:
    """Return the sizes of the first batches of 20, epoch after epoch."""
    epoch = [20] * (n // 20) + [n % 20] * (n % 20 > 0)
    return [epoch[k % len(epoch)] for k in range(count)]


D = (64 * 128 + 128) + (128 * 64 + 64) + (64 * 10 + 10)  # parameters of the model

# One client in a round: gradients of n samples by the paper's algorithm, numbers down and up, and
# numbers down in round 1 beside them: the personal models' start.
BY_HAND: dict[str, tuple[dict[str, Any], Callable[[int], int], int, int, int]] = {
    "fedavg": ({}, lambda n: 3 * n, D, D, 0),
    # Each of tau steps: grad f(w; D), grad f(w - alpha ...; D'), and two gradients on D''.
    "perfedavg": (
        {"local-steps": 4},
        lambda n: sum((1, 1, 2)[k % 3] * b for k, b in enumerate(batch_sizes(n, 12))),
        *(D, D, 0),
    ),
    # R batches, K steps of theta_i on each; theta_i starts at w.
    "pfedme": (
        {"local-rounds": 3, "inner-steps": 4},
        lambda n: 4 * sum(batch_sizes(n, 3)),
        *(D, D, 0),
    ),
    # R times K steps, each on a batch of its own; w has ten numbers.
    "lp-proj": (
        {"local-rounds": 3, "inner-steps": 4},
        lambda n: sum(batch_sizes(n, 12)),
        *(10, 10, D),
    ),
    # E epochs of w, and as many of v_i.
    "ditto": ({}, lambda n: 2 * 3 * n, D, D, D),
    # Down x and c, up y and the change of c_i.
    "scaffold": ({}, lambda n: 3 * n, 2 * D, 2 * D, 0),
}


@pytest.mark.parametrize("method", fast(["ditto"], BY_HAND))
def test_work_and_bytes_are_those_of_the_papers_algorithm(method: str) -> None:
    settings, gradients, down, up, start = BY_HAND[method]
    changes = {f"{method}.{key}": value for key, value in settings.items()}
    # Evaluated in both rounds: what Per-FedAvg adapts for that is no training.
    found = cells.run(cell_of(method, **changes, **{"training.evaluate-every": 1}))
    sizes = [len(client.train[1]) for client in load("digits-swap", 1).clients]
    of_all = sum(map(gradients, sizes))
    assert found["gradients"] == 2 * of_all
    assert found["passes"] == pytest.approx([of_all / sum(sizes)] * 2)
    assert found["trained"] == 2 * 12
    moved = [entry for entry in found["traffic"] if entry[0] > 0]
    assert moved == [(r, 12 * 4 * (down + start * (r == 1)), 12 * 4 * up) for r in (1, 2)]


def test_a_trial_never_sees_the_test_samples(mine: str) -> None:
    def trial(test: float) -> dict[str, Any]:
        cell = cell_of("local", trial=True, held_out=True, data=mine)
        cell.raw["data"]["options"] = {"test": test}
        return cells.run(cell)["models"]

    assert trial(0.0) == trial(1e6)


def test_validation_samples_are_a_fifth_of_the_training_samples_and_not_trained_on(
    mine: str,
) -> None:
    # Of 6, 9 and 20 samples 1, 2 and 4 are held out, in the trials and in the cells alike.
    for trial in (False, True):
        found = cells.run(cell_of("local", trial=trial, held_out=True, data=mine))
        assert found["gradients"] == 2 * 3 * (5 + 7 + 16)
    assert cells.run(cell_of("local", data=mine))["gradients"] == 2 * 3 * 35


METHOD = """
from torch import nn
from clients.methods.fedprox import FedProxClient
from fl_admm_strategies import FedProx


class MyProx(FedProx):
    paper = "mine"


class MyProxClient(FedProxClient):
    strategy = MyProx


def net(data):
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, data.num_classes))
"""


def test_a_method_and_a_model_are_a_class_and_a_function_of_the_users(
    mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_method.py").write_text(METHOD, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "my_method", raising=False)
    options = {
        "methods": ["mine=my_method:MyProx", "fedprox"],
        "data": mine,
        "set": SHORT | {"model.name": "my_method:net", "mine.mu": 0.3, "fedprox.mu": 0.3},
    }
    comparison = read(None, options)
    found = []
    for alias, method in (("mine", "my_method:MyProx"), ("fedprox", "fedprox")):
        torch.manual_seed(len(found))  # a worker process may have any random numbers
        raw = comparison.raw_settings(alias, 1, {})
        found.append(cells.run(Cell(alias, method, raw, False, False, None)))
    assert found[0]["models"] == found[1]["models"]
    for method in ("my_method:net", "my_method:MyProcks"):
        with refused(ValueError, *method.split(":")):
            read(None, options | {"methods": [f"a={method}"], "set": {}})


@pytest.mark.parametrize(
    ("data", "options", "named"),
    [
        ("minedata:nothing", {}, ["minedata:nothing", "list", "FederatedData"]),
        ("minedata:load", {"kind": torch.float32}, ["train", "client 0", "torch.int64"]),
    ],
)
@pytest.mark.usefixtures("mine")
def test_what_a_function_returns_is_checked(
    data: str, options: dict[str, Any], named: list[str]
) -> None:
    _load.cache_clear()
    with refused(ValueError, *named):
        load(data, 1, **options)


def test_a_run_that_diverged_is_a_failed_cell_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "cell.json"
    # One step of each client is finite, the next is not: the model of round 1 is no result.
    one_step = {"algorithm.local-epochs": 1, "training.batch-size": 1000}
    cells.work(cell_of("fedavg", fedavg__lr=1e10, **one_step), path)
    found = cells.read(path)
    assert names(found["error"], "round 2", "usable", "diverged")
    assert (found["alias"], found["seed"]) == ("fedavg", 1)
