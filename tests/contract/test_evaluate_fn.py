"""`evaluate_fn` gets a model that loads, whatever of it a method leaves with the clients."""

from __future__ import annotations

from typing import Any

import torch
from flwr.app import ArrayRecord

from tests.support.cases import case_of, grid_of
from tests.support.federation import make_model


def test_evaluate_fn_gets_a_whole_model_where_a_part_stays_with_the_clients() -> None:
    case = case_of("FedAPM")  # "^head" stays
    seen: list[dict[str, Any]] = []

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> None:
        state = {name: array.numpy() for name, array in arrays.items()}
        make_model().load_state_dict({name: torch.tensor(array) for name, array in state.items()})
        seen.append(state)

    first = {name: array.numpy() for name, array in case.initial_arrays().items()}
    strategy = case.strategy(seed=1)
    strategy.start(grid_of(case), case.initial_arrays(), 2, evaluate_fn=evaluate_fn)
    assert len(seen) == 3
    for name, array in seen[-1].items():
        assert (array == first[name]).all() == name.startswith("head")
