"""FedAPM against its golden traces, its theory and its promises about what travels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, MessageType
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from torch import Tensor, nn

from clients import FedAPMClient, accuracy, client_app
from clients.torch_client import Scalars
from fl_admm_strategies import FedAPM
from tests.support import WatchedGrid, node_of

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

    def minimise(self, anchor: dict[str, Tensor], config: Scalars) -> Any:
        p, alpha = self.problem, float(config["loss-weight"])
        sigma, rho = float(config["sigma"]), float(config["rho"])
        v, u = (self.block([name])[name].numpy() for name in ("v", "u"))
        new_v = np.linalg.solve(
            alpha * p.B.T @ p.B + sigma * np.eye(v.size),
            sigma * v + alpha * p.B.T @ (p.c - p.A @ u),
        )
        self.load_block({"v": torch.from_numpy(new_v)})
        if "tolerance" in config:
            # The descent starts from the new v; with sigma so large its own v-step stays there.
            return super().minimise(anchor, config | {"sigma": 1.0, "personal-epochs": 0})
        new_u = np.linalg.solve(
            alpha * p.A.T @ p.A + rho * np.eye(u.size),
            rho * anchor["u"].numpy() + alpha * p.A.T @ (p.c - p.B @ new_v),
        )
        self.load_block({"u": torch.from_numpy(new_u)})
        return {"loss": p.value(new_v, new_u)}, {"v/v": new_v}


class Federation:
    """The quadratics' clients on a grid, and what Algorithm 1 calls V, U, Pi and u."""

    def __init__(self, problems: Sequence[Quadratic], *, exact: bool = True) -> None:
        self.problems = problems
        client_class = ExactClient if exact else FedAPMClient

        def client_fn(context: Context) -> Any:
            problem = problems[int(context.node_config["partition-id"])]
            model = Linear(problem.B.shape[1], problem.A.shape[1])
            client = client_class(
                context,
                model,
                [problem.batch],
                half_square_sum,
                test_loader=[problem.batch],
                full_batch=True,
            )
            client.problem = problem  # type: ignore[union-attr]
            return client.to_client()

        self.grid = WatchedGrid(client_app(client_fn), len(problems))

    def run(
        self, strategy: FedAPM, rounds: int, at: Callable[[int, State], None] | None = None
    ) -> FedAPM:
        first = self.problems[0]
        arrays = {"v": np.zeros(first.B.shape[1]), "u": np.zeros(first.A.shape[1])}

        def on_round(server_round: int, metrics: Any) -> None:
            if at is not None:
                at(server_round, self.state(strategy))

        strategy.start(
            self.grid,
            ArrayRecord({name: Array(array) for name, array in arrays.items()}),
            rounds,
            on_round=on_round,
        )
        return strategy

    def state(self, strategy: FedAPM) -> State:
        return State(self.problems, strategy, [self.memory(i) for i in strategy.client_ids])

    def memory(self, client: int) -> dict[str, NDArray[Any]]:
        state = self.grid.context(node_of(client)).state
        rounds = [int(key.removeprefix("memory.")) for key in state.array_records]
        if not rounds:
            return {}
        record = state.array_records[f"memory.{max(rounds)}"]
        return {name: array.numpy() for name, array in record.items()}


class State:
    """P^t = (V, U, Pi, u) after a round, u being the new mean (specs 3.3)."""

    def __init__(
        self, problems: Sequence[Quadratic], strategy: FedAPM, memories: list[dict[str, Any]]
    ) -> None:
        self.problems, self.rho = problems, strategy.rho
        self.u = strategy.consensus.w.copy()
        size_u = self.u.size
        self.V = [
            held.get("v/v", np.zeros(p.B.shape[1]))
            for p, held in zip(problems, memories, strict=True)
        ]
        if strategy.duals == "strategy":
            self.U, self.Pi = strategy.consensus.iterates.copy(), strategy.consensus.duals.copy()
        else:
            self.U, self.Pi = (
                np.array([held.get(f"{kind}/u", np.zeros(size_u)) for held in memories])
                for kind in ("u", "dual")
            )
        self.xi = [held.get("xi") for held in memories]

    def lagrangian(self, **other: Any) -> float:
        """Return L of (4), with some of the variables replaced."""
        V, U, Pi, u = (other.get(name, getattr(self, name)) for name in ("V", "U", "Pi", "u"))
        m = len(self.problems)
        return sum(
            p.value(v, u_i) / m + pi @ (u_i - u) + self.rho / 2 * np.sum((u_i - u) ** 2)
            for p, v, u_i, pi in zip(self.problems, V, U, Pi, strict=True)
        )


def random_problems(seed: int, m: int = 6, d_v: int = 2, d_u: int = 3) -> list[Quadratic]:
    rng = np.random.default_rng(seed)
    return [
        Quadratic(rng.normal(size=(5, d_v)), rng.normal(size=(5, d_u)), rng.normal(size=5))
        for _ in range(m)
    ]


def bounds(problems: Sequence[Quadratic]) -> tuple[float, float]:
    """Return alpha max{L_u, L_uv} and alpha L_v of the quadratics, alpha = 1/m."""
    m = len(problems)
    L_u = max(np.linalg.norm(p.A.T @ p.A, 2) for p in problems)
    L_uv = max(np.linalg.norm(p.A.T @ p.B, 2) for p in problems)
    L_v = max(np.linalg.norm(p.B.T @ p.B, 2) for p in problems)
    return max(L_u, L_uv) / m, L_v / m


# --- Golden traces (specs 3.5) ------------------------------------------------------------------

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
    def check(server_round: int, state: State) -> None:
        V, U, Pi, u, value = trace[server_round]
        assert_allclose(np.ravel(state.V), V, atol=1e-9)
        assert_allclose(state.U.ravel(), U, atol=1e-9)
        assert_allclose(state.Pi.ravel(), Pi, atol=1e-9)
        assert_allclose(state.u, u, atol=1e-9)
        assert state.lagrangian() == pytest.approx(value, abs=1e-9)

    strategy = FedAPM("^v$", rho=1.0, sigma=1.0, lr=0.2, duals=duals)
    Federation(GOLDEN, exact=exact).run(strategy, 3, check)
