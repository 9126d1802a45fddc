"""`privacy`: what every strategy promises of it, and where it is refused."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import nn

from clients import DittoClient, FedADMMClient, FPFCClient, SGDClient, client_app
from fl_admm_strategies import (
    FPFC,
    ClientDP,
    Ditto,
    FedADMM,
    FedAvg,
    InProcessGrid,
    SmoothedSCAD,
    StatefulStrategy,
)
from fl_admm_strategies.runtime.messages.noise import with_noise
from tests.support.cases import NUM_CLIENTS, Case, case_of, each_case, grid_of
from tests.support.checkpoints import Killed, killer
from tests.support.federation import (
    Adding,
    assert_same_bits,
    client_fn_of,
    differs,
    initial_arrays,
    trained,
)
from tests.support.refusals import Warned, names, refused

dp_accounting = pytest.importorskip("dp_accounting", reason="needs the extra 'privacy'")

CLIP, Z, DELTA = 0.2, 1.5, 1e-3
DP = ClientDP(clip=CLIP, noise_multiplier=Z, delta=DELTA)
LOCAL = ClientDP(clip=CLIP, noise_multiplier=Z, delta=DELTA, noise_at="client")
SECRET = 2**100 + 1  # nobody guesses it, so nothing is logged

CENTRAL = {"FedAvg", "FedProx", "LocalSGD", "PerFedAvg", "FedALA", "FedSim", "FedMAvg", "PFedMe"}
CENTRAL |= {"FedADMM", "FedAPM", "Ditto", "FedAlt", "LG-FedAvg", "FedRoD", "FedCP"}
SUMMED = {"FedDyn", "SCAFFOLD", "FedMGS", "IFCA"}
"""Uploads that are added to what clients keep, or are no models: no noise of the client's either"""
ASKS_FOR_DATA = {"PACFL", "FedMC-ADMM-rated", "FedMC-ADMM-client-duals"}


def private(case: Case, dp: ClientDP = DP, num_rounds: int = 2, **settings: Any) -> Any:
    strategy = case.strategy(seed=SECRET, privacy=dp, fraction_evaluate=0, **settings)
    return begun(strategy, case, num_rounds)


def begun(strategy: Any, case: Case, num_rounds: int) -> Any:
    strategy.start(grid_of(case), case.initial_arrays(), num_rounds)
    return strategy


def uniform(case: Case) -> dict[str, Any]:
    """Return what those need whose uploads count by their examples otherwise."""
    by_size = ("Ditto", "FedAlt", "LG-FedAvg", "FedRoD", "FedCP")
    return {"weights": "uniform"} if case.name in by_size else {}


def epsilons(strategy: StatefulStrategy) -> list[float]:
    means = strategy.run.record.result.train_metrics_clientapp
    return [float(means[server_round]["epsilon"]) for server_round in sorted(means)]  # type: ignore[arg-type]


@each_case
def test_noise_at_the_server_is_in_the_state_or_refused_before_round_1(
    case: Case, warned: Warned
) -> None:
    if case.name not in CENTRAL:
        strategy = case.strategy(seed=SECRET, privacy=DP)
        with pytest.raises(ValueError, match="privacy") as caught:
            begun(strategy, case, 2)
        assert names(caught.value, type(strategy).__name__)
        # It is no advice where the client's noise is refused as well.
        assert names(caught.value, "noise_at='client'") == (not strategy.why_unaltered)
        assert strategy.last_round == 0
        assert not strategy.run.has_begun
        return
    noisy = private(case, **uniform(case))
    assert 0 < epsilons(noisy)[0] < epsilons(noisy)[1] < math.inf
    clipped = private(case, ClientDP(clip=CLIP, noise_multiplier=0, delta=DELTA), **uniform(case))
    assert epsilons(clipped) == [math.inf, math.inf]
    assert differs(noisy.state_dict(), clipped.state_dict())
    assert_same_bits(noisy.state_dict(), private(case, **uniform(case)).state_dict())
    assert not warned()


@each_case
def test_noise_at_the_clients_is_in_every_upload_or_refused_before_round_1(case: Case) -> None:
    changes = "client-duals" in case.name and "FedGiA" not in case.name
    strategy = case.strategy(seed=SECRET, privacy=LOCAL, fraction_evaluate=0)
    if changes or case.name in SUMMED | ASKS_FOR_DATA or case.name in ("FedGiA", "FedGiA-gram"):
        with refused(ValueError, type(strategy).__name__, "privacy"):
            begun(strategy, case, 2)
        assert strategy.last_round == 0
        return
    begun(strategy, case, 2)
    first, second = epsilons(strategy)
    assert 0 < first < second if case.server_learns else first == second == 0
    if case.server_learns:  # whatever the seed: the server would know noise that follows from it
        assert differs(strategy.state_dict(), private(case, LOCAL).state_dict())


