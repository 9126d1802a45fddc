"""`privacy`: how much noise is in what is given out, what one client changes, and epsilon.

That every method has it or refuses it is a check of `checks.py`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message
from numpy.typing import NDArray
from torch import nn

from clients import (
    DittoClient,
    FedADMMClient,
    FLAMEClient,
    SGDClient,
    client_app,
)
from fl_admm_strategies import (
    FLAME,
    ClientDP,
    Ditto,
    FedADMM,
    FedAvg,
    StatefulStrategy,
)
from fl_admm_strategies.runtime.messages.changes import Clipping, Noise
from tests.contract.checks import ROUNDS, SECRET, WEIGHTED, resumed
from tests.support.cases import NUM_CLIENTS as M
from tests.support.cases import case_of, grid_of, run, sampling
from tests.support.federation import (
    Adding,
    Federation,
    assert_same_bits,
    client_fn_of,
    initial_arrays,
    node_of,
    trained,
)
from tests.support.pace import fast
from tests.support.refusals import Warned, refused

dp_accounting = pytest.importorskip("dp_accounting", reason="needs the extra 'privacy'")

CLIP, Z, DELTA = 0.2, 1.5, 1e-3
DP = ClientDP(clip=CLIP, noise_multiplier=Z, delta=DELTA)
LOCAL = ClientDP(clip=CLIP, noise_multiplier=Z, delta=DELTA, noise_at="client")
CLEAN = ClientDP(clip=CLIP, noise_multiplier=0, delta=DELTA)
VICTIM = 3


def run_of(strategy: Any, client: Any, num_rounds: int, model: Any = None) -> Any:
    grid = Federation(client_app(client_fn_of(client)), M)
    strategy.start(grid, model or initial_arrays(), num_rounds)
    return strategy


def fed_admm(privacy: ClientDP | None = DP, num_rounds: int = 1, **settings: Any) -> FedADMM:
    given = {"rho": 0.1, "lr": 0.5, "local_epochs": 1, "duals": "client", **settings}
    strategy: FedADMM = FedADMM(seed=SECRET, privacy=privacy, fraction_evaluate=0, **given)
    return run_of(strategy, FedADMMClient, num_rounds)


def epsilons(strategy: StatefulStrategy) -> list[float]:
    means = strategy.run.record.result.train_metrics_clientapp
    return [float(means[server_round]["epsilon"]) for server_round in sorted(means)]  # type: ignore[arg-type]


def flat(arrays: Mapping[str, Any]) -> NDArray[np.float64]:
    return np.concatenate([np.ravel(a).astype(np.float64) for a in arrays.values()])


# --- What one client can change, and how much noise is in what is given out ----------------------

# By how much a change of 1 in the sum of the uploads is in w, where all m clients train: 1/m of the
# mean of the uploads, and 1/m of the mean dual.
GAINS: dict[str, float] = {
    **dict.fromkeys(["FedAvg", "FedProx", "LocalSGD", "FedALA", "FedSim", "PFedMe"], 1 / M),
    **dict.fromkeys(["Ditto", "FedAlt", "LGFedAvg", "FedRoD", "FedCP", "PerFedAvg"], 1 / M),
    "SCAFFOLD": 0.9 / M,
    **dict.fromkeys(["FedADMM-client-duals", "FLAME-client-duals", "FedDyn"], 2 / M),
}


def released(name: str, dp: ClientDP, seed: int, num_rounds: int, **options: Any) -> Any:
    """Return the model that a method gives out."""
    settings = {"weights": "uniform"} if name in WEIGHTED else {}
    case = case_of(name)
    strategy = case.strategy(seed=seed, privacy=dp, fraction_evaluate=0, **settings)
    return flat(run(case, grid_of(case, **options), num_rounds, strategy).global_model())


@pytest.mark.parametrize("name", fast(["FedAvg", "FedADMM-client-duals"], GAINS))
def test_the_noise_that_is_given_out_has_the_size_that_is_derived(name: str) -> None:
    found: list[NDArray[np.float64]] = []
    for seed in range(SECRET, SECRET + 9):
        if sum(noise.size for noise in found) <= 90:
            found.append(released(name, DP, seed, 1) - released(name, CLEAN, seed, 1))
    noise = np.concatenate(found) / (GAINS[name] * Z * CLIP)
    assert 0.72 < noise.std() < 1.32  # 4 deviations of 90 numbers; less than the square root of 2
    assert abs(noise.mean()) < 4 / math.sqrt(len(noise))


# Where clients send changes of their own variables, a changed upload is refused.
CLIPPED_BY_SERVER = [name for name in GAINS if case_of(name).strategy().upload.kind == "mean"]


@pytest.mark.parametrize("name", fast(["FedAvg"], CLIPPED_BY_SERVER))
def test_a_client_changes_what_is_given_out_by_its_clip(name: str) -> None:
    """Opposite uploads are 2 C apart in the sum."""

    def upload(value: float) -> Any:
        def spoil(replies: list[Message]) -> list[Message]:
            for reply in replies:
                if reply.metadata.src_node_id == node_of(VICTIM):
                    arrays = {n: a.numpy() for n, a in reply.content["arrays"].items()}
                    changed = {n: Array(np.full_like(a, value)) for n, a in arrays.items()}
                    reply.content["arrays"] = ArrayRecord(changed)
            return replies

        return spoil

    ends = [released(name, CLEAN, 1, 3, spoil={3: upload(value)}) for value in (1e6, -1e6)]
    change = np.linalg.norm(ends[0] - ends[1])
    assert change == pytest.approx(2 * CLIP * GAINS[name], rel=1e-2)


def test_the_mean_of_clipped_models_has_noise_of_z_clip_over_n() -> None:
    """One number of a wide model after another: a sample of N(0, (z C/n)^2)."""
    d = 40_000
    start = ArrayRecord({"x": Array(np.zeros(d))})
    strategy = FedAvg(seed=SECRET, privacy=DP, fraction_evaluate=0)
    w = flat(run_of(strategy, Adding, 1, start).global_model())
    # Adding moves all numbers by one and the same: clipped to C that is C/sqrt(d) in each.
    assert w.mean() == pytest.approx(CLIP / math.sqrt(d), abs=5 * Z * CLIP / M / math.sqrt(d))
    assert w.std() == pytest.approx(Z * CLIP / M, rel=0.02)


def test_noise_0_is_a_max_norm() -> None:
    bounds: list[dict[str, Any]] = [{"privacy": CLEAN}, {"max_norm": CLIP}]
    clipped, bounded = (
        run_of(Ditto(seed=SECRET, lr=0.5, fraction_evaluate=0, **bound), DittoClient, 3)
        for bound in bounds
    )
    assert_same_bits(clipped.global_model(), bounded.global_model())
    assert clipped.train_metrics == bounded.train_metrics


def test_every_upload_counts_alike() -> None:
    """Clients have 10 to 15 examples; the mean of theirs, unclipped, is the plain one."""
    free = ClientDP(clip=1e6, noise_multiplier=0, delta=DELTA)
    strategy = run_of(FedAvg(seed=3, privacy=free, fraction_evaluate=0), Adding, 1)
    moves = [float(m["loss"]) for m in strategy.train_metrics[1].values()]
    moved = flat(strategy.global_model())
    moved -= flat({n: a.numpy() for n, a in initial_arrays().items()})
    np.testing.assert_allclose(moved, np.mean(moves), rtol=1e-5)


def test_a_round_that_is_done_again_with_other_uploads_has_other_noise() -> None:
    """With the same noise, the difference of the two would be without any."""
    noises = [
        flat(fed_admm(lr=lr).global_model()) - flat(fed_admm(CLEAN, lr=lr).global_model())
        for lr in (0.5, 0.25)
    ]
    assert np.abs(noises[0] - noises[1]).min() > 0


def test_a_client_clips_over_all_arrays_and_adds_noise() -> None:
    sent = {"a": np.ones(3, np.float32), "b": np.zeros((2, 2), np.float32)}
    upload = {"a": np.array([4, 1, 1], np.float32), "b": np.array([[4, 0], [0, 0]], np.float32)}
    clipped = Clipping(1.0)(upload, sent)
    np.testing.assert_allclose(clipped["a"], [1.6, 1.0, 1.0], rtol=1e-5)  # (3, 4)/5 of 1
    np.testing.assert_allclose(clipped["b"], [[0.8, 0.0], [0.0, 0.0]], rtol=1e-5)
    assert_same_bits(Clipping(10.0)(upload, sent), upload)
    noisy = Noise(0.3)({"x": np.ones(40_000)}, {})["x"]
    assert noisy.std() == pytest.approx(0.3, rel=0.02)
    assert noisy.mean() == pytest.approx(1.0, abs=0.01)


# --- Epsilon --------------------------------------------------------------------------------------


def test_epsilon_is_the_librarys() -> None:
    """Of FedADMM: a Gaussian mechanism, of sensitivity 2 C, for each round of a client."""
    strategy = fed_admm(num_rounds=4, fraction_train=0.5)
    asked = [trained(strategy)[server_round] for server_round in (1, 2, 3, 4)]
    for last, found in enumerate(epsilons(strategy), start=1):
        most = max(sum(c in clients for clients in asked[:last]) for c in range(M))
        expected = dp_accounting.get_epsilon_gaussian(Z / 2 / math.sqrt(most), DELTA)
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_epsilon_of_clients_that_keep_nothing_counts_the_draw() -> None:
    strong = ClientDP(clip=CLIP, noise_multiplier=8.0, delta=DELTA)
    strategy = FedAvg(seed=SECRET, privacy=strong, fraction_evaluate=0, fraction_train=0.1)
    grid = Federation(client_app(client_fn_of(Adding), num_clients=60), 1)
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
        return run_of(strategy, SGDClient, num_rounds)

    found = epsilons(part(DP, 4, part(LOCAL, 2).state_dict()))[-1]
    expected = dp_accounting.get_epsilon_gaussian(Z / 2 / math.sqrt(4), DELTA)
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "name", fast(["FLAME-client-duals"], ["Ditto", "FLAME-client-duals", "SCAFFOLD"])
)
def test_a_resumed_run_goes_on_to_the_same_bits_and_the_same_epsilon(
    name: str, tmp_path: Path
) -> None:
    case = case_of(name)
    settings: Any = {"weights": "uniform"} if name in WEIGHTED else {}
    settings |= {"seed": SECRET, "privacy": DP, "fraction_evaluate": 0}
    whole = run(case, grid_of(case), ROUNDS, sampling(case, **settings))
    again = resumed(case, tmp_path, **settings)
    assert_same_bits(again.state_dict(), whole.state_dict())
    assert epsilons(again) == epsilons(whole)


# --- Refusals -------------------------------------------------------------------------------------


def test_clients_that_do_not_clip_or_add_noise_are_refused(warned: Warned) -> None:
    class Unclipped(FedADMMClient):
        def changed(self, upload: Any, reference: Any, config: Any) -> Any:
            return super().changed(upload, reference, {**config, "privacy-clip": 1e9})

    strategy = FedADMM(rho=0.1, lr=5.0, duals="client", privacy=DP, fraction_evaluate=0)
    with refused(RuntimeError, "the bound is 0.2"):
        run_of(strategy, Unclipped, 3)
    with refused(RuntimeError, "privacy-noised"):
        run_of(FedAvg(privacy=LOCAL, fraction_evaluate=0), Adding, 3)
    assert warned("refused", "the bound is 0.2")
    assert warned("refused", "privacy-noised")


def test_a_seed_that_can_be_guessed_is_named(warned: Warned) -> None:
    run_of(FedAvg(seed=7, privacy=DP, fraction_evaluate=0), Adding, 1)
    assert len(warned("seed=7", "secrets.randbits")) == 1


@pytest.mark.parametrize(
    "given",
    [{"clip": 0}, {"noise_multiplier": -1}, {"delta": 0}, {"delta": 1}, {"noise_at": "cloud"}],
)
def test_what_it_cannot_be_is_named(given: dict[str, Any]) -> None:
    with refused(ValueError, *given):
        ClientDP(**{"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5} | given)


def test_what_does_not_go_with_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(TypeError, "privacy", "ClientDP"):
        FedAvg(privacy=1.0)  # type: ignore[arg-type]
    with refused(ValueError, "privacy"):
        FedADMM(rho=0.1, duals="client", privacy=DP).load_state_dict(fed_admm(None).state_dict())
    grid = Federation(client_app(client_fn_of(DittoClient)), M)
    with refused(ValueError, "collect", "privacy"):
        Ditto(lr=0.5, privacy=LOCAL).start(grid, initial_arrays(), 1, collect=True)
    normed = ArrayRecord(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).state_dict())
    for dp in (DP, LOCAL):
        with refused(ValueError, "1.running_mean", "GroupNorm"):
            run_of(FedAvg(privacy=dp), Adding, 2, normed)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with refused(ImportError, "dp-accounting", "fl-admm-strategies[privacy]"):
        ClientDP(clip=1.0, noise_multiplier=1.0, delta=1e-5)


@pytest.mark.parametrize(
    ("strategy", "client", "named"),
    [
        (Ditto(weights="size", privacy=DP), DittoClient, "weights"),
        (FedAvg(aggregation="median", privacy=DP), SGDClient, "aggregation"),
        (FedADMM(privacy=DP), FedADMMClient, "duals"),
        (FLAME(weights="size", duals="client", privacy=DP), FLAMEClient, "weights"),
        (FedADMM(duals="client", wire_dtype="float16", privacy=DP), FedADMMClient, "wire_dtype"),
        (FedADMM(duals="client", privacy=LOCAL), FedADMMClient, "duals"),
    ],
    ids=lambda value: "",
)
def test_what_has_no_bound_is_refused_by_the_setting(
    strategy: Any, client: Any, named: str
) -> None:
    with refused(ValueError, type(strategy).__name__, named):
        run_of(strategy, client, 2)
