"""A client's mirror has the bits of the strategy's row; where the rows live does not matter."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from clients import FedADMMClient, FedAPMClient, FLAMEClient, SCAFFOLDClient, client_app
from clients.toolkit.round.mirror import ROW, SUMMED
from fl_admm_strategies import FLAME, SCAFFOLD, ClientDP, FedADMM, FedAPM
from fl_admm_strategies.algorithms.scaffold import CONTROL
from tests.support.federation import Federation, client_fn_of, initial_arrays, node_of
from tests.support.pace import fast

METHODS: dict[str, tuple[Any, Any]] = {
    "FedADMM": (FedADMM, FedADMMClient),
    "FLAME": (FLAME, FLAMEClient),
    "FedAPM": (partial(FedAPM, "^head"), FedAPMClient),
}

NOISY = ClientDP(clip=0.5, noise_multiplier=0.1, delta=1e-3, noise_at="client")
CLIPPED = ClientDP(clip=0.05, noise_multiplier=0.0, delta=1e-3)


@pytest.mark.parametrize("name", fast(["FLAME"], METHODS))
@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize(
    "way", [{}, {"wire_dtype": "float16"}, {"privacy": NOISY}], ids=["plain", "float16", "noise"]
)
def test_the_mirror_has_the_bits_of_the_row(name: str, published: bool, way: Any) -> None:
    make, client_class = METHODS[name]
    # rho is left out: in the default form it changes after the first round.
    strategy = make(lr=0.5, published=published, fraction_train=0.5, seed=2, **way)
    grid = Federation(client_app(client_fn_of(client_class)), 6)
    strategy.start(grid, initial_arrays(), 5)
    trained = {client for own in strategy.train_metrics.values() for client in own}
    assert len(trained) > 3
    for client in trained:
        records = grid.context(node_of(client)).state.array_records
        last = max(records, key=lambda key: int(key.removeprefix("memory.")))
        for vector in strategy.rule.keeps(published):
            mirrored = records[last][ROW + vector].numpy()
            row = getattr(strategy.state.clients[client], vector)
            assert_array_equal(mirrored, row, err_msg=f"{client} {vector}")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("published", [False, True])
def test_where_the_rows_live_does_not_matter(name: str, published: bool) -> None:
    make, client_class = METHODS[name]
    settings = {"lr": 0.5, "published": published, "weights": "size", "fraction_train": 0.5}
    models = []
    for duals in ("strategy", "client"):
        strategy = make(duals=duals, seed=2, **settings)
        grid = Federation(client_app(client_fn_of(client_class)), 6)
        strategy.start(grid, initial_arrays(), 5)
        models.append(strategy.state.w)
        assert ("dual" in strategy.state.clients) == (duals == "strategy")  # O(d) memory
    assert_allclose(*models, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "way", [{"wire_dtype": "float16"}, {"privacy": CLIPPED}], ids=["float16", "clipped"]
)
def test_clients_go_on_from_the_changes_that_arrived(way: Any) -> None:
    """The strategy's sum of changes is the sum of what its clients take it to have."""
    strategies: list[Any] = [
        FedADMM(rho=0.1, lr=0.5, duals="client", seed=2, **way),
        SCAFFOLD(lr=0.5, seed=2, **way),
    ]
    for strategy, client_class in zip(strategies, (FedADMMClient, SCAFFOLDClient), strict=True):
        grid = Federation(client_app(client_fn_of(client_class)), 6)
        strategy.start(grid, initial_arrays(), 4)
        kept = [
            grid.context(node_of(client)).state.array_records["memory.4"] for client in range(6)
        ]
        if client_class is FedADMMClient:
            assert_allclose(sum(own[SUMMED].numpy() for own in kept), strategy.state.total)
            continue
        for name, total in strategy.state.totals.sums.items():
            assert np.abs(total).max() > 1e-3
            held = sum(own[CONTROL + name].numpy() for own in kept)
            assert_allclose(held, total, rtol=1e-5, atol=1e-6)
