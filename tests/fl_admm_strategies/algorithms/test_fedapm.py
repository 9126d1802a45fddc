"""FedAPM against its golden traces, its theory and what may travel; docs/methods/fedapm.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context
from numpy.testing import assert_allclose
from numpy.typing import NDArray
from torch import Tensor, nn

from clients import (
    FedADMMClient,
    FedAPMClient,
    client_app,
)
from clients.toolkit.round.mirror import Turn
from fl_admm_strategies import FedADMM, FedAPM
from tests.support.federation import (
    Federation,
    assert_same_bits,
    client_fn_of,
    initial_arrays,
    node_of,
)

# --- f_i(v, u) = 1/2 |B_i v + A_i u - c_i|^2 as a model -----------------------------------------


class Linear(nn.Module):
    """B v + A u on the rows (B, A) of the inputs."""

    def __init__(self, size_v: int, size_u: int) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.zeros(size_v, dtype=torch.float64))
        self.u = nn.Parameter(torch.zeros(size_u, dtype=torch.float64))

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ torch.cat([self.v, self.u])


def half_square_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * ((outputs - targets) ** 2).sum()


class Quadratic:
    """f_i(v, u) = 1/2 |B v + A u - c|^2; every B may have its own number of columns."""

    def __init__(self, B: Any, A: Any, c: Any) -> None:
        self.B, self.A, self.c = (np.array(array, dtype=np.float64) for array in (B, A, c))

    @property
    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(np.hstack([self.B, self.A])), torch.from_numpy(self.c)

    def residual(self, v: NDArray[Any], u: NDArray[Any]) -> NDArray[Any]:
        return self.B @ v + self.A @ u - self.c

    def value(self, v: NDArray[Any], u: NDArray[Any]) -> float:
        return 0.5 * float(np.sum(self.residual(v, u) ** 2))

    def gradient_u(self, v: NDArray[Any], u: NDArray[Any]) -> NDArray[Any]:
        return self.A.T @ self.residual(v, u)

    def gradient_v(self, v: NDArray[Any], u: NDArray[Any]) -> NDArray[Any]:
        return self.B.T @ self.residual(v, u)


class ExactClient(FedAPMClient):
    """Solves the v-step, and without a tolerance the u-step too, by linear algebra."""

    problem: Quadratic

    def local_steps(self, turn: Turn) -> Any:
        p, alpha, sigma, rho = self.problem, turn.message.share, turn.message.sigma, turn.rule.rho
        v, u = self.block(["v"])["v"].numpy(), turn.row.u
        new_v = np.linalg.solve(
            alpha * p.B.T @ p.B + sigma * np.eye(v.size),
            sigma * v + alpha * p.B.T @ (p.c - p.A @ u),
        )
        self.load_block({"v": torch.from_numpy(new_v)})
        if turn.message.tolerance is not None:
            # The descent starts from the new v, and takes no v-step of its own.
            new = replace(turn, message=replace(turn.message, personal_epochs=0))
            return (yield from super().local_steps(new))
        point, _ = turn.rule.pull(turn.row, turn.w)
        new_u = np.linalg.solve(
            alpha * p.A.T @ p.A + rho * np.eye(u.size),
            rho * point + alpha * p.A.T @ (p.c - p.B @ new_v),
        )
        self.load_block({"u": torch.from_numpy(new_u)})
        return {"loss": p.value(new_v, new_u)}, self.arrays(), self.kept(turn.message)


@dataclass
class State:
    """P^t = (V, U, Pi, u) and xi after a round, u being the new mean."""

    problems: Sequence[Quadratic]
    rho: float
    V: list[NDArray[Any]]
    U: NDArray[Any]
    Pi: NDArray[Any]
    u: NDArray[Any]
    xi: NDArray[Any]

    def lagrangian(self) -> float:
        """Return L of (4)."""
        gap = self.U - self.u
        fits = [p.value(*own) for p, *own in zip(self.problems, self.V, self.U, strict=True)]
        return float(np.mean(fits) + np.sum(self.Pi * gap) + self.rho / 2 * np.sum(gap**2))


class QuadraticsRun:
    """The quadratics' clients on a grid, and what Algorithm 1 calls V, U, Pi and u."""

    def __init__(self, problems: Sequence[Quadratic], *, exact: bool = True) -> None:
        self.problems = problems
        client_class = ExactClient if exact else FedAPMClient

        def client_fn(context: Context) -> Any:
            problem = problems[int(context.node_config["partition-id"])]
            model = Linear(problem.B.shape[1], problem.A.shape[1])
            client = client_class(context, model, [problem.batch], half_square_sum, full_batch=True)
            client.problem = problem  # type: ignore[union-attr]
            return client.to_client()

        self.grid = Federation(client_app(client_fn), len(problems))

    def run(self, strategy: FedAPM, rounds: int) -> list[State]:
        """Return P^0, P^1, ..., from all zeros."""
        p = self.problems[0]
        arrays = {"v": np.zeros(p.B.shape[1]), "u": np.zeros(p.A.shape[1])}
        initial = ArrayRecord({name: Array(array) for name, array in arrays.items()})
        states: list[State] = []

        def note(server_round: int, *_: Any) -> None:
            states.append(self._state(strategy))

        strategy.fraction_evaluate = 0.0
        strategy.start(self.grid, initial, rounds, evaluate_fn=note)
        return states

    def _state(self, strategy: FedAPM) -> State:
        held = [self.memory(client) for client in strategy.client_ids]
        table, m = strategy.state.clients, len(held)

        def kept(name: str, first: Sequence[NDArray[Any]] | NDArray[Any]) -> list[NDArray[Any]]:
            return [h.get(name, start) for h, start in zip(held, first, strict=True)]

        if strategy.duals == "client":
            zeros = np.zeros((m, strategy.state.w.size))
            U, y = np.array(kept("row/u", zeros)), np.array(kept("row/dual", zeros))
        else:
            U, y = (table.column(name).copy() for name in ("u", "dual"))
        # The settings and duals stand beside f_i, those of the paper beside f_i/m.
        xi = (strategy.tolerance or 0.0) * strategy.tolerance_decay ** table.column("turns") / m**2
        V = kept("v/v", [np.zeros(p.B.shape[1]) for p in self.problems])
        rho = strategy.penalty / m
        return State(self.problems, rho, V, U, rho * y, strategy.state.w.copy(), xi)

    def memory(self, client: int) -> dict[str, NDArray[Any]]:
        """Return what a client kept last."""
        records = self.grid.context(node_of(client)).state.array_records
        if not records:
            return {}
        last = max(records, key=lambda key: int(key.removeprefix("memory.")))
        return {name: array.numpy() for name, array in records[last].items()}


