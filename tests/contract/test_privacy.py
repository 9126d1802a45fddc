"""`privacy`: what every strategy promises of it, and where it is refused."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import nn

from clients import (
    DittoClient,
    FedADMMClient,
    FLAMEClient,
    FPFCClient,
    SGDClient,
    client_app,
)
from fl_admm_strategies import (
    FLAME,
    FPFC,
    ClientDP,
    Ditto,
    FedADMM,
    FedAvg,
    FedMCADMM,
    InProcessGrid,
    SmoothedSCAD,
    SquaredL2,
    StatefulStrategy,
)
from fl_admm_strategies.runtime.messages.noise import with_noise
from fl_admm_strategies.runtime.saving.state import arrays_of
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
from tests.support.pace import fast
from tests.support.refusals import Warned, names, refused

dp_accounting = pytest.importorskip("dp_accounting", reason="needs the extra 'privacy'")

CLIP, Z, DELTA = 0.2, 1.5, 1e-3
DP = ClientDP(clip=CLIP, noise_multiplier=Z, delta=DELTA)
LOCAL = ClientDP(clip=CLIP, noise_multiplier=Z, delta=DELTA, noise_at="client")
SECRET = 2**100 + 1  # nobody guesses it, so nothing is logged

CENTRAL = {"FedAvg", "FedProx", "LocalSGD", "PerFedAvg", "FedALA", "FedSim", "FedMAvg", "PFedMe"}
CENTRAL |= {"FedADMM", "FedAPM", "Ditto", "FedAlt", "LG-FedAvg", "FedRoD", "FedCP", "FLAME"}
CENTRAL |= {"FedMC-ADMM", "LpProj", "LpProjADMM", "PFedMeMatched", "FedDyn", "SCAFFOLD"}
CENTRAL |= {"FedADMM-published", "FedADMM-published-client-duals", "FedADMM-client-duals"}
CENTRAL |= {"FedAPM-client-duals", "FLAME-client-duals"}
CENTRAL |= {"FedEASE", "FedMC-ADMM-linear", "FedMC-ADMM-implicit-client-duals"}
SUMMED = {"FedDyn", "SCAFFOLD", "FedALS", "FedALS-implicit", "FedEASE", "FedMGS", "IFCA"}
"""Uploads that are added to what clients keep, or are no models: no noise of the client's either"""
ASKS_FOR_DATA = {"PACFL", "FedMC-ADMM-rated", "FedMC-ADMM-client-duals", "FedMC-ADMM-exact-rated"}


def private(case: Case, dp: ClientDP = DP, num_rounds: int = 2, **settings: Any) -> Any:
    strategy = case.strategy(seed=SECRET, privacy=dp, fraction_evaluate=0, **settings)
    return begun(strategy, case, num_rounds)


def begun(strategy: Any, case: Case, num_rounds: int) -> Any:
    strategy.start(grid_of(case), case.initial_arrays(), num_rounds)
    return strategy


def uniform(case: Case) -> dict[str, Any]:
    """Return what those need whose uploads count by their examples otherwise."""
    by_size = {"Ditto", "FedAlt", "LG-FedAvg", "FedRoD", "FedCP"}
    by_size |= {"FedADMM-client-duals", "FLAME-client-duals"}
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
        goes = case.name not in SUMMED | ASKS_FOR_DATA | {"FedGiA", "FedGiA-gram"}
        assert names(caught.value, "noise_at='client'") == goes
        assert strategy.last_round == 0
        assert not strategy.run.has_begun
        return
    noisy = private(case, **uniform(case))
    first, second = epsilons(noisy)
    assert 0 < first < math.inf
    assert first < second < math.inf or (case.counts_once and first == second)
    clipped = private(case, ClientDP(clip=CLIP, noise_multiplier=0, delta=DELTA), **uniform(case))
    assert epsilons(clipped) == [math.inf, math.inf]
    assert differs(arrays_of(noisy.state), arrays_of(clipped.state))
    assert_same_bits(noisy.state_dict(), private(case, **uniform(case)).state_dict())
    assert not warned()