# --- What is in the state -------------------------------------------------------------------------


def fed_admm(privacy: ClientDP | None = DP, num_rounds: int = 1, **settings: Any) -> FedADMM:
    settings = {"rho": 0.1, "lr": 0.5, "local_epochs": 1, "fraction_evaluate": 0} | settings
    strategy = FedADMM(seed=SECRET, privacy=privacy, **settings)
    run_of(strategy, FedADMMClient, num_rounds)
    return strategy


def run_of(strategy: Any, client: Any, num_rounds: int, model: Any = None) -> Any:
    grid = InProcessGrid(client_app(client_fn_of(client)), NUM_CLIENTS)
    strategy.start(grid, model or initial_arrays(), num_rounds)
    return strategy


def flat(arrays: Mapping[str, Any]) -> NDArray[np.float64]:
    return np.concatenate([np.ravel(a).astype(np.float64) for a in arrays.values()])


def test_noise_0_is_a_max_norm() -> None:
    clipped = fed_admm(ClientDP(clip=CLIP, noise_multiplier=0, delta=DELTA), 3)
    bounded = fed_admm(None, 3, max_norm=CLIP)
    found = {name: a for name, a in clipped.state_dict().items() if "privacy" not in name}
    assert_same_bits(found, bounded.state_dict())
    assert clipped.train_metrics == bounded.train_metrics


def test_the_mean_of_clipped_models_has_noise_of_z_clip_over_n() -> None:
    """One number of a wide model after another: a sample of N(0, (z C/n)^2)."""
    n, d = NUM_CLIENTS, 40_000
    start = ArrayRecord({"x": Array(np.zeros(d))})
    strategy = FedAvg(seed=SECRET, privacy=DP, fraction_evaluate=0)
    run_of(strategy, Adding, 1, start)
    w = flat(strategy.state.model)
    # Adding moves all numbers by one and the same: clipped to C that is C/sqrt(d) in each.
    assert w.mean() == pytest.approx(CLIP / math.sqrt(d), abs=5 * Z * CLIP / n / math.sqrt(d))
    assert w.std() == pytest.approx(Z * CLIP / n, rel=0.02)


def test_the_noise_of_consensus_is_in_w_and_the_sum_and_in_no_clients_dual() -> None:
    """w+ = w + S/n + (total + S)/m: with n = m the noise of S is in w by 2/m, once in total."""
    noisy, clean = fed_admm(), fed_admm(ClientDP(clip=CLIP, noise_multiplier=0, delta=DELTA))
    for client in noisy.client_ids:
        ours, theirs = (s.state.consensus.clients[client].pi for s in (noisy, clean))
        np.testing.assert_array_equal(ours, theirs)
    in_sum = noisy.state.consensus.mean.total - clean.state.consensus.mean.total
    in_w = noisy.state.consensus.w - clean.state.consensus.w
    np.testing.assert_allclose(in_w, 2 * in_sum / NUM_CLIENTS, atol=1e-6)
    assert 0.5 < in_sum.std() / (Z * CLIP) < 1.5  # of 31 numbers


def test_the_sum_is_not_added_up_anew_without_its_noise() -> None:
    strategy = fed_admm()
    before = strategy.state.consensus.mean.total.copy()
    strategy.state.consensus.aggregate(anew=True)
    np.testing.assert_array_equal(strategy.state.consensus.mean.total, before)


def test_every_upload_counts_alike() -> None:
    """Clients have 10 to 15 examples; the mean of theirs, unclipped, is the plain one."""
    free = ClientDP(clip=1e6, noise_multiplier=0, delta=DELTA)
    strategy = run_of(FedAvg(seed=3, privacy=free, fraction_evaluate=0), Adding, 1)
    moves = [m["loss"] for m in strategy.train_metrics[1].values()]
    moved = flat(strategy.state.model) - flat({n: a.numpy() for n, a in initial_arrays().items()})
    np.testing.assert_allclose(moved, np.mean(moves), rtol=1e-5)