def random_problems(seed: int, m: int = 3, d_u: int = 3) -> list[Quadratic]:
    """Return problems whose v_i are of size 1, 2, 3, 1, ...: personal shapes may differ."""
    rng = np.random.default_rng(seed)
    return [
        Quadratic(rng.normal(size=(5, 1 + i % 3)), rng.normal(size=(5, d_u)), rng.normal(size=5))
        for i in range(m)
    ]


# --- Golden traces (E1, E2) ---------------------------------------------------------------------

# a = (1, 2), b = (1, -1), c = (1, 3); rho = sigma = 1, alpha = 1/2, all zeros at the start.
GOLDEN = [Quadratic([[1]], [[1]], [1]), Quadratic([[-1]], [[2]], [3])]
EXACT = {
    1: ((1 / 3, -1), (2 / 9, 2 / 3), (2 / 9, 2 / 3), 8 / 9, 1 / 9),
    2: (
        (0.4814814815, -1.2222222222),
        (0.6172839506, 0.6666666667),
        (-0.0493827160, 0.4444444444),
        0.8395061728,
        0.0256058528,
    ),
    3: (
        (0.4485596708, -1.3703703704),
        (0.7764060357, 0.6748971193),
        (-0.1124828532, 0.2798353909),
        0.8093278464,
        0.0078917509,
    ),
}
GRADIENT = {
    1: ((0.219, -0.657), (0.171039, 0.731016), (0.171039, 0.731016), 0.902055, 0.3187941343),
    2: (
        (0.3525814590, -0.8499319920),
        (0.5206360455, 0.7709704105),
        (-0.2103799545, 0.5999314105),
        0.8405789560,
        0.1756267491,
    ),
    3: (
        (0.3803468255, -0.9831118460),
        (0.7746022116, 0.7536932445),
        (-0.2763566989, 0.5130456990),
        0.8824922281,
        0.0487513688,
    ),
}


@pytest.mark.parametrize("duals", ["strategy", "client"])
@pytest.mark.parametrize(("exact", "trace"), [(True, EXACT), (False, GRADIENT)])
def test_the_golden_traces(exact: bool, trace: dict[int, Any], duals: Any) -> None:
    strategy = FedAPM("^v$", published=True, rho=2.0, sigma=2.0, lr=0.1, duals=duals)
    states = QuadraticsRun(GOLDEN, exact=exact).run(strategy, 3)
    assert states[0].lagrangian() == pytest.approx(2.5, abs=1e-14)
    for state, (V, U, Pi, u, value) in zip(states[1:], trace.values(), strict=True):
        assert_allclose(np.ravel(state.V), V, atol=1e-9)
        assert_allclose(state.U.ravel(), U, atol=1e-9)
        assert_allclose(state.Pi.ravel(), Pi, atol=1e-9)
        assert_allclose(state.u, u, atol=1e-9)
        assert state.lagrangian() == pytest.approx(value, abs=1e-9)


# --- Theory (T1 to T8) --------------------------------------------------------------------------


