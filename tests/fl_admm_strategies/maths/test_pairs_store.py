"""The pair store against Algorithm 2 as printed, and its memory, states and kernels."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from itertools import combinations
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from fl_admm_strategies.maths.clustering import clusters
from fl_admm_strategies.maths.pairs import Groups, PairwiseStore, kernels_numpy
from fl_admm_strategies.maths.pairs.kernels import fastest_kernels
from fl_admm_strategies.maths.penalties import L1, MCP, Penalty, SmoothedSCAD
from tests.support.federation import assert_same_bits
from tests.support.pairs import num_stored, theta_of, v_of
from tests.support.refusals import refused

try:
    import numba
except ImportError:
    numba = None

PAIRS = "fl_admm_strategies.maths.pairs"
needs_numba = pytest.mark.skipif(numba is None, reason="numba is missing")
# Slow, as numba compiles for some seconds.
ENGINES = ["numpy", pytest.param("numba", marks=[needs_numba, pytest.mark.slow])]
SCAD = SmoothedSCAD(lam=0.6)
# A wide smoothing makes the first regime of (6) more than a corner case.
PENALTIES: list[Penalty] = [SCAD, SmoothedSCAD(0.6, 2.5, 0.2), L1(0.4), MCP(0.5), L1(0.0)]


@pytest.fixture(scope="module", params=ENGINES)
def kernels(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(f"{PAIRS}.kernels_{request.param}")


def prox(penalty: Penalty, delta: np.ndarray, rho: float) -> np.ndarray:
    """Return argmin_theta g(||theta||) + rho/2 ||delta - theta||^2."""
    return penalty.prox_scale(np.linalg.norm(delta), rho) * delta


def loaded(arrays: dict[str, Any], like: PairwiseStore) -> PairwiseStore:
    store = PairwiseStore(arrays["omega"], like.penalty, like.rho, like._kernels)
    store.load_state_arrays(arrays)
    return store


class Dense:
    """Algorithm 2 as printed: all of theta and v, (6) and (A.3), float64.

    With groups: a penalty of their own inside, moves of absent members, clients in no pair.
    """

    def __init__(
        self, omega: np.ndarray, penalty: Penalty, rho: float, groups: Groups | None = None
    ) -> None:
        m, d = omega.shape
        self.omega = omega.astype(np.float64)
        self.theta, self.v = np.zeros((m, m, d)), np.zeros((m, m, d))
        self.penalty, self.rho, self.groups = penalty, rho, groups

    def update(self, active: np.ndarray, new_omega: np.ndarray) -> None:
        if self.groups is not None and self.groups.move:
            self._move_groups(active, new_omega)
        self.omega[active] = new_omega
        for i, j in combinations(range(len(self.omega)), 2):
            penalty = self._penalty_of(i, j)
            if penalty is None or (i not in active and j not in active):
                continue
            difference = self.omega[i] - self.omega[j]
            self.theta[i, j] = prox(penalty, difference + self.v[i, j] / self.rho, self.rho)
            self.v[i, j] += self.rho * (difference - self.theta[i, j])
            self.theta[j, i], self.v[j, i] = -self.theta[i, j], -self.v[i, j]

    def _penalty_of(self, i: int, j: int) -> Penalty | None:
        if self.groups is None:
            return self.penalty
        labels = self.groups.labels
        if min(labels[i], labels[j]) < 0:
            return None
        return self.groups.inside if labels[i] == labels[j] else self.penalty

    def _move_groups(self, active: np.ndarray, new_omega: np.ndarray) -> None:
        labels, moves = self.groups.labels, np.zeros_like(self.omega)
        for group in set(labels[active]) - {-1}:
            here = labels[active] == group
            moves[labels == group] = (new_omega[here] - self.omega[active[here]]).mean(axis=0)
        moves[active] = 0
        self.omega += moves
        self.theta += moves[:, None] - moves

    def add(self, place: int, omega: np.ndarray) -> None:
        self.omega = np.insert(self.omega, place, omega, axis=0)
        for axis in (0, 1):
            self.theta = np.insert(self.theta, place, 0, axis=axis)
            self.v = np.insert(self.v, place, 0, axis=axis)
        self.theta[place] = omega - self.omega
        self.theta[:, place] = self.omega - omega

    def remove(self, indices: list[int]) -> None:
        self.omega = np.delete(self.omega, indices, axis=0)
        for axis in (0, 1):
            self.theta = np.delete(self.theta, indices, axis=axis)
            self.v = np.delete(self.v, indices, axis=axis)

    def zeta(self) -> np.ndarray:
        return (self.omega[None] + self.theta - self.v / self.rho).mean(axis=1)


def rounds(
    rng: np.random.Generator, start: np.ndarray, count: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Active sets and models that wander between "nearly equal" and "far apart" and back."""
    m, d = start.shape
    centres = rng.normal(size=(m, d)) / np.sqrt(d)
    for _ in range(count):
        active = rng.permutation(m)[: rng.integers(0, m + 1)]
        spread = 10.0 ** rng.uniform(-5, 1)
        models = start[active] + spread * centres[active]
        yield active, models.astype(start.dtype)