@each_case
def test_noise_at_the_clients_is_in_every_upload_or_refused_before_round_1(case: Case) -> None:
    changes = "client-duals" in case.name
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
        assert differs(arrays_of(strategy.state), arrays_of(private(case, LOCAL).state))


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
    moves = [float(m["loss"]) for m in strategy.train_metrics[1].values()]
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


@each_case
def test_no_client_is_told_a_seed_that_must_stay_secret(case: Case) -> None:
    grid, strategy = grid_of(case), case.strategy(seed=SECRET, fraction_evaluate=0)
    strategy.start(grid, case.initial_arrays(), 1)
    configs = [
        config
        for _, _, messages in grid.sent
        for message in messages
        for config in message.content.config_records.values()
    ]
    told = [value for config in configs for value in config.values()]
    assert told
    assert not any(isinstance(value, int) and value >= 2**63 for value in told)


def test_a_seed_that_can_be_guessed_is_named(warned: Warned) -> None:
    run_of(FedAvg(seed=7, privacy=DP, fraction_evaluate=0), Adding, 1)
    assert len(warned("seed=7", "secrets.randbits")) == 1


# --- What one client can change, and how much noise is in what is given out ----------------------

M = NUM_CLIENTS
FLAME_RHO = 0.2
SLOPE = (1 / M) / (1 / M + FLAME_RHO)
"""FLAME's and Lp-Proj's: w_i' = (a theta + rho w - pi)/(a + rho), with a = lambda alpha_i = 1/m."""

SUMS: dict[str, tuple[str, dict[str, Any], float]] = {
    "FedADMM": ("FedADMM", {"rho": 0.1}, 1.0),
    "FedADMM, from its own": ("FedADMM", {"rho": 0.1, "start_at": "own"}, 1.0),
    "FedADMM, published": ("FedADMM", {"rho": 0.1, "published": True}, 2.0),
    "FedADMM, client": ("FedADMM", {"rho": 0.1, "duals": "client"}, 1.0),
    "FedADMM, published, client": (
        "FedADMM",
        {"rho": 0.1, "duals": "client", "published": True},
        1.0,
    ),
    "FedAPM": ("FedAPM", {}, 1.0),
    "FLAME": ("FLAME", {}, SLOPE),
    "FLAME, published": ("FLAME", {"published": True}, 2 * SLOPE),
    "FLAME, client": ("FLAME", {"duals": "client"}, 1.0),
    "FLAME, published, client": ("FLAME", {"published": True, "duals": "client"}, 1.0),
    "FedMC-ADMM": ("FedMC-ADMM", {"beta": 0.3}, 1.0),
    "FedMC-ADMM, from V": ("FedMC-ADMM", {"beta": 0.3, "start_at": "global"}, 1.0),
    "FedMC-ADMM, published": ("FedMC-ADMM", {"beta": 0.3, "published": True}, 2.0),
    "FedMC-ADMM, client": ("FedMC-ADMM", {"beta": 0.3, "duals": "client"}, 1.0),
    "LpProjADMM": ("LpProjADMM", {}, 2 * SLOPE),
    "PFedMeMatched": ("PFedMeMatched", {"outer_lr": 1.0}, 1.0),
    "FedDyn": ("FedDyn", {}, 1.0),
}
"""The case, settings, and by how much a client's message changes when its upload does by 1."""

FAST_SUMS = ["FedADMM", "FedADMM, published", "FLAME", "FLAME, client", "FedMC-ADMM", "FedDyn"]


def total_of(strategy: Any) -> NDArray[np.float64]:
    consensus = strategy.state.consensus
    found: NDArray[np.float64] = getattr(consensus, "mean", consensus).total
    return found.copy()


