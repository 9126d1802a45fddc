"""The collector of cycles rests while the server handles many small objects, and only then."""

from __future__ import annotations

import gc

import pytest

from clients import client_app
from fl_admm_strategies import InProcessGrid
from fl_admm_strategies.runtime.common.collector import collector_paused
from tests.support.federation import Adding, Mean, client_fn_of, initial_arrays


def test_it_rests_and_goes_on_whatever_happens() -> None:
    @collector_paused()
    def look(*, fail: bool) -> bool:
        with collector_paused():
            pass
        if fail:
            raise KeyError
        return gc.isenabled()

    assert gc.isenabled()
    assert look(fail=False) is False
    with pytest.raises(KeyError):
        look(fail=True)
    assert gc.isenabled()


def test_who_has_switched_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("num_nodes", [1, 4])
def test_clients_run_with_it(num_nodes: int) -> None:
    class Looking(Adding):
        def fit(self, parameters, config):
            assert gc.isenabled()
            return super().fit(parameters, config)

    app = client_app(client_fn_of(Looking), num_clients=4)
    strategy = Mean(fraction_evaluate=0.0)
    strategy.start(InProcessGrid(app, num_nodes), initial_arrays(), 1)
    assert sorted(strategy.train_metrics[1]) == [0, 1, 2, 3]
