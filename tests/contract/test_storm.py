"""Extreme replies, alone and in blocks, joins and leaves: no exception, a finite state."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from flwr.app import MessageType

from fl_admm_strategies import StatefulStrategy
from fl_admm_strategies.runtime.messages import packing
from fl_admm_strategies.runtime.messages import records as wire
from fl_admm_strategies.runtime.messages.records import ClientInstruction, ClientReply, RawReply
from fl_admm_strategies.runtime.messages.seal import SEAL
from fl_admm_strategies.runtime.saving.state import arrays_of
from fl_admm_strategies.runtime.trust.layout import NAMES, ROLES
from tests.support.cases import CASES, NUM_CLIENTS, Case, each_case, grid_of, run
from tests.support.federation import assert_same_bits

pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"
)

REPLIES = 1_000_000  # of the long test, over all cases
MAX_CLIENTS = 12
NUMBERS = [0, -0.0, 1, 5e-324, 1e-300, 1e300, 1.7e308, -1.7e308, np.inf, -np.inf, np.nan]
NUMBERS += [2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 10**400, -1, 0.5, "7", True, [1], b"x"]


@cache
def templates(case: Case) -> dict[tuple[str, int], list[RawReply]]:
    """Return what honest clients reply, by kind of message and round."""
    grid = grid_of(case)
    run(case, grid, 2)
    found: dict[tuple[str, int], list[RawReply]] = {}
    for kind, server_round, replies in grid.received:
        raw = [own for message in replies for _, own in packing.unpack_replies(message.content)]
        for reply in raw:
            reply.metrics.pop(SEAL, None)  # who lies would seal what it sends
        found.setdefault((kind, server_round), []).extend(raw)
    return found


class Storm:
    """Rounds of one run, driven without nodes; half of the replies come in blocks.

    Parameters
    ----------
    case : Case
    seed : int

    Attributes
    ----------
    sent : int
        How many replies it gave.
    accepted : int
        How many of those of training rounds were used.
    """

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.rng = case, np.random.default_rng(seed)
        self.strategy = self._new()
        self.sent = self.accepted = 0
        run = self.strategy.run
        run.begin(wire.from_array_record(case.initial_arrays()), range(NUM_CLIENTS))
        run.handshake(self._honest, {})

    def _new(self) -> StatefulStrategy:
        return self.case.strategy(seed=1, max_missed_rounds=2)

    def _honest(self, asked: dict[int, ClientInstruction], kind: str) -> Iterable[ClientReply]:
        about_model = any(NAMES in own.config for own in asked.values())
        good = [
            r for r in templates(self.case)[(kind, 0)] if (ROLES in (r.arrays or {})) == about_model
        ]
        return [(client, good[client % len(good)]) for client in asked]

    def round(self, server_round: int) -> None:
        """Have a round, and look at what it left."""
        run, rng = self.strategy.run, self.rng
        connected = np.flatnonzero(rng.random(MAX_CLIENTS) < rng.choice([0.3, 0.7, 0.95]))
        here = connected.tolist() or [0]
        run.update_membership(server_round, here, self._replies, {})
        asked = run.configure_train(server_round, {})
        run.aggregate_train(server_round, self._replies(asked, MessageType.TRAIN))
        self.accepted += len(self.strategy.train_metrics.get(server_round, {}))
        asked = run.configure_evaluate(server_round, {})
        run.aggregate_evaluate(server_round, self._replies(asked, MessageType.EVALUATE))
        run.close_round(server_round)
        for key, array in arrays_of(self.strategy.state).items():
            measured = not array.ndim  # by clients, as FedGiA's objective
            assert measured or array.dtype.kind != "f" or not np.isinf(array).any(), key
        json.dumps(run.record.entry(server_round))

    def check_saving(self) -> None:
        """Raise unless the state is what it is after it was saved and loaded."""
        saved, again = self.strategy.state_dict(), self._new()
        again.load_state_dict(saved)
        again.run.begin(
            wire.from_array_record(self.case.initial_arrays()), self.strategy.client_ids
        )
        assert_same_bits(again.state_dict(), saved)

    def _replies(self, asked: dict[int, ClientInstruction], kind: str) -> Iterator[ClientReply]:
        handshake = any("handshake" in own.config for own in asked.values())
        server_round = 0 if handshake else 1 if self.case.counts_once else 2
        good = templates(self.case)[(kind, server_round)]
        good = [reply for reply in good if ROLES not in (reply.arrays or {})]
        packed: dict[int, RawReply] = {}
        for client in self.rng.permutation(list(asked)).tolist():
            for _ in range(self.rng.choice([0, 1, 2], p=[0.1, 0.85, 0.05])):
                self.sent += 1
                who = client if self.rng.random() < 0.98 else int(self.rng.integers(20))
                reply = self._reply(good[client % len(good)])
                if self.rng.random() < 0.5 and _can_be_packed(reply):
                    packed[who] = reply
                else:
                    yield who, reply
        yield from packing.unpack_replies(packing.pack_replies(packed))

    def _reply(self, good: RawReply) -> RawReply:
        rng = self.rng
        if rng.random() < 0.05:
            return RawReply(error="out of memory \u202e" * int(rng.integers(40)))
        arrays = {
            name: extreme(rng, array) if rng.random() < 0.6 else array
            for name, array in (good.arrays or {}).items()
        }
        metrics: dict[str, Any] = dict(good.metrics)
        for name in [*metrics, "another"]:
            if rng.random() < 0.03:
                metrics[name] = NUMBERS[rng.integers(len(NUMBERS))]
        return RawReply(arrays if good.arrays is not None else None, metrics)


def _can_be_packed(reply: RawReply) -> bool:
    """Return whether a node's app could send a reply at all."""
    return all(type(v) in (int, float) and abs(v) != 10**400 for v in reply.metrics.values())