@pytest.mark.parametrize("form", fast(FAST_SUMS, SUMS))
def test_a_client_changes_the_sum_by_its_clip_at_most(form: str) -> None:
    """One client a round, whose dual has grown in earlier ones. Its bound is reached, too."""
    name, settings, slope = SUMS[form]
    case, clip = case_of(name), 0.02
    dp = ClientDP(clip=clip, noise_multiplier=0, delta=DELTA)
    strategy = case.strategy(
        seed=SECRET, privacy=dp, fraction_evaluate=0, fraction_train=0.17, **settings
    )
    totals = []
    strategy.start(
        grid_of(case),
        case.initial_arrays(),
        12,
        on_round=lambda server_round, metrics: totals.append(total_of(strategy)),
    )
    clients = [c for asked in trained(strategy).values() for c in asked]
    assert len(clients) == 12 > len(set(clients))  # so some were asked again
    changes = [np.linalg.norm(b - a) for a, b in pairwise(totals)]
    assert max(changes) <= slope * clip * (1 + 1e-4)
    assert max(changes) >= slope * clip * (1 - 1e-2)


FORMS = [("FedADMM", False), ("FedADMM", True), ("FLAME", False), ("FLAME", True)]
FORMS += [("FedMC-ADMM", False)]


@pytest.mark.parametrize(("name", "published"), fast([("FLAME", True)], FORMS))
def test_clients_that_clip_themselves_run_as_those_that_the_server_clips(
    name: str, published: bool
) -> None:
    """The clip is of z_i, or pi_i/rho, where clients keep them, and of the upload elsewhere."""
    case, slope = case_of(name), (2.0 if published else 1.0) * (SLOPE if name == "FLAME" else 1.0)
    # A client of FedMC-ADMM starts at the W_i that it has itself, which no server's clip changes.
    own: dict[str, Any] = {"FedADMM": {"rho": 0.1}, "FedMC-ADMM": {"start_at": "global"}}
    given = own.get(name, {}) | {"published": published}
    ends = []
    for duals, clip in (("strategy", 0.05), ("client", 0.05 * slope)):
        dp = ClientDP(clip=clip, noise_multiplier=0, delta=DELTA)
        strategy = private(case, dp, 5, duals=duals, fraction_train=0.5, **given)
        assert sum(m.get("refused", 0) for m in means_of(strategy)) == 0
        ends.append(flat(strategy.global_model()))
    free = private(case, ClientDP(clip=1e6, noise_multiplier=0, delta=DELTA), 5, **given)
    assert np.abs(ends[0] - flat(free.global_model())).max() > 1e-3
    np.testing.assert_allclose(ends[0], ends[1], atol=1e-5)


def means_of(strategy: StatefulStrategy) -> list[Any]:
    return [*strategy.run.record.result.train_metrics_clientapp.values()]


# By how much noise of 1 in the sum of the uploads is in w, where all m clients train: 1/m of the
# mean of the uploads, 1/m of the mean dual. V of FedMC-ADMM then shrinks by R's prox, and the one
# of Lp-Proj is 20 numbers of no model.
PROX = 1 / (1 + 0.1 / (M * 1.0))
GAINS: dict[str, tuple[float, dict[str, Any]]] = {
    **dict.fromkeys(["FedAvg", "FedProx", "LocalSGD", "FedALA", "FedSim", "PFedMe"], (1 / M, {})),
    **dict.fromkeys(["Ditto", "FedAlt", "LG-FedAvg", "FedRoD", "FedCP"], (1 / M, {})),
    "PerFedAvg": (1 / M, {}),
    **dict.fromkeys(["FedADMM", "FedAPM", "FedDyn"], (2 / M, {})),
    "FedADMM-client-duals": (2 / M, {}),
    "FedADMM-published": (2 / M, {}),
    "FedADMM-published-client-duals": (1 / M, {}),
    "FedAPM-client-duals": (1 / M, {}),
    "FLAME": (2 * SLOPE / M, {}),
    "FLAME-client-duals": (2 / M, {}),
    **dict.fromkeys(
        ["FedMC-ADMM", "FedMC-ADMM-linear", "FedMC-ADMM-implicit-client-duals"],
        (2 * PROX / M, {}),
    ),
    "LpProj": (1 / M, {"dimension": 20}),
    "LpProjADMM": (2 * SLOPE / M, {"dimension": 20}),
    "PFedMeMatched": (1 / M, {}),
    "SCAFFOLD": (0.9 / M, {}),
}


