"""The collector of cycles rests while the server handles many small objects, and only then."""

from __future__ import annotations

import gc
import weakref

import pytest

from clients import client_app
from fl_admm_strategies import InProcessGrid
from fl_admm_strategies.runtime.common.collector import collector_paused, only_new_collected
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
        with only_new_collected():
            assert gc.get_freeze_count() == 0
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


class Ring:
    """An object that only the collector takes away."""

    def __init__(self) -> None:
        self.own = self


@pytest.mark.slow
def test_new_garbage_is_collected_and_old_objects_are_not_looked_at() -> None:
    old, before = Ring(), Ring()
    seen, gone = weakref.ref(old), weakref.ref(before)
    del before
    with only_new_collected():
        assert gone() is None  # what was garbage does not stay until the end
        new = Ring()
        left = weakref.ref(new)
        del new, old
        gc.collect()
        assert left() is None
        assert seen() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert seen() is None


def test_who_has_frozen_objects_finds_them_frozen() -> None:
    gc.freeze()
    try:
        with only_new_collected():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


@pytest.mark.slow
def test_a_client_that_raises_leaves_no_object_frozen() -> None:
    class Failing(Adding):
        def fit(self, parameters, config):
            assert gc.get_freeze_count() > 0
            raise KeyError

    app = client_app(client_fn_of(Failing), num_clients=4)
    with pytest.raises(RuntimeError, match="KeyError"):
        Mean(fraction_evaluate=0.0).start(InProcessGrid(app, 2), initial_arrays(), 3)
    assert gc.get_freeze_count() == 0
