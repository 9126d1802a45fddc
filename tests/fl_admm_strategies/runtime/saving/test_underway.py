"""What is on its way to clients: kept as it was sent, and saved."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fl_admm_strategies.runtime.messages.records import ClientInstruction
from fl_admm_strategies.runtime.saving.pending import PendingReplies


def underway() -> PendingReplies:
    own = PendingReplies()
    arrays = {"anchor": {"w/1": np.arange(6.0).reshape(2, 3), "b": np.ones(3, np.float32)}}
    config = {"server-round": 4, "a": True, "b": b"\x00\xff", "c": 0.1, "d": "base64:", "run": "x"}
    own.add(2**63, ClientInstruction(arrays, config), 4, 7.25)
    own.add(0, ClientInstruction({"model": {}}, {"server-round": 5}), 5, math.nan)
    own.clock = 6.5
    return own


def test_what_is_under_way_is_saved_as_it_was() -> None:
    saved, loaded = underway().state_arrays(), PendingReplies()
    assert all(array.dtype.kind in "biuf" for array in saved.values())
    loaded.load_state_arrays(saved)
    assert loaded.clock == 6.5
    own = loaded.sent[2**63]
    sent = {"server-round": 4, "a": True, "b": b"\x00\xff", "c": 0.1, "d": "base64:"}
    assert own.instruction.config == sent
    assert (own.server_round, own.arrival) == (4, 7.25)
    assert list(own.instruction.groups["anchor"]) == ["w/1", "b"]
    assert own.instruction.groups["anchor"]["b"].dtype == np.float32
    assert math.isnan(loaded.sent[0].arrival)
    again = loaded.state_arrays()
    assert {key: array.tobytes() for key, array in again.items()} == {
        key: array.tobytes() for key, array in saved.items()
    }


@pytest.mark.parametrize("name", ["clock", "clients", "0", f"{2**63}", f"{2**63}/1"])
def test_a_part_that_is_missing_is_said(name: str) -> None:
    saved = underway().state_arrays()
    del saved[name]
    with pytest.raises((ValueError, KeyError), match=name):
        PendingReplies().load_state_arrays(saved)
