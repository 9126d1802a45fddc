"""What a run keeps in memory: nothing of a round outlives it, and nothing of a run its grid."""

from __future__ import annotations

import copy
import gc
import logging
import tracemalloc
import weakref
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, MessageType
from flwr.client import NumPyClient
from torch import nn

from tests.support.cases import NUM_CLIENTS, Case, case_of, grid_of, run
from tests.support.federation import NUM_CLASSES, Faults

pytestmark = pytest.mark.slow  # the collector looks at all that the other tests have made

ANY_MODEL = ["FPFC", "FedAPM", "FedADMM", "FLAME", "FedGiA", "FedAvg", "Ditto", "IFCA", "SCAFFOLD"]


class Faint(nn.Module):
    """tanh, so weak that the step sizes of the small model suit a wide one as well."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.tanh() / inputs.shape[1] ** 0.5


def wide(case: Case, width: int) -> Case:
    """Return a case whose model has seven times the width of numbers."""
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        body, head = nn.Linear(3, width), nn.Linear(width, NUM_CLASSES)
    model = nn.Sequential(OrderedDict(body=body, bend=Faint(), head=head))

    def client(context: Context, _: Any, *args: Any, **kwargs: Any) -> NumPyClient:
        return case.client_class(context, copy.deepcopy(model), *args, **kwargs)

    arrays = ArrayRecord(model.state_dict())
    return replace(case, client_class=client, initial_arrays=lambda: arrays)


def large_in_cycles(least: int) -> list[str]:
    """Return the kinds of large arrays that nothing but the collector of cycles would free."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        found = [*gc.garbage, *gc.get_referents(*gc.garbage)]
        large = [item for item in found if type(item) is bytes and len(item) >= least]
        arrays = [item for item in found if isinstance(item, np.ndarray | torch.Tensor)]
        large += [array for array in arrays if array.nbytes >= least]
        return [type(item).__name__ for item in large]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.parametrize("name", ANY_MODEL)
@pytest.mark.parametrize("nodes", [NUM_CLIENTS, 2])
def test_no_large_array_outlives_its_round(name: str, nodes: int) -> None:
    width = 6_000
    case = wide(case_of(name), width)
    options = {"num_clients": None if nodes == NUM_CLIENTS else NUM_CLIENTS}
    with grid_of(case, nodes, app_options=options) as grid:
        gc.collect()
        gc.freeze()  # what was made before is not looked at
        gc.disable()
        try:
            strategy = run(case, grid, 2)  # kept: a strategy and its run refer to each other
            assert large_in_cycles(2 * width) == []
        finally:
            gc.enable()
            gc.unfreeze()
    assert strategy.last_round == 2


@pytest.mark.parametrize("name", ["FedAvg", "FPFC", "AsyncFPFC"])
def test_a_strategy_whose_run_is_over_does_not_hold_the_clients_data(name: str) -> None:
    # The data are in the app's closure, the app in the grid.
    gc.collect()
    gc.disable()
    try:
        grid = grid_of(case_of(name))
        held = weakref.ref(grid)
        strategy = run(case_of(name), grid, 2)
        del grid
        assert held() is None
    finally:
        gc.enable()
    assert strategy.last_round == 2


@pytest.mark.parametrize("name", ["FedAvg", "FedADMM"])
def test_what_all_nodes_get_is_in_memory_once(name: str) -> None:
    case = case_of(name)
    grid = grid_of(case)
    run(case, grid, 2)
    messages = grid.phase(MessageType.TRAIN, 2)
    for array in case.initial_arrays():
        assert len({id(m.content.array_records["arrays"][array].data) for m in messages}) == 1


# One that keeps most on the server and one that keeps most on the clients.
@pytest.mark.parametrize("name", ["FPFC", "FedAPM"])
def test_faults_leave_nothing_behind(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="flwr")  # pytest keeps all that is logged
    case = wide(case_of(name), 4_000)
    run(case, grid_of(case), 1)  # what is made once in a process

    def stays(faults: Faults) -> int:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        grid = grid_of(case, faults=faults)
        grid.sent = grid.received = _Nothing()  # type: ignore[assignment]
        strategy = run(case, grid, 10)
        gc.collect()
        assert strategy.last_round == 10
        return tracemalloc.get_traced_memory()[0] - before

    kinds = ["lost", "NaN", "twice", "wrong shape"]
    ill = {c: {r: kinds[(c + r) % 4] for r in range(2, 10) if (c * r) % 3 == 1} for c in range(6)}
    tracemalloc.start()
    try:
        well, with_faults = stays({}), stays(ill)
    finally:
        tracemalloc.stop()
    assert well > 100_000
    assert with_faults <= 1.05 * well


class _Nothing(list[Any]):
    """A list that keeps nothing."""

    def append(self, item: Any) -> None:
        pass