def all_pairs(store: PairwiseStore, what: str) -> np.ndarray:
    m = len(store.omega)
    found = {"theta": theta_of, "v": v_of}[what]
    return np.array([[found(store, i, j) for j in range(m)] for i in range(m)])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32 - 1),
    m=st.integers(1, 7),
    d=st.integers(1, 9),
    penalty=st.sampled_from(PENALTIES),
    rho=st.sampled_from([0.9, 1.0, 2.5]),
)
def test_equal_to_the_printed_algorithm_while_clients_come_and_go(
    kernels: ModuleType, dtype: type, seed: int, m: int, d: int, penalty: Penalty, rho: float
) -> None:
    rng = np.random.default_rng(seed)
    start = np.tile(rng.normal(size=d), (m, 1)).astype(dtype)
    store, dense = PairwiseStore(start, penalty, rho, kernels), Dense(start, penalty, rho)
    for step in range(16):
        m = len(store.omega)
        if step % 5 == 3:
            places = sorted(rng.integers(0, m + 1, size=2).tolist())
            models = store.omega.mean(axis=0) + 0.1 * rng.normal(size=(2, d)).astype(dtype)
            store.add(places, models)
            for shift, (place, model) in enumerate(zip(places, models, strict=True)):
                dense.add(place + shift, model)
        elif step % 5 == 4:
            gone = rng.permutation(m)[: m // 3].tolist()
            store.remove(gone)
            dense.remove(gone)
        else:
            ((active, models),) = rounds(rng, store.omega, 1)
            store.update(active, models)
            dense.update(active, models)
        check_equal(store, dense, np.flatnonzero(rng.random(len(store.omega)) < 0.5))
    check_equal(loaded(store.state_arrays(), store), dense, np.arange(len(store.omega)))


def check_equal(store: PairwiseStore, dense: Dense, active: np.ndarray) -> None:
    """All of the store's variables are the printed algorithm's, and its invariants hold."""
    penalty, dtype, m = store.penalty, store.omega.dtype, len(store.omega)
    # Round-off relative to the largest model; a regime border may amplify it (slope of the
    # bent piece of (6): 1/(1 - 1/((a - 1) rho)) < 4 here).
    scale = 1 + np.abs(dense.omega).max()
    close = {"rtol": 0, "atol": 300 * np.finfo(dtype).eps * scale}
    theta, v, zeta = all_pairs(store, "theta"), all_pairs(store, "v"), store.zeta(range(m))
    assert theta.dtype == v.dtype == zeta.dtype == dtype
    assert_array_equal(store.omega, dense.omega.astype(dtype))
    assert_allclose(theta, dense.theta, **close)
    assert_allclose(v, dense.v, **close)
    assert_allclose(zeta, dense.zeta(), **close)
    assert_allclose(store.zeta(active), zeta[active], rtol=0, atol=close["atol"] / 10)
    assert_allclose(store.mean_dual(), dense.v.mean(axis=1), **close)
    assert_array_equal(store.mean_dual(active), store.mean_dual()[active])
    norms = store.theta_norms()
    assert_allclose(norms, np.linalg.norm(dense.theta, axis=2), **close)
    assert_array_equal(norms, norms.T)
    for nu in (0, 1e-4, 0.3, 3.0):
        assert_array_equal(store.clusters(nu), clusters(norms, nu))
    residual = np.linalg.norm(dense.omega[:, None] - dense.omega - dense.theta, axis=2).max()
    assert_allclose(store.primal_residual(), residual, **close)
    # What holds after every update: theta_ji = -theta_ij, v_ji = -v_ij,
    assert_array_equal(theta, -theta.transpose(1, 0, 2))
    assert_array_equal(v, -v.transpose(1, 0, 2))
    assert np.linalg.norm(v, axis=2).max() <= penalty.lam + close["atol"]  # ||v_ij|| <= lambda,
    # and the mean of the zeta_i is that of the omega_i.
    assert_allclose(zeta.mean(axis=0), store.omega.mean(axis=0), **close)


def test_fused_pairs_end_within_the_smoothing_width(kernels: ModuleType) -> None:
    # At a fixed point with ||v|| < lam, theta = (xi/lam) v, so ||theta|| <= xi. Two
    # clients, f_i = .5 ||w - c_i||^2 with c = +-.1; zeta-step solved exactly, 200 full rounds.
    # They fuse: ||v||/m = ||c_i|| gives ||v|| = .2 < .6.
    centres = np.array([[0.1, 0.0], [-0.1, 0.0]])
    store = PairwiseStore(np.zeros((2, 2)), SCAD, 1.0, kernels)
    for _ in range(200):
        store.update([0, 1], (centres + store.zeta([0, 1])) / 2)
    length = np.linalg.norm(v_of(store, 0, 1))
    assert length == pytest.approx(0.2, rel=1e-2)
    assert_allclose(theta_of(store, 0, 1), 1e-4 / 0.6 * v_of(store, 0, 1), rtol=1e-9)
    assert store.theta_norms()[0, 1] <= 1e-4
    # KKT (11): grad f_i + (1/m) sum_j v_ij = 0.
    assert_allclose(store.omega - centres + store.mean_dual(), 0, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_far_client_has_no_influence(kernels: ModuleType, dtype: type) -> None:
    # Both clients leave by more than a lam = 2.22 with v != 0: the update that
    # crosses keeps theta = omega_i - omega_j + v/rho, the next one makes the pair plain.
    store = PairwiseStore(np.zeros((2, 3), dtype), SCAD, 1.0, kernels)
    store.update([0], [[0.3, 0, 0]])
    v = v_of(store, 0, 1)
    assert v[0] == pytest.approx(0.3 * 0.6 / 0.6001)
    store.update([0], [[7.1, 0, 0]])
    assert num_stored(store) == 1
    assert_allclose(theta_of(store, 0, 1), store.omega[0] - store.omega[1] + v)
    assert_array_equal(v_of(store, 0, 1), np.zeros(3))
    store.update([1], [[-1e30, 0.1, 0.7]])
    assert num_stored(store) == 0
    assert_array_equal(theta_of(store, 0, 1), store.omega[0] - store.omega[1])
    assert_array_equal(store.zeta([1, 0]), store.omega[[1, 0]])  # to the last bit
    # And back: v starts again from zero.
    store.update([1], [[6.6, 0, 0]])
    assert num_stored(store) == 1
    assert_allclose(v_of(store, 0, 1), [0.5 * 0.6 / 0.6001, 0, 0], rtol=1e-5)


def wandering_store(kernels: ModuleType, seed: int = 5) -> PairwiseStore:
    rng = np.random.default_rng(seed)
    start = np.zeros((9, 6), np.float32)
    store = PairwiseStore(start, SCAD, 1.0, kernels)
    for active, models in rounds(rng, start, 15):
        store.update(active, models)
    return store


def test_state_round_trip_continues_with_the_same_bits(kernels: ModuleType) -> None:
    store = wandering_store(kernels)
    assert 8 < num_stored(store) < 36
    arrays = copied(store)
    twin, other = loaded(arrays, store), wandering_store(kernels, seed=8)
    other.load_state_arrays(arrays)
    rng = np.random.default_rng(6)
    for active, models in rounds(rng, store.omega.copy(), 6):
        for each in (store, twin, other):
            each.update(active, models)
            assert_array_equal(each.zeta(range(9)), store.zeta(range(9)))
            assert_same_bits(each.state_arrays(), store.state_arrays())


def test_a_state_that_is_being_saved_keeps_its_vectors(kernels: ModuleType) -> None:
    store = PairwiseStore(np.zeros((2, 2)), SCAD, 1.0, kernels)
    store.update([0], [[0.1, 0.2]])
    saved = store.state_arrays()["delta"][:]  # a view, as a writer to a file has it
    store.add([2], [[0.3, 0.3]])
    store.update([2], [[0.4, 0.4]])
    assert num_stored(store) == 3
    assert not np.shares_memory(saved, store.state_arrays()["delta"])
    assert_array_equal(saved, [[0.1, 0.2]])


def copied(store: PairwiseStore) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in store.state_arrays().items()}


def test_order_of_the_active_clients_does_not_matter(kernels: ModuleType) -> None:
    rng = np.random.default_rng(0)
    one, two = (PairwiseStore(np.zeros((8, 5)), SCAD, 1.0, kernels) for _ in range(2))
    for _ in range(5):
        active = rng.permutation(8)[:4]
        models = rng.normal(size=(4, 5))
        one.update(active, models)
        two.update(active[::-1], models[::-1])
    assert_same_bits(one.state_arrays(), two.state_arrays())


def test_a_new_penalty_leaves_the_state_as_it_is(kernels: ModuleType) -> None:
    # The next lambda of a warm-up starts from the same omega, theta, v (hence zeta).
    store = wandering_store(kernels)
    theta, v, zeta = all_pairs(store, "theta"), all_pairs(store, "v"), store.zeta(range(9))
    store.penalty = SmoothedSCAD(lam=1.5)
    restored = loaded(store.state_arrays(), store)
    for same in (store, restored):
        assert_array_equal(all_pairs(same, "theta"), theta)
        assert_array_equal(all_pairs(same, "v"), v)
    assert_array_equal(store.zeta(range(9)), zeta)
    with refused(ValueError, "rho"):
        store.penalty = SmoothedSCAD(lam=1.5, a=1.5)
    assert store.penalty == SmoothedSCAD(lam=1.5)
    with refused(ValueError, "read-only"):
        store.omega[0] = 1


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("norm", None),  # is missing
        ("scale", lambda a: a[1:]),  # of another length
        ("scale", lambda a: a * np.nan),
        ("delta", lambda a: a[:, 1:]),  # of another model
        ("delta", lambda a: a.astype(np.float64)),
        ("omega", lambda a: a[1:]),
        ("pair_j", lambda a: a + 1),  # no such client
        ("pair_i", lambda a: a - 1),
        ("pair_i", lambda a: a * 0),  # a pair twice
        ("pair_i", lambda a: np.array([1, 2, 0], np.int32)),  # a client with itself
        ("omega", lambda a: a + np.nan),
        ("rho", lambda a: a + 1),
    ],
)
def test_a_spoilt_state_is_refused_and_changes_nothing(name: str, spoil: Any) -> None:
    store = PairwiseStore(np.zeros((3, 2), np.float32), SCAD, 1.0, kernels_numpy)
    store.update([0, 1, 2], [[0, 0.1], [0, 0.2], [0, 0.3]])
    kept = copied(store)
    spoilt = copied(store)
    del spoilt[name]
    if spoil is not None:
        spoilt[name] = spoil(kept[name])
    with refused(ValueError):
        store.load_state_arrays(spoilt)
    assert_same_bits(store.state_arrays(), kept)