@pytest.mark.parametrize("published", [True, False])
def test_accuracy_tested_steps_meet_their_tolerance(published: bool) -> None:
    # T4: the squared norm of alpha grad_u f_i + pi_i, which is that of the gradient of the u-step.
    # By default v moves with u, and the norm is that of both gradients.
    problems = random_problems(2)
    level = {"tolerance": 60.0, "tolerance_decay": 0.1}
    settings: dict[str, Any] = {"rho": 30.0, "sigma": 20.0, "lr": 0.03, "fraction_train": 0.4}
    strategy = FedAPM("^v$", published=published, **settings, **level)
    for old, new in pairwise(QuadraticsRun(problems, exact=published).run(strategy, 8)):
        took_part = old.xi != new.xi
        assert took_part.sum() == 1
        assert_allclose(new.xi[took_part], 0.1 * old.xi[took_part], rtol=1e-15)  # (10)
        for i in np.flatnonzero(took_part):
            error = problems[i].gradient_u(new.V[i], new.U[i]) / 3 + new.Pi[i]
            of_v = problems[i].gradient_v(new.V[i], new.U[i]) / 3
            of_v += settings["sigma"] / 3 * (new.V[i] - old.V[i])
            both = np.sum(error**2) + (0 if published else np.sum(of_v**2))
            assert both <= new.xi[i] * (1 + 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("published", [True, False])
def test_the_limit_is_the_minimiser_of_the_shared_problem(published: bool) -> None:
    # (2) is one least-squares problem in (v_1, v_2, v_3, u), of full rank: 15 rows, 9 columns.
    problems = random_problems(4)
    sizes = [p.B.shape[1] for p in problems]
    assert sizes == [1, 2, 3]
    rows = [
        np.hstack([p.B if i == j else np.zeros((5, size)) for j, size in enumerate(sizes)] + [p.A])
        for i, p in enumerate(problems)
    ]
    solution, _, rank, _ = np.linalg.lstsq(
        np.vstack(rows), np.concatenate([p.c for p in problems]), rcond=None
    )
    assert rank == 9
    federation = QuadraticsRun(problems, exact=published)
    settings: dict[str, Any] = {"rho": 1.5, "sigma": 0.03, "fraction_train": 0.7, "seed": 1}
    strategy = FedAPM("^v$", published=published, lr=0.1 / 3, **settings)
    last = federation.run(strategy, 250)[-1]
    expected = np.split(solution, np.cumsum(sizes))
    for v, best in zip(last.V, expected, strict=False):
        assert_allclose(v, best, atol=1e-8)
    assert_allclose(last.u, expected[-1], atol=1e-8)


# --- What travels, and what does not ------------------------------------------------------------


@pytest.mark.parametrize("duals", ["strategy", "client"])
def test_messages_hold_the_shared_block_and_nothing_else(duals: Any) -> None:
    federation = QuadraticsRun(random_problems(3), exact=False)
    strategy = FedAPM("^v$", published=True, rho=3 * 0.7, lr=0.05 / 3, duals=duals)
    federation.run(strategy, 3)
    for _, server_round, messages in federation.grid.sent + federation.grid.received:
        if server_round == 0:  # who trains what
            continue
        for message in messages:
            for record in message.content.array_records.values():
                assert all((name, array.shape) == ("u", (3,)) for name, array in record.items())


# --- Reductions ---------------------------------------------------------------------------------


def test_nothing_personal_is_fedadmm_to_the_bit() -> None:
    settings: dict[str, Any] = {"rho": 0.1, "lr": 0.5, "weights": "size"}
    settings |= {"fraction_train": 0.5, "seed": 4}
    fedapm, fedadmm = FedAPM(None, sigma=0.3, **settings), FedADMM(**settings)
    for strategy, kind in ((fedapm, FedAPMClient), (fedadmm, FedADMMClient)):
        strategy.start(Federation(client_app(client_fn_of(kind)), 6), initial_arrays(), 3)
    shared = fedadmm.state_dict()  # FedAPM keeps u_i as well
    assert_same_bits({name: fedapm.state_dict()[name] for name in shared}, shared)
    assert fedapm.traffic == fedadmm.traffic


def test_by_default_all_epochs_move_both_parts_at_once() -> None:
    # f = (u + v - 1)^2 / 2 of one client among two alike, so alpha = 1/2; rho = sigma = 1, lr = .2,
    # 1 + 1 steps. Round 1 from zeros: v = u = .2 * .5 = .1, then the gradient of both is
    # .5 (.2 - 1) + (.1 - 0) = -.3, so v = u = .16, pi = .16, w = .16 + .16 = .32.
    # Round 2 from v_i and w, with the pull towards w - pi = .16: .5 (.48 - 1) = -.26, v = .212,
    # u = .32 - .2 (-.26 + .16) = .34; then .5 (.552 - 1) = -.224, v = .212 - .2 (-.224 + .052) =
    # .2464, u = .34 - .2 (-.224 + .18) = .3488.
    problems = [Quadratic([[1]], [[1]], [1])] * 2
    steps: dict[str, Any] = {"lr": 0.1, "local_epochs": 1, "personal_epochs": 1}
    for duals in ("strategy", "client"):
        strategy = FedAPM("^v$", rho=2.0, sigma=2.0, duals=duals, **steps)
        last = QuadraticsRun(problems, exact=False).run(strategy, 2)[-1]
        assert_allclose(np.ravel(last.V), [0.2464] * 2, rtol=1e-13)
        assert_allclose(last.U.ravel(), [0.3488] * 2, rtol=1e-13)
