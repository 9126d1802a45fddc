"""`wire_dtype`: what every strategy promises of half precision on the wire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from numpy.testing import assert_allclose
from torch import nn

from clients import FedADMMClient, FPFCClient, client_app
from fl_admm_strategies import FPFC, FedADMM, InProcessGrid, SmoothedSCAD
from fl_admm_strategies.runtime.messages.wire import HELD_BACK
from fl_admm_strategies.runtime.saving.state import arrays_of
from tests.support.cases import (
    CASES,
    CHEAP,
    NUM_CLIENTS,
    Case,
    case_of,
    each_case,
    grid_of,
    plain,
    run,
    sampling,
)
from tests.support.federation import (
    WatchedGrid,
    assert_same_runs,
    client_fn_of,
    dataset,
    initial_arrays,
    make_model,
    node_of,
    trained,
)
from tests.support.pace import fast
from tests.support.refusals import Warned, refused

ON_CLIENTS = [case for case in CASES if "client-duals" in case.name]
ON_CLIENTS += [case_of("FedDyn")]


def memory_of(grid: InProcessGrid, client: int) -> dict[str, np.ndarray]:
    """Return what a client keeps of its last round."""
    records = grid.context(node_of(client)).state.array_records
    rounds = [int(key.removeprefix("memory.")) for key in records if key.startswith("memory.")]
    return {name: a.numpy() for name, a in records[f"memory.{max(rounds)}"].items()}


def dtypes(messages: list[Any]) -> dict[str, set[str]]:
    """Return the dtypes of the arrays in messages, by the name of their group."""
    found: dict[str, set[str]] = {}
    for message in messages:
        for key, record in message.content.array_records.items():
            found.setdefault(key, set()).update(array.dtype for array in record.values())
    return found


@each_case
def test_arrays_travel_in_half_precision_and_are_kept_in_full(case: Case) -> None:
    grid, (exact, _) = grid_of(case), plain(case)
    half = run(case, grid, strategy=sampling(case, wire_dtype="float16"))
    for server_round in (1, 2, 3):
        for kind, messages in (
            ("train", grid.phase("train", server_round)),
            ("train", grid.replies("train", server_round)),
            ("evaluate", grid.phase("evaluate", server_round)),
        ):
            for group, found in dtypes(messages).items():
                full = group.endswith("start") or group.removeprefix("arrays.") == "start"
                in_full = full or (case.name == "Local" and group == "arrays")
                assert in_full or found <= {"float16"}, (kind, server_round, group, found)
        size = np.dtype(next(iter(case.initial_arrays().values())).dtype).itemsize
        assert half.traffic[server_round].up * size == exact.traffic[server_round].up * 2
    assert half.train_metrics.keys() == exact.train_metrics.keys()
    state, expected = (arrays_of(strategy.state) for strategy in (half, exact))
    for name, array in expected.items():
        assert state[name].dtype == array.dtype
        assert_allclose(state[name], array, rtol=0.05, atol=0.05, err_msg=name)
    for client in half.client_ids:
        if grid.context(node_of(client)).state.array_records:
            assert all(a.dtype != np.float16 for a in memory_of(grid, client).values())


@pytest.mark.parametrize("case", ON_CLIENTS, ids=lambda case: case.name)
def test_the_servers_sum_is_that_of_what_the_clients_keep(case: Case) -> None:
    """Changes are added up: were a rounding lost, it would be missing for ever."""
    grid = grid_of(case)
    strategy: Any = case.strategy(fraction_train=0.67, wire_dtype="float16", seed=1)
    strategy.start(grid, case.initial_arrays(), 8)
    view, messages, rest = case.view, [], []
    for client in strategy.client_ids:
        kept = memory_of(grid, client)
        names = strategy._block.names
        messages.append(view.message(strategy, client, kept))
        rest.append(np.concatenate([kept[HELD_BACK + name].ravel() for name in names]))
    total, held_back = view.total(strategy), np.sum(rest, axis=0)
    assert_allclose(total + held_back, np.sum(messages, axis=0), rtol=1e-5, atol=1e-5)
    # Of one round at most, however many there were: half of the last place of a change.
    assert 0 < np.abs(held_back).max() < 1e-3


def test_a_node_of_several_clients_rounds_as_one_of_one_does() -> None:
    case = case_of("FedADMM-client-duals")
    alone, packed = (case.strategy(wire_dtype="float16", seed=1) for _ in range(2))
    run(case, grid_of(case), 3, strategy=alone)
    app = client_app(client_fn_of(case.client_class), num_clients=NUM_CLIENTS)
    grid = WatchedGrid(app, 2)
    run(case, grid, 3, strategy=packed)
    assert_same_runs(packed, alone)
    for messages in (grid.phase("train", 3), grid.replies("train", 3)):
        assert all(found <= {"float16"} for found in dtypes(messages).values()), dtypes(messages)


def test_plain_clients_understand_it() -> None:
    """They reply in full precision, which counts as what it is."""
    strategy = run(CHEAP, grid_of(CHEAP), strategy=CHEAP.strategy(wire_dtype="float16"))
    assert strategy.traffic[2] == (6 * 18, 6 * 36)
    assert strategy.global_arrays["w"].numpy().dtype == np.float32


@pytest.mark.parametrize("then", fast([None], ["float16", None]))
def test_a_run_goes_on_with_and_without_it(then: Any, tmp_path: Path) -> None:
    """Also to the same bits, where nothing is changed: what was held back is saved."""

    def client_fn(context: Context) -> Any:
        data = [dataset(int(context.node_config["partition-id"])).tensors]
        state = tmp_path / "clients"
        return FedADMMClient(context, make_model(), data, nn.CrossEntropyLoss(), state_dir=state)

    def rounds(until: int, dtype: Any, folder: str) -> FedADMM:
        strategy = FedADMM(duals="client", wire_dtype=dtype, fraction_evaluate=0, seed=1)
        grid = InProcessGrid(client_app(client_fn), 3)
        checkpoints = {"checkpoint_dir": tmp_path / folder, "resume": True}
        strategy.start(grid, initial_arrays(), until, **checkpoints)
        return strategy

    whole = rounds(4, "float16", "whole")
    rounds(2, "float16", "halves")
    halves = rounds(4, then, "halves")
    for name, array in arrays_of(whole.state).items():
        tolerance = 1e-3 if then is None else 0
        assert_allclose(arrays_of(halves.state)[name], array, rtol=0, atol=tolerance)


# --- Range --------------------------------------------------------------------------------------


def test_a_model_beyond_the_range_is_refused_before_anything_is_sent() -> None:
    model = make_model()
    with torch.no_grad():
        model.get_parameter("head.bias")[1] = 7e4
    strategy = FPFC(SmoothedSCAD(0.5), wire_dtype="float16")
    grid = WatchedGrid(client_app(client_fn_of(FPFCClient)), 3)
    with refused(ValueError, "head.bias", "7e+04", "float16", "wire_dtype"):
        strategy.start(grid, ArrayRecord(model.state_dict()), 2)
    assert all(server_round == 0 for _, server_round, _ in grid.sent)


class Growing(FPFCClient):
    """Of client 1 a number leaves the range in round 2."""

    def train(self, asked: Any, config: Any) -> Any:
        upload, metrics = super().train(asked, config)
        if self.context.node_config["partition-id"] == 1 and config["server-round"] == 2:
            upload["head.bias"][0] = -1e5
        return upload, metrics


def test_an_upload_beyond_the_range_is_refused_by_name(warned: Warned) -> None:
    strategy = FPFC(SmoothedSCAD(0.5), wire_dtype="float16", fraction_evaluate=0)
    strategy.start(InProcessGrid(client_app(client_fn_of(Growing)), 3), initial_arrays(), 3)
    assert trained(strategy) == {1: [0, 1, 2], 2: [0, 2], 3: [0, 1, 2]}
    assert len(warned()) == len(warned("client 1", "head.bias", "-1e+05", "float16")) == 1


def test_one_client_that_cannot_be_sent_its_arrays_ends_no_run(warned: Warned) -> None:
    """Its dual is its own doing: a liar could end the run of all."""
    strategy = FedADMM(wire_dtype="float16", seed=1, fraction_evaluate=0)

    def spoil(server_round: int, metrics: Any) -> None:
        if server_round == 1:
            strategy.state.consensus.clients[2].pi += 7e4

    grid = InProcessGrid(client_app(client_fn_of(FedADMMClient)), 3)
    strategy.start(grid, initial_arrays(), 3, on_round=spoil)
    assert sorted(strategy.train_metrics[2]) == [0, 1]
    assert warned("client 2", "float16")


# --- What stays as it is ------------------------------------------------------------------------


class Normed(nn.Module):
    """The small network behind a batch norm whose running variance float16 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net = nn.BatchNorm1d(3), make_model()
        self.norm.running_var.fill_(1e6)  # type: ignore[union-attr]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(self.norm(inputs))


@pytest.mark.parametrize("name", ["FPFC", "Ditto"])
def test_buffers_travel_as_they_are(name: str) -> None:
    case = case_of(name)

    def client_fn(context: Context) -> Any:
        data = [dataset(int(context.node_config["partition-id"])).tensors]
        loss = nn.CrossEntropyLoss()
        return case.client_class(context, Normed(), data, loss, test_loader=data)

    grid = WatchedGrid(client_app(client_fn), 3)
    strategy = case.strategy(wire_dtype="float16", seed=1)
    strategy.start(grid, ArrayRecord(Normed().state_dict()), 2)
    for messages in (grid.phase("train", 2), grid.replies("train", 2), grid.phase("evaluate", 2)):
        for message in messages:
            for key, record in message.content.array_records.items():
                for array_name, array in record.items():
                    expected = {"norm.running_mean": "float32", "norm.running_var": "float32"}
                    expected["norm.num_batches_tracked"] = "int64"
                    assert array.dtype == expected.get(array_name, "float16"), (key, array_name)
    variance = strategy.global_arrays["norm.running_var"].numpy()
    assert variance.min() > 5e5
