"""`evaluate_fn` gets a model that loads, whatever of it a method leaves with the clients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp

from fl_admm_strategies import LegacyStrategy, run_in_process
from tests.support.cases import NUM_CLIENTS, case_of, grid_of
from tests.support.federation import client_fn_of, make_model
from tests.support.legacy import with_workflow


@pytest.mark.parametrize("legacy", [False, True])
def test_evaluate_fn_gets_a_whole_model_where_a_part_stays_with_the_clients(legacy: bool) -> None:
    case = case_of("FedAPM")  # "^head" stays
    seen: list[dict[str, Any]] = []

    def load(state: dict[str, Any]) -> None:
        make_model().load_state_dict({name: torch.tensor(array) for name, array in state.items()})
        seen.append(state)

    first = {name: array.numpy() for name, array in case.initial_arrays().items()}
    strategy = case.strategy(seed=1)
    if legacy:

        def evaluate(server_round: int, arrays: Any, config: Any) -> tuple[float, Any]:
            load(dict(zip(first, arrays, strict=True)))
            return 0.0, {}

        adapter = LegacyStrategy(strategy, case.initial_arrays(), evaluate_fn=evaluate)
        app = ClientApp(client_fn=client_fn_of(case.client_class))
        run_in_process(with_workflow(adapter, 2), app, NUM_CLIENTS)
    else:

        def evaluate_fn(server_round: int, arrays: ArrayRecord) -> None:
            load({name: array.numpy() for name, array in arrays.items()})

        strategy.start(grid_of(case), case.initial_arrays(), 2, evaluate_fn=evaluate_fn)
    assert len(seen) == 3
    for name, array in seen[-1].items():
        assert (array == first[name]).all() == name.startswith("head")