def test_a_round_that_is_done_again_with_other_uploads_has_other_noise() -> None:
    """With the same noise, the difference of the two would be without any."""
    clean = ClientDP(clip=CLIP, noise_multiplier=0, delta=DELTA)

    def total(**settings: Any) -> NDArray[np.float64]:
        found: NDArray[np.float64] = fed_admm(**settings).state.consensus.mean.total
        return found

    noises = [total(lr=lr) - total(privacy=clean, lr=lr) for lr in (0.5, 0.25)]
    assert np.abs(noises[0] - noises[1]).min() > 0


def test_a_seed_that_can_be_guessed_is_named(warned: Warned) -> None:
    run_of(FedAvg(seed=7, privacy=DP, fraction_evaluate=0), Adding, 1)
    assert len(warned("seed=7", "secrets.randbits")) == 1


# --- Epsilon --------------------------------------------------------------------------------------


def test_epsilon_is_the_librarys() -> None:
    """Of FedADMM: a Gaussian mechanism, of sensitivity 2 C, for each round of a client."""
    strategy = fed_admm(num_rounds=4, fraction_train=0.5)
    asked = [trained(strategy)[server_round] for server_round in (1, 2, 3, 4)]
    for last, found in enumerate(epsilons(strategy), start=1):
        most = max(sum(c in clients for clients in asked[:last]) for c in range(NUM_CLIENTS))
        expected = dp_accounting.get_epsilon_gaussian(Z / 2 / math.sqrt(most), DELTA)
        assert found == pytest.approx(expected, rel=1e-9)


def test_epsilon_of_clients_that_keep_nothing_counts_the_draw() -> None:
    strong = ClientDP(clip=CLIP, noise_multiplier=8.0, delta=DELTA)
    strategy = FedAvg(seed=SECRET, privacy=strong, fraction_evaluate=0, fraction_train=0.1)
    grid = InProcessGrid(client_app(client_fn_of(Adding), num_clients=60), 1)
    strategy.start(grid, initial_arrays(), 3)
    accountant = dp_accounting.rdp.RdpAccountant(
        range(2, 65), dp_accounting.NeighboringRelation.REPLACE_ONE
    )
    drawn = dp_accounting.SampledWithoutReplacementDpEvent(60, 6, dp_accounting.GaussianDpEvent(4))
    accountant.compose(drawn, 3)
    found = epsilons(strategy)[-1]
    assert found == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-9)
    assert found < dp_accounting.get_epsilon_gaussian(4, DELTA)


def test_a_run_that_goes_on_with_the_noise_elsewhere_counts_both_parts() -> None:
    def part(dp: ClientDP, num_rounds: int, state: Any = None) -> FedAvg:
        strategy = FedAvg(seed=SECRET, privacy=dp, fraction_evaluate=0, lr=0.5)
        if state is not None:
            strategy.load_state_dict(state)
        run_of(strategy, SGDClient, num_rounds)
        return strategy

    half = part(LOCAL, 2)
    found = epsilons(part(DP, 4, half.state_dict()))[-1]
    expected = dp_accounting.get_epsilon_gaussian(Z / 2 / math.sqrt(4), DELTA)
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("client", [SGDClient, FedADMMClient])
def test_a_resumed_run_goes_on_to_the_same_bits_and_the_same_epsilon(
    client: Any, tmp_path: Path
) -> None:
    kind: Any = {SGDClient: FedAvg, FedADMMClient: FedADMM}[client]

    def start(folder: str, num_rounds: int, **options: Any) -> Any:
        strategy = kind(seed=SECRET, privacy=DP, fraction_train=0.5, lr=0.5, fraction_evaluate=0)
        grid = InProcessGrid(client_app(client_fn_of(client)), NUM_CLIENTS)
        options = {"checkpoint_dir": tmp_path / folder, **options}
        strategy.start(grid, initial_arrays(), num_rounds, **options)
        return strategy

    whole = start("whole", 6)
    with pytest.raises(Killed):
        start("parts", 6, on_round=killer(3))
    resumed = start("parts", 6, resume=True)
    assert_same_bits(resumed.state_dict(), whole.state_dict())
    assert epsilons(resumed) == epsilons(whole)


def test_a_run_without_privacy_cannot_be_continued_with_it() -> None:
    before = fed_admm(None)
    with refused(ValueError, "privacy"):
        FedADMM(rho=0.1, privacy=DP).load_state_dict(before.state_dict())


# --- Noise at the client --------------------------------------------------------------------------


