"""AsyncFPFC: its trace by hand, beside FPFC, slow clients, faults, membership, resuming.

See docs/methods/async-fpfc.md.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord
from numpy.testing import assert_allclose

from clients import FPFCClient, client_app
from fl_admm_strategies import (
    FPFC,
    AsyncFPFC,
    InProcessGrid,
    LambdaPath,
    RandomDelay,
    SmoothedSCAD,
)
from tests.support.checkpoints import Killed, killer
from tests.support.federation import (
    FROM_ROUND_3,
    Federation,
    assert_same_bits,
    assert_same_runs,
    client_fn_of,
    initial_arrays,
)
from tests.support.pairs import v_of
from tests.support.points import ScriptedGrid, Spoil, failing, faultless, first, point_app
from tests.support.refusals import refused, warnings_in

SCAD = SmoothedSCAD(lam=0.6, a=3.7, xi=1e-4)
SETTINGS: Mapping[str, Any] = {"rho": 1.0, "lr": 0.1, "local_epochs": 1}


def run(
    num_rounds: int,
    *,
    num_clients: int = 3,
    spoil: Spoil = faultless,
    grid: InProcessGrid | None = None,
    start: Mapping[str, Any] | None = None,
    kind: type[FPFC] = AsyncFPFC,
    **settings: Any,
) -> Any:
    strategy = kind(SCAD, **{**SETTINGS, "fraction_evaluate": 0.0, **settings})
    grid = grid or InProcessGrid(point_app(spoil), num_clients)
    strategy.start(grid, first(), num_rounds, **(start or {}))
    return strategy


def order(strategy: AsyncFPFC) -> list[int]:
    """Return whose reply was taken in, round by round."""
    return [client for clients in strategy.train_metrics.values() for client in clients]


def clock(strategy: AsyncFPFC) -> list[float]:
    return list(strategy.clock.values())


def staleness(strategy: AsyncFPFC) -> list[int]:
    return list(strategy.staleness.values())


# --- The trace ------------------------------------------------------------------------------------

# Device 0 takes 1 s, device 1 2.5 s, device 2 4 s; the lower id is first where two are due.
DELAYS = (1.0, 2.5, 4.0, 1.5, 1.2)
ORDER = [0, 0, 1, 0, 0, 2, 0, 1]
CLOCK = [1.0, 2.0, 2.5, 3.0, 4.0, 4.0, 5.0, 5.0]
STALENESS = [0, 0, 2, 1, 0, 5, 1, 4]
# omega after each reply and (v_01, v_02, v_12), by hand. The first: zeta_0 = 1, so omega_0 =
# 1 - 0.1 (1 - 0) = 0.9, delta_01 = 0.9 - 1 = -0.1 and, by (6), v_01 = (1 - 1e-4/0.6001) (-0.1).
# Then zeta_0 = (0.9 + 2 (1 - 2e-4/1.2002 + 0.09998333611)) / 3 = 1.03331111481, and the second:
# omega_0 = 0.9 - 0.1 (0.9 + 0.9 - 1.03331111481) = 0.82333111148. The third: device 1 was sent
# zeta_1 = 1 at the start and has not heard of device 0: omega_1 = 1 - 0.1 (1 - 0.2) = 0.92, and
# delta_12 = 0.92 - 1. The sixth is device 2's, as old as the run: omega_2 = 1 - 0.1 (1 - 5) = 1.4.
OMEGA = [
    (0.9, 1.0, 1.0),
    (0.82333111148, 1.0, 1.0),
    (0.82333111148, 0.92, 1.0),
    (0.77121326107, 0.92, 1.0),
    (0.7409127177, 0.92, 1.0),
    (0.7409127177, 0.92, 1.4),
    (0.712580739, 0.92, 1.4),
    (0.712580739, 0.837671794713, 1.4),
]
V = [
    (-0.09998333611, -0.09998333611, 0.0),
    (-0.27660612361, -0.27660612361, 0.0),
    (-0.37321280999, -0.27660612361, -0.07998666889),
    (-0.52191256349, -0.50530864443, -0.07998666889),
    (-0.6, -0.6, -0.07998666889),
    (-0.6, -0.56524277512, -0.55989335333),
    (-0.6, -0.5690223317, -0.55989335333),
    (-0.6, -0.5690223317, -0.6),
]


def by_delays(server_round: int, client: int) -> float:
    return DELAYS[client]


def test_the_trace_of_three_devices_of_unequal_speed() -> None:
    seen: list[tuple[Any, Any]] = []

    def look(server_round: int, metrics: Any) -> None:
        pairs = strategy.state.pairs
        v = [v_of(pairs, 0, 1)[0], v_of(pairs, 0, 2)[0], v_of(pairs, 1, 2)[0]]
        seen.append((pairs.omega[:, 0].copy(), v))

    strategy = AsyncFPFC(SCAD, delay=by_delays, fraction_evaluate=0.0, **SETTINGS)
    strategy.start(InProcessGrid(point_app(), 3), first(), 8, on_round=look)
    assert order(strategy) == ORDER
    assert clock(strategy) == CLOCK
    assert staleness(strategy) == STALENESS
    for (omega, v), expected, duals in zip(seen, OMEGA, V, strict=True):
        assert_allclose(omega, expected, rtol=0, atol=1e-9)
        assert_allclose(v, duals, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("num_clients", "fraction"), [(3, 0.3), (1, 1.0)])
def test_with_one_client_at_a_time_it_is_sequential_fpfc(num_clients: int, fraction: float) -> None:
    settings = {"fraction_train": fraction, "min_available_nodes": 1, "seed": 4}
    strategy = run(12, num_clients=num_clients, delay=1.0, **settings)
    fpfc = run(12, num_clients=num_clients, kind=FPFC, min_train_nodes=1, **settings)
    assert order(strategy) == order(fpfc)
    assert staleness(strategy) == [0] * 12
    assert_allclose(strategy.state.pairs.omega, fpfc.state.pairs.omega, rtol=0, atol=0)
    assert_same_bits(strategy.state.pairs.state_arrays(), fpfc.state.pairs.state_arrays())


# --- Slow clients ---------------------------------------------------------------------------------


def slow(server_round: int, client: int) -> float:
    return 1000.0 if client == 2 else 1.0


def test_a_client_that_is_1000_times_slower_holds_up_nobody() -> None:
    strategy = run(41, num_clients=5, delay=slow)
    assert Counter(order(strategy)) == {0: 11, 1: 10, 3: 10, 4: 10}
    assert strategy.run.pending.clock == 11.0


# --- Real time ------------------------------------------------------------------------------------


def test_without_a_clock_replies_are_taken_in_as_they_come() -> None:
    arrivals = [1, 2, 1, 1, 0, 2, 1]
    strategy = run(7, grid=ScriptedGrid(point_app(), 3, arrivals))
    assert order(strategy) == arrivals
    assert staleness(strategy) == [0, 1, 1, 0, 4, 3, 2]
    assert clock(strategy) == sorted(clock(strategy))
    assert clock(strategy)[0] > 0


def test_a_client_that_trains_is_not_asked_to_evaluate_but_after_the_last_round() -> None:
    strategy = run(3, grid=ScriptedGrid(point_app(), 3, [1, 2, 1]), fraction_evaluate=1.0)
    assert {r: list(of_clients) for r, of_clients in strategy.evaluate_metrics.items()} == {
        1: [1, 2],  # 2 has replied as well, which is taken in next
        2: [1, 2],
        3: [0, 1, 2],
    }


@pytest.mark.slow
def test_a_reply_that_does_not_come_within_the_timeout_is_asked_for_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    grid = ScriptedGrid(point_app(), 2, [0, 0])
    began = time.monotonic()
    run(3, grid=grid, start={"timeout": 0.3})
    assert time.monotonic() - began >= 0.3
    assert warnings_in(caplog.records, "clients [0, 1]", "timeout")


# --- Faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, math.nan], ids=["fails", "is refused"])
def test_a_reply_that_is_of_no_use_ends_no_round(
    value: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    spoil = failing([1], [1], value)
    strategy = run(8, spoil=spoil, delay=by_delays)
    # Device 1's reply is due at 2.5 s, in round 3, which ends with device 0's at 3 s. It is asked
    # again in round 4, at 3 s, and due at 5.5 s.
    assert order(strategy) == [0, 0, 0, 0, 2, 0, 1, 0]
    (line,) = warnings_in(caplog.records, "client 1")
    assert line.startswith("round 3:")
    assert strategy.last_round == 8


def test_a_run_in_which_everybody_fails_ends_with_their_error() -> None:
    with refused(RuntimeError, "the disk of 2 is full"):
        run(9, spoil=failing([0, 1, 2], range(1, 99)), delay=1.0)


def test_a_round_without_any_usable_reply_asks_everybody_again() -> None:
    strategy = run(4, spoil=failing([0, 1, 2], [1]), delay=1.0)
    assert dict(strategy.train_metrics) == {r: strategy.train_metrics[r] for r in (2, 3, 4)}
    assert order(strategy) == [0, 1, 2]
    assert clock(strategy) == [2.0, 2.0, 2.0]


# --- Clients that come and go ---------------------------------------------------------------------


def test_a_client_joins_with_its_first_reply() -> None:
    grid = Federation(point_app(), (0, 1, 4, 2), FROM_ROUND_3)
    strategy = run(7, grid=grid, delay=1.0)
    # Asked in round 3, when the first two have replied, it is due with them at 2 s.
    assert order(strategy) == [0, 1, 4, 0, 1, 2, 4]
    assert strategy.client_ids == [0, 1, 2, 4]
    assert strategy.membership.num_initial == 3
    # Its first instruction had no pull; it set out from the mean of omega_0, omega_1 and omega_4.
    assert_allclose(strategy.state.pairs.omega[2], 0.9 * np.mean([0.9, 0.92, 1.0]) + 0.5)


def test_what_was_on_its_way_to_a_client_that_left_is_forgotten() -> None:
    grid = Federation(point_app(), (0, 1, 2), {0: [2, 3, 4], 3: [2, 3], 9: [2, 3, 4]})
    members: dict[int, list[int]] = {}

    def on_round(server_round: int, metrics: Any) -> None:
        members[server_round] = list(strategy.client_ids)
        if server_round == 6:
            assert 2 not in strategy.run.pending.sent

    strategy = AsyncFPFC(
        SCAD, delay=by_delays, max_missed_rounds=2, fraction_evaluate=0.0, **SETTINGS
    )
    strategy.start(grid, first(), 24, on_round=on_round)
    assert members[3] == [0, 1, 2]
    assert members[5] == [0, 1]
    assert 2 not in order(strategy)[:8]
    assert members[24] == [0, 1, 2]


# --- Resuming -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    spoil = failing([4], range(1, 9))

    def start(kill: int | None, **options: Any) -> AsyncFPFC:
        folder: dict[str, Any] = {} if kill is None else {"checkpoint_dir": tmp_path}
        if kill:
            folder |= {"on_round": killer(kill)}
        settings: dict[str, Any] = {"delay": RandomDelay(20.0), "fraction_evaluate": 0.5}
        options = {
            "train_config": ConfigRecord({"note": "a", "raw": b"\x00\xff"}),
            "checkpoint_every": 3,
            **folder,
            **options,
        }
        return run(30, num_clients=5, spoil=spoil, start=options, max_norm="auto", **settings)  # type: ignore[no-any-return]

    whole = start(None)
    for kill in (8, 9, 21):
        with pytest.raises(Killed):
            start(kill, resume=kill > 8)
    resumed = start(0, resume=True)
    assert_same_runs(resumed, whole)
    assert clock(resumed) == clock(whole)


# --- Other settings -------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_a_lambda_the_search_comes_first_in_rounds() -> None:
    strategy = AsyncFPFC(lr=0.2, delay=1.0, consensus_rounds=2, fraction_evaluate=0.0)
    strategy.start(InProcessGrid(client_app(client_fn_of(FPFCClient)), 4), initial_arrays(), 14)
    search = strategy.state.source.found.last_round + 2  # with the re-check
    assert {
        len(of_clients) for r, of_clients in strategy.train_metrics.items() if 1 <= r <= search
    } == {4}
    assert {len(of_clients) for r, of_clients in strategy.train_metrics.items() if r > search} == {
        1
    }
    assert clock(strategy)[search - 1] == search
    assert clock(strategy)[-1] == search + math.ceil((14 - search) / 4)


def test_settings_out_of_range_are_refused() -> None:
    for settings in ({"delay": -1.0},):
        with refused(ValueError, *settings):
            AsyncFPFC(SCAD, **settings)  # type: ignore[arg-type]
    with refused(TypeError, "LambdaPath"):
        AsyncFPFC(LambdaPath([0.1, 0.2]))  # type: ignore[arg-type]
    with refused(ValueError, "delay(1, 0)"):
        run(2, delay=lambda server_round, client: math.nan)


def test_what_waits_for_rounds_is_refused() -> None:
    strategy = AsyncFPFC(SCAD)
    with refused(RuntimeError, "AsyncFPFC"):
        strategy.configure_train(1, first(), ConfigRecord(), InProcessGrid(point_app(), 2))