def test_separation_gives_memory_back(kernels: ModuleType) -> None:
    rng = np.random.default_rng(2)
    m, d = 12, 50
    store = PairwiseStore(np.zeros((m, d), np.float32), SCAD, 1.0, kernels)
    dense = Dense(store.omega, SCAD, 1.0)
    near, labels = 0.01 * rng.normal(size=(m, d)), np.arange(m) % 3
    apart = near + 10 * labels[:, None]
    # The second update crosses: v = 0 then, and the vectors stay for one more.
    for models, count in ((near, 66), (apart, 66), (apart, 3 * 6)):
        store.update(range(m), models)
        dense.update(np.arange(m), models)
        assert store.state_arrays()["delta"].shape == (count, d)
    assert_allclose(all_pairs(store, "v"), dense.v, atol=1e-5)
    assert_array_equal(store.clusters(0.5), labels)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [1, 31, 32, 100, 1024 + 65])
def test_norms_of_long_and_of_huge_vectors(kernels: ModuleType, dtype: type, width: int) -> None:
    rng = np.random.default_rng(0)
    # Squares beyond what float32 can hold, and sums of many.
    models = (rng.normal(size=(3, width)) * [[1.0], [10.0], [1e25]]).astype(dtype)
    store = PairwiseStore(np.zeros_like(models), L1(1e28), 1.0, kernels)
    for _ in range(2):
        store.update(range(3), models)
    for i, j in zip(*np.triu_indices(3, k=1), strict=True):
        slot = store._vectors.slot_of[i, j]
        exact = np.linalg.norm(store._vectors.delta[slot].astype(np.float64))
        assert_allclose(store._vectors.norm[slot], exact, rtol=1e-12)