def test_a_client_clips_over_all_arrays_and_adds_noise() -> None:
    sent = {"a": np.ones(3, np.float32), "b": np.zeros((2, 2), np.float32)}
    upload = {"a": np.array([4, 1, 1], np.float32), "b": np.array([[4, 0], [0, 0]], np.float32)}
    clipped = with_noise(upload, sent, clip=1.0, std=0.0)
    np.testing.assert_allclose(clipped["a"], [1.6, 1, 1], rtol=1e-6)  # (3, 4)/5 of 1
    np.testing.assert_allclose(clipped["b"], [[0.8, 0], [0, 0]], rtol=1e-6)
    near = with_noise(upload, sent, clip=10.0, std=0.0)
    assert_same_bits(near, upload)
    wide = {"x": np.zeros(40_000)}
    assert with_noise(wide, wide, clip=1.0, std=0.3)["x"].std() == pytest.approx(0.3, rel=0.02)


def test_a_client_that_does_not_add_noise_is_refused(warned: Warned) -> None:
    strategy = FedAvg(privacy=LOCAL, fraction_evaluate=0)
    with refused(RuntimeError, "privacy-noised"):
        run_of(strategy, Adding, 3)
    assert warned("client 0 refused", "privacy-noised")


def test_what_a_client_keeps_is_not_what_it_has_sent() -> None:
    """So the next message has its dual, as the server makes it of noisy uploads."""
    at_server, at_client = (
        ClientDP(clip=1e6, noise_multiplier=1e-6, delta=DELTA, noise_at=place)
        for place in ("server", "client")
    )
    assert fed_admm(at_server).membership.has_current_state(0)
    assert not fed_admm(at_client).membership.has_current_state(0)


def test_fpfc_has_it_at_the_clients() -> None:
    strategy = FPFC(SmoothedSCAD(0.5), lr=0.2, privacy=LOCAL, fraction_evaluate=0)
    run_of(strategy, FPFCClient, 2)
    assert epsilons(strategy)[1] == pytest.approx(
        dp_accounting.get_epsilon_gaussian(Z / 2 / math.sqrt(2), DELTA), rel=1e-9
    )


def test_personal_models_are_not_fetched_without_noise() -> None:
    strategy = Ditto(lr=0.5, privacy=LOCAL)
    grid = InProcessGrid(client_app(client_fn_of(DittoClient)), NUM_CLIENTS)
    with refused(ValueError, "collect", "privacy"):
        strategy.start(grid, initial_arrays(), 1, collect=True)


# --- Refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [{"clip": 0}, {"noise_multiplier": -1}, {"delta": 0}, {"delta": 1}, {"noise_at": "cloud"}],
)
def test_what_it_cannot_be_is_named(given: dict[str, Any]) -> None:
    with refused(ValueError, *given):
        ClientDP(**{"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5} | given)


def test_another_object_is_refused() -> None:
    with refused(TypeError, "privacy", "ClientDP"):
        FedAvg(privacy=1.0)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with refused(ImportError, "dp-accounting", "fl-admm-strategies[privacy]"):
        ClientDP(clip=1.0, noise_multiplier=1.0, delta=1e-5)


@pytest.mark.parametrize(
    ("strategy", "client", "named"),
    [
        (Ditto(weights="size", privacy=DP), DittoClient, ["weights"]),
        (FedAvg(aggregation="median", privacy=DP), SGDClient, ["aggregation"]),
        (FedADMM(published=True, privacy=DP), FedADMMClient, ["published"]),
        (FedADMM(duals="client", privacy=DP), FedADMMClient, ["duals"]),
        (FedADMM(max_missed_rounds=3, privacy=DP), FedADMMClient, ["max_missed_rounds"]),
    ],
    ids=lambda value: "",
)
def test_what_has_no_bound_is_refused_by_the_setting(
    strategy: Any, client: Any, named: list[str]
) -> None:
    with refused(ValueError, type(strategy).__name__, *named):
        run_of(strategy, client, 2)


@pytest.mark.parametrize("dp", [DP, LOCAL], ids=["server", "client"])
def test_a_batch_norm_is_refused(dp: ClientDP) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    strategy = FedAvg(privacy=dp)
    with refused(ValueError, "1.running_mean", "GroupNorm"):
        run_of(strategy, Adding, 2, ArrayRecord(model.state_dict()))


def test_max_norm_does_nothing_beside_it() -> None:
    assert {"max_norm", "on_excess"} <= FedAvg(privacy=DP, max_norm=3.0).idle_settings
    assert case_of("FedAvg").strategy(privacy=DP).run.bound.max_norm == CLIP