def released(strategy: Any) -> NDArray[np.float64]:
    if (model := strategy.global_model()) != {}:
        return flat(model)
    state = strategy.state
    return flat({"w": state.w if hasattr(state, "w") else state.consensus.w})


@pytest.mark.parametrize("name", fast(["FedAvg", "FedADMM"], GAINS))
def test_the_noise_that_is_given_out_has_the_size_that_is_derived(name: str) -> None:
    case, (gain, settings) = case_of(name), GAINS[name]
    found: list[NDArray[np.float64]] = []
    for seed in range(SECRET, SECRET + 9):
        if sum(noise.size for noise in found) > 90:
            break
        noisy, clean = (
            case.strategy(
                **{"seed": seed, "privacy": dp, "fraction_evaluate": 0, **settings},
                **uniform(case),
            )
            for dp in (DP, ClientDP(clip=CLIP, noise_multiplier=0, delta=DELTA))
        )
        found.append(released(begun(noisy, case, 1)) - released(begun(clean, case, 1)))
    noise = np.concatenate(found) / (gain * Z * CLIP)
    assert 0.72 < noise.std() < 1.32  # 4 deviations of 90 numbers; less than the square root of 2
    assert abs(noise.mean()) < 4 / math.sqrt(len(noise))


def test_every_case_with_noise_at_the_server_is_measured() -> None:
    # A proximal step at the server, an inverse; test_fedease.py has the noise in the sum.
    assert CENTRAL - GAINS.keys() == {"FedMAvg", "FedEASE"}


@pytest.mark.parametrize(
    "name", fast(["FLAME"], ["FLAME", "PFedMeMatched", "LpProjADMM", "FedMC-ADMM"])
)
def test_no_sum_is_added_up_anew_without_its_noise(name: str) -> None:
    strategy = private(case_of(name))
    consensus = getattr(strategy.state.consensus, "mean", strategy.state.consensus)
    before = total_of(strategy)
    consensus.rebuild(np.zeros((1, before.size)))
    np.testing.assert_array_equal(total_of(strategy), before)


def test_the_control_variates_have_noise_of_their_own() -> None:
    """Of SCAFFOLD's upload, y_i - x and the change of c_i clipped together: noise in both sums."""
    clean = ClientDP(clip=CLIP, noise_multiplier=0, delta=DELTA)
    case = case_of("SCAFFOLD")
    noisy, plain = (private(case, dp, 1) for dp in (DP, clean))
    in_c = total_of(noisy) - total_of(plain)
    in_x = (flat(noisy.global_model()) - flat(plain.global_model())) * M / 0.9
    assert 0.6 < in_c.std() / (Z * CLIP) < 1.5
    assert abs(np.corrcoef(in_c, in_x)[0, 1]) < 0.6  # one draw for each number
    ((change, *_),) = [plain.state.consensus.w[None]]
    x = flat({n: a.numpy() for n, a in case.initial_arrays().items()})
    moved = np.linalg.norm([*(change - x) / 0.9, *total_of(plain) / M])
    assert moved <= CLIP * (1 + 1e-5)