@pytest.mark.slow
@needs_numba
def test_work_that_is_shared_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from fl_admm_strategies.maths.pairs import kernels_numba

    def piece_by_piece(kernel: Any, args: Any, count: int, _step: int, _nbytes: int) -> None:
        for start in range(count):
            kernel(*args, start, start + 1)

    states = []
    for share in (kernels_numba._share, piece_by_piece):
        monkeypatch.setattr(kernels_numba, "_share", share)
        start = np.zeros((7, 1024 + 17), np.float32)  # several blocks of columns
        store = PairwiseStore(start, SCAD, 1.0, kernels_numba)
        for active, models in rounds(np.random.default_rng(1), start, 6):
            store.update(active, models)
        more = {"zeta": store.zeta(range(7)), "norms": store.theta_norms()}
        states.append(store.state_arrays() | more)
    assert_same_bits(*states)


@pytest.mark.slow
def test_threads_take_every_piece_once() -> None:
    kernels_numba = pytest.importorskip(f"{PAIRS}.kernels_numba")
    taken = np.zeros(1003, int)

    def count(start: int, stop: int) -> None:
        taken[start:stop] += 1

    for step, nbytes in ((10, 2**30), (10, 0), (2000, 2**30)):
        kernels_numba._share(count, (), len(taken), step, nbytes)
    assert_array_equal(taken, 3)


