"""Rounds: what every strategy promises of them, whatever its algorithm."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, MessageType, MetricRecord
from flwr.client import NumPyClient
from numpy.testing import assert_array_equal
from torch import nn

from clients import client_app
from fl_admm_strategies.runtime.saving.state import arrays_of
from tests.support.cases import (
    CASES,
    NUM_CLIENTS,
    Case,
    State,
    at_any_pace,
    case_of,
    each_case,
    grid_of,
    plain,
    run,
    sampling,
)
from tests.support.federation import (
    WatchedGrid,
    assert_same_bits,
    assert_same_runs,
    differs,
    node_of,
    raising_client_fn,
    trained,
)
from tests.support.refusals import Warned, names


@at_any_pace
def test_one_seed_gives_the_same_bits_in_any_order_and_another_seed_others(case: Case) -> None:
    first, _ = plain(case)
    assert_same_runs(run(case, grid_of(case, shuffled=1), strategy=sampling(case)), first)
    other = run(case, grid_of(case), strategy=sampling(case, seed=2))
    if case.everybody_trains:
        assert differs(arrays_of(other.state), arrays_of(first.state))
    else:
        assert trained(other) != trained(first)


@each_case
def test_only_the_sampled_clients_take_part(case: Case) -> None:
    strategy, grid = plain(case)
    for server_round, clients in trained(strategy).items():
        assert len(clients) == (NUM_CLIENTS if case.everybody_trains else 3)  # 0.5 of 6
        asked = [m.metadata.dst_node_id for m in grid.phase(MessageType.TRAIN, server_round)]
        assert sorted(asked) == [node_of(client) for client in clients]
        assert len(strategy.evaluate_metrics[server_round]) == 2  # int(0.34 * 6)
    assert sorted(trained(strategy)) == [1, 2, 3]
    if not case.everybody_trains:
        assert len(set(map(tuple, trained(strategy).values()))) > 1  # drawn anew each round


@each_case
def test_a_round_without_a_usable_reply_changes_nothing(case: Case, warned: Warned) -> None:
    states: list[State] = []
    app = client_app(raising_client_fn(case.client_class, {c: [2] for c in range(NUM_CLIENTS)}))
    strategy = case.strategy(seed=1)
    strategy.start(
        WatchedGrid(app, NUM_CLIENTS),
        case.initial_arrays(),
        3,
        on_round=lambda server_round, metrics: states.append(
            {key: array.copy() for key, array in arrays_of(strategy.state).items()}
        ),
    )
    assert_same_bits(states[1], states[0])
    assert differs(states[2], states[1]) == (
        case.server_learns and not case.counts_once
    )  # and the run goes on
    assert all(len(warned(f"client {client}")) == 1 for client in range(NUM_CLIENTS))
    assert len(warned()) == NUM_CLIENTS + 1  # and one line that the round changes nothing
    assert trained(strategy) == {r: list(range(NUM_CLIENTS)) for r in (1, 3)}


@at_any_pace
def test_every_kind_of_model_is_there_or_said_where(case: Case) -> None:
    strategy, _ = plain(case)
    here = []
    for kind in strategy.kinds:
        for client in strategy.client_ids:
            try:
                arrays = strategy.model_arrays(kind, client)
            except RuntimeError as error:
                assert names(error, kind, type(strategy).__name__)  # noqa: PT017
                continue
            here.append(kind)
            assert arrays.keys() <= strategy.model_spec.keys()
            assert all(np.isfinite(array.numpy()).all() for array in arrays.values())
    assert len(here) == len(set(here)) * NUM_CLIENTS  # a kind is here for all, or for nobody
    assert bool(strategy.global_arrays) == ("global" in strategy.kinds)


# --- Messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["FedAvg", "FedADMM", "FLAME", "Ditto"])
def test_what_all_nodes_get_is_in_memory_once(name: str) -> None:
    case = case_of(name)
    grid = grid_of(case)
    run(case, grid, 2)
    for array in case.initial_arrays():
        messages = grid.phase(MessageType.TRAIN, 2)
        assert len({id(m.content.array_records["arrays"][array].data) for m in messages}) == 1


@each_case
def test_messages_have_the_layout_of_flowers_fedavg(case: Case) -> None:
    strategy, grid = plain(case)
    expected = dict(strategy.upload_spec())
    if case.fedavg_clients:
        assert expected == {k: (a.shape, a.dtype) for k, a in case.initial_arrays().items()}
    wanted: dict[int, list[str]] = {}
    for message in grid.phase(MessageType.TRAIN, 2):
        arrays, config = message.content["arrays"], message.content["config"]
        assert isinstance(arrays, ArrayRecord)
        assert isinstance(config, ConfigRecord)
        assert next(iter(message.content)) == "arrays"
        names = json.loads(str(config["upload"])) if "upload" in config else list(arrays)
        assert names == list(expected) or (
            names == [] and (case.everybody_trains or case.counts_once)
        )
        assert config["server-round"] == 2
        wanted[message.metadata.dst_node_id] = names
    for reply in grid.replies(MessageType.TRAIN, 2):
        assert set(reply.content) == {"arrays", "metrics"}
        arrays, metrics = reply.content["arrays"], reply.content["metrics"]
        node = reply.metadata.src_node_id
        own = expected | strategy.upload_spec_of(node - node_of(0))
        found = {k: (a.shape, a.dtype) for k, a in arrays.items()}
        assert found == {name: own[name] for name in wanted[node]}
        assert isinstance(metrics, MetricRecord)
        assert metrics["num-examples"] > 0
    for reply in grid.replies(MessageType.EVALUATE, 2):
        assert set(reply.content) == {"metrics"}
        assert reply.content["metrics"]["num-examples"] > 0


ODD = ',"\n'
"""Characters that a name may hold, as those of the modules of an `nn.ModuleDict` do."""


def odd(name: str) -> str:
    """Return the name of an array of a model whose blocks have odd names."""
    block, dot, rest = name.partition(".")
    return f"{block}{ODD}{dot}{rest}"


def of_odd_names(case: Case) -> Case:
    def client(context: Context, model: nn.Sequential, *args: Any, **kwargs: Any) -> NumPyClient:
        blocks = OrderedDict((name + ODD, block) for name, block in model.named_children())
        return case.client_class(context, nn.Sequential(blocks), *args, **kwargs)

    arrays = ArrayRecord({odd(name): array for name, array in case.initial_arrays().items()})
    return replace(case, client_class=client, initial_arrays=lambda: copy.deepcopy(arrays))


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.two_heads is None], ids=lambda case: case.name
)
def test_the_name_of_an_array_may_hold_any_character(case: Case) -> None:
    expected, _ = plain(case)
    strange = of_odd_names(case)
    strategy = run(strange, grid_of(strange), strategy=sampling(strange))
    assert list(strategy.model_spec) == [odd(name) for name in expected.model_spec]
    assert strategy.train_metrics == expected.train_metrics
    assert strategy.evaluate_metrics == expected.evaluate_metrics
    names = {odd(name): name for name in expected.model_spec}
    state = {}
    for key, array in strategy.state_dict().items():
        *place, name = key.split("/")
        state["/".join([*place, names.get(name, name)])] = array
    assert_same_bits(state, expected.state_dict())
    for name, array in strategy.global_arrays.items():
        assert_array_equal(array.numpy(), expected.global_arrays[names[name]].numpy())