def test_a_client_that_does_not_clip_itself_is_refused(warned: Warned) -> None:
    class Unclipped(FedADMMClient):
        def clipped(self, upload: Any, sent: Any, config: Any) -> Any:
            return upload, 1.0

    strategy = FedADMM(rho=0.1, lr=5.0, duals="client", privacy=DP, fraction_evaluate=0)
    with refused(RuntimeError, "the bound is 0.2"):
        run_of(strategy, Unclipped, 3)
    assert warned("client 0 refused", "the bound is 0.2")


# --- Epsilon --------------------------------------------------------------------------------------


def test_epsilon_is_the_librarys() -> None:
    """Of FedADMM: a Gaussian mechanism, of sensitivity 2 C, for each round of a client."""
    strategy = fed_admm(num_rounds=4, fraction_train=0.5)
    asked = [trained(strategy)[server_round] for server_round in (1, 2, 3, 4)]
    for last, found in enumerate(epsilons(strategy), start=1):
        most = max(sum(c in clients for clients in asked[:last]) for c in range(NUM_CLIENTS))
        expected = dp_accounting.get_epsilon_gaussian(Z / 2 / math.sqrt(most), DELTA)
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
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


RESUMED = ["FedAvg", "FedADMM", "FedADMM-published-client-duals", "FLAME", "FLAME-client-duals"]
RESUMED += ["FedMC-ADMM", "LpProjADMM", "PFedMeMatched", "FedDyn", "SCAFFOLD"]


@pytest.mark.parametrize("name", fast(["FedADMM-published-client-duals"], RESUMED))
def test_a_resumed_run_goes_on_to_the_same_bits_and_the_same_epsilon(
    name: str, tmp_path: Path
) -> None:
    case = case_of(name)

    def start(folder: str, num_rounds: int, **options: Any) -> Any:
        strategy = case.strategy(
            seed=SECRET, privacy=DP, fraction_train=0.5, fraction_evaluate=0, **uniform(case)
        )
        client_class = partial(case.client_class, state_dir=tmp_path / folder / "clients")
        grid = InProcessGrid(client_app(client_fn_of(client_class)), NUM_CLIENTS)
        options = {"checkpoint_dir": tmp_path / folder, **options}
        strategy.start(grid, case.initial_arrays(), num_rounds, **options)
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
    np.testing.assert_allclose(clipped["a"], [1.6, 1.0, 1.0], rtol=1e-6)  # (3, 4)/5 of 1
    np.testing.assert_allclose(clipped["b"], [[0.8, 0.0], [0.0, 0.0]], rtol=1e-6)
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
        FedAvg(privacy=1.0)  # type: ignore[arg-type]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with refused(ImportError, "dp-accounting", "fl-admm-strategies[privacy]"):
        ClientDP(clip=1.0, noise_multiplier=1.0, delta=1e-5)


@pytest.mark.parametrize(
    ("strategy", "client", "named"),
    [
        (Ditto(weights="size", privacy=DP), DittoClient, ["weights"]),
        (FedAvg(aggregation="median", privacy=DP), SGDClient, ["aggregation"]),
        (FedADMM(max_missed_rounds=3, privacy=DP), FedADMMClient, ["max_missed_rounds"]),
        (FLAME(max_missed_rounds=3, privacy=DP), FLAMEClient, ["max_missed_rounds"]),
        (FLAME(weights="size", privacy=DP), FLAMEClient, ["weights"]),
        (FedADMM(duals="client", wire_dtype="float16", privacy=DP), FedADMMClient, ["wire_dtype"]),
        (FedADMM(duals="client", privacy=LOCAL), FedADMMClient, ["duals"]),
        (
            FedMCADMM(SquaredL2(0.1), solve="linear", y0="handshake", privacy=DP),
            FedADMMClient,
            ["y0"],
        ),
        (FedMCADMM(SquaredL2(0.1), rows="rated", privacy=DP), FedADMMClient, ["rows"]),
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
    assert case_of("FedAvg").strategy(privacy=DP).run.bound.max_norm == CLIP