def test_without_numba_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, f"{PAIRS}.kernels_numba", raising=False)
    monkeypatch.delattr(f"{PAIRS}.kernels_numba", raising=False)
    fastest_kernels.cache_clear()
    logger = logging.getLogger("flwr")
    logger.addHandler(caplog.handler)  # Flower's logger does not propagate
    try:
        with caplog.at_level(logging.INFO, logger="flwr"):
            assert [fastest_kernels() for _ in range(2)] == [kernels_numpy, kernels_numpy]
    finally:
        logger.removeHandler(caplog.handler)
        fastest_kernels.cache_clear()
    lines = {id(r): r for r in caplog.records if "pip install numba" in r.getMessage()}
    assert len(lines) == 1


# --- Groups that are held together ----------------------------------------------------------------


@pytest.mark.parametrize("move", [True, False])
def test_groups_are_held_and_move_together(kernels: ModuleType, move: bool) -> None:
    rng = np.random.default_rng(5)
    labels = np.array([0, 0, 1, 0, 1, -1, 2, -1])
    start = (3.0 * np.maximum(labels, 0)[:, None] + np.arange(4)).astype(np.float64)
    groups = Groups(labels, SmoothedSCAD(4.0), move)
    store, dense = PairwiseStore(start, SCAD, 1.0, kernels), Dense(start, SCAD, 1.0, groups)
    store.groups = groups
    same = labels[:, None] == labels
    for _ in range(30):
        active = np.sort(rng.permutation(6)[:2])
        models = dense.omega[active] + rng.normal(scale=0.4, size=(2, 4))
        absent = np.setdiff1d(np.flatnonzero(np.isin(labels, labels[active])), active)
        moved = absent[labels[absent] >= 0].tolist() if move else []
        assert store.update(active, models).tolist() == moved
        dense.update(active, models)
        assert_allclose(store.omega, dense.omega, atol=1e-9)
        assert_allclose(all_pairs(store, "v"), dense.v, atol=1e-9)
        taken = np.isin(np.arange(8), active)
        sure = (taken[:, None] | taken | same) & (labels[:, None] >= 0) & (labels >= 0)
        if not move:
            sure &= dense.theta.any(axis=2)  # of a pair that has not been updated it is 0 there
        assert_allclose(all_pairs(store, "theta")[sure], dense.theta[sure], atol=1e-9)
    assert np.linalg.norm(dense.v[0, 1]) > SCAD.lam  # more than the others' lambda holds
    assert_array_equal(dense.v[[5, 7]], 0)


def test_a_client_in_no_pair_is_a_cluster_of_its_own(kernels: ModuleType) -> None:
    # 0 and 2 are near 1 and not near each other: without it there are two clusters.
    store = PairwiseStore(np.array([[0.0], [0.5], [1.0]]), SmoothedSCAD(0.0), 1.0, kernels)
    assert store.clusters(0.6).tolist() == [0, 0, 0]
    assert store.clusters(0.6, alone=[1]).tolist() == [0, 1, 2]
    with refused(ValueError, "nu"):
        store.clusters(-0.1)
    store.place(1, np.array([7.0]))
    assert store.omega[:, 0].tolist() == [0.0, 7.0, 1.0]
