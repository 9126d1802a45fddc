"""The collector of cycles rests while the server handles many small objects, and only then."""

from __future__ import annotations

import gc
import weakref

import pytest

from fl_admm_strategies.runtime.common.collector import collector_paused, only_new_collected


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