def extreme(rng: np.random.Generator, array: Any) -> Any:
    """Return numbers of an array's type, of any size that the type has; some arrays hold a NaN."""
    if array.dtype.kind == "f":
        info = np.finfo(array.dtype)
        low, high = np.log10(float(info.smallest_subnormal)), np.log10(float(info.max))
        # Ordinary numbers most of the time, or all would be refused.
        exponent = rng.choice([rng.uniform(-2, 2), rng.uniform(low, high)], p=[0.6, 0.4])
        spread = rng.choice([0.0, 1.0, high])
        exponents = np.minimum(exponent + spread * rng.uniform(-1, 1, array.shape), high)
        with np.errstate(all="ignore"):
            found = (rng.choice([-1, 1], array.shape) * 10.0**exponents).astype(array.dtype)
        if rng.random() < 0.05 and found.size:
            found.reshape(-1)[rng.integers(found.size)] = rng.choice([np.nan, np.inf])
        return found
    if array.dtype.kind in "iu":
        bounds = np.iinfo(array.dtype)
        return rng.integers(bounds.min, bounds.max, array.shape, array.dtype, endpoint=True)
    return array


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("flwr").setLevel(logging.INFO)


@each_case
def test_a_storm_leaves_a_finite_state(case: Case) -> None:
    storm = Storm(case, seed=len(case.name))
    for server_round in range(1, 9):
        storm.round(server_round)
    assert storm.accepted > 0
    storm.check_saving()


@pytest.mark.long
@each_case
def test_a_long_storm_leaves_a_finite_state(case: Case) -> None:
    sent = seed = accepted = 0
    while sent < REPLIES / len(CASES):
        storm = Storm(case, seed)
        for server_round in range(1, 101):
            storm.round(server_round)
        storm.check_saving()
        sent, seed, accepted = sent + storm.sent, seed + 1, accepted + storm.accepted
    print(f"{case.name}: {sent:,} replies in {seed} runs, {accepted:,} used")
    assert accepted > 0.1 * sent
