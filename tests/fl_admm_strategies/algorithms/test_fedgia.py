"""FedGiA against Algorithm 1 as it is printed, its identities, and what surrounds it.

See docs/methods/fedgia.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.client import NumPyClient
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clients import FedGiAClient, FedGiALinearClient, LeastSquares, Logistic, client_app
from clients.toolkit.solving.curvature import DataLoss
from fl_admm_strategies import FedGiA
from tests.support.federation import Federation, node_of
from tests.support.refusals import Warned, refused

M, N, START = 6, 4, 0.5
Vectors = NDArray[np.float64]


def regression(num_clients: int = M, size: int = N) -> list[DataLoss]:
    """Least squares of unequal sizes and curvatures; client 1 has fewer samples than features."""
    losses: list[DataLoss] = []
    for client in range(num_clients):
        rng = np.random.default_rng(client)
        rows = 3 if client == 1 else 8 + client
        a = rng.normal(size=(rows, size)) * (1 + client / 3)
        losses.append(LeastSquares(a, rng.normal(size=rows)))
    return losses


def classification() -> list[DataLoss]:
    losses: list[DataLoss] = []
    for client in range(M):
        rng = np.random.default_rng(client)
        rows = 10 + client
        a = rng.normal(size=(rows, N))
        losses.append(Logistic(a, rng.integers(0, 2, rows), mu=0.1))
    return losses


def initial(losses: list[DataLoss], start: float = 0.0) -> ArrayRecord:
    return ArrayRecord({"x": Array(np.full(losses[0].size, start))})


def grid_of(losses: list[DataLoss], **settings: Any) -> Federation:
    def client_fn(context: Context) -> NumPyClient:
        return FedGiALinearClient(context, losses[int(context.node_config["partition-id"])])

    return Federation(client_app(client_fn), len(losses), **settings)


def run(
    losses: list[DataLoss],
    num_rounds: int = 5,
    strategy: FedGiA | None = None,
    on_round: Callable[[FedGiA], None] | None = None,
    grid: Federation | None = None,
    start: float = 0.0,
    **settings: Any,
) -> FedGiA:
    strategy = strategy or FedGiA(**{"fraction_evaluate": 0, "seed": 1} | settings)
    strategy.start(
        grid or grid_of(losses),
        initial(losses, start),
        num_rounds,
        on_round=on_round and (lambda server_round, metrics: on_round(strategy)),
    )
    return strategy


def hessian(loss: DataLoss, kind: str) -> Vectors:
    """Table II's H_i as an (n, n) array."""
    gram = loss.bend * loss.matrix.T @ loss.matrix / loss.num_examples + loss.reg * np.eye(N)
    return gram if kind == "gram" else float(np.linalg.norm(gram, 2)) * np.eye(N)


def gradient(losses: list[DataLoss], x: Vectors) -> Vectors:
    """grad f(x), f = (1/m) sum_i f_i."""
    return np.mean([loss.value_and_gradient(x)[1] for loss in losses], axis=0)


class Printed:
    """Algorithm 1, line by line; the groups are the only thing taken from the strategy."""

    def __init__(self, losses: list[DataLoss], kind: str, t: float, k0: int) -> None:
        self.losses, self.k0 = losses, k0
        m = len(losses)
        self.h = [hessian(loss, kind) / m for loss in losses]
        curvatures = [float(np.linalg.norm(hessian(loss, "gram"), 2)) for loss in losses]
        self.sigma = t * max(curvatures) / m
        self.iterates, self.duals, self.messages = np.zeros((3, m, N))
        self.messages += START

    def round(self, group: set[int]) -> None:
        m, sigma = len(self.losses), self.sigma
        x = self.messages.mean(axis=0)  # (12)
        gradients = [loss.value_and_gradient(x)[1] / m for loss in self.losses]
        for _ in range(self.k0):
            for i in range(m):
                if i in group:
                    step = np.linalg.inv(self.h[i] + sigma * np.eye(N))
                    self.iterates[i] = x - step @ (gradients[i] + self.duals[i])  # (13)
                    self.duals[i] += sigma * (self.iterates[i] - x)  # (14)
                else:
                    self.iterates[i], self.duals[i] = x, -gradients[i]  # (16), (17)
                self.messages[i] = self.iterates[i] + self.duals[i] / sigma  # (15), (18)


# --- The trajectory -----------------------------------------------------------------------------

KINDS = pytest.mark.parametrize("kind", ["diagonal", "gram"])


@KINDS
@pytest.mark.parametrize("losses", [regression(), classification()], ids=["squares", "logistic"])
def test_the_trajectory_is_that_of_the_printed_algorithm(losses: list[DataLoss], kind: str) -> None:
    """Without client 4 in rounds 2 and 3: it counts with its last message."""
    printed = Printed(losses, kind, t=0.3, k0=3)
    rounds: list[int] = []

    def lose(replies: list[Message]) -> list[Message]:
        return [r for r in replies if r.metadata.src_node_id != node_of(4)]

    def compare(strategy: FedGiA) -> None:
        rounds.append(1)
        group = strategy.admm_group(len(rounds))
        assert len(group) == 3
        before = [a[4].copy() for a in (printed.iterates, printed.duals, printed.messages)]
        printed.round(group)
        missing = len(rounds) in (2, 3)
        if missing:
            printed.iterates[4], printed.duals[4], printed.messages[4] = before
        assert strategy.sigma == pytest.approx(printed.sigma, rel=1e-12)
        own = strategy.state.clients
        np.testing.assert_allclose(own.column("z"), printed.messages, atol=1e-12)
        if kind == "diagonal":
            np.testing.assert_allclose(own.column("pi"), printed.duals, atol=1e-12)
        x = strategy.global_arrays["x"].numpy()
        np.testing.assert_allclose(x, printed.messages.mean(axis=0), atol=1e-12)
        assert ("objective" in strategy.metrics("train", {}, {})) == (not missing)

    grid = grid_of(losses, spoil=dict.fromkeys((2, 3), lose))
    settings: dict[str, Any] = {"hessian": kind, "t": 0.3, "local_steps": 3, "start": START}
    run(losses, 8, on_round=compare, grid=grid, **settings)
    assert len(rounds) == 8


def test_the_worked_example() -> None:
    # E1: H_i = a_i = (1, 2, 4), b = (1, -1, 3), t = .75, so sigma = .75 * 4/3 = 1; k0 = 2. Client 1
    # in round 1: g = -1/3, M = (1/3)/(1/3 + 1) = 1/4, pi = 1/3 - (1/16)/3 = .3125,
    # x_1 = (3/4)(1/4)/3 = .0625, z_1 = .375. Client 3, a gradient step: g = -4, z = 4.
    losses: list[DataLoss] = [
        LeastSquares([[a**0.5]], [a**0.5 * b])
        for a, b in zip((1.0, 2.0, 4.0), (1.0, -1.0, 3.0), strict=True)
    ]
    strategy = FedGiA(t=0.75, local_steps=2, fraction_evaluate=0)
    groups = {1: {0, 1}, 2: {1, 2}}
    strategy.admm_group = lambda r: groups[r]  # type: ignore[method-assign]
    seen: list[list[Vectors]] = []

    def look(strategy: FedGiA) -> None:
        own = strategy.state.clients
        columns = [own.column(name)[:, 0].copy() for name in ("pi", "z")]
        seen.append([*columns, strategy.state.w.copy()])

    run(losses, 2, strategy, look)
    (pi_1, z_1, x_1), (pi_2, z_2, x_2) = seen
    np.testing.assert_allclose(pi_1, [0.3125, -0.56, 4], atol=1e-10)
    np.testing.assert_allclose(z_1, [0.375, -0.72, 4], atol=1e-10)
    np.testing.assert_allclose(x_1, [1.2183333333], atol=1e-10)
    np.testing.assert_allclose(pi_2, [-0.0727777778, -1.3318666667, 2.9059863946], atol=1e-10)
    np.testing.assert_allclose(z_2, [1.1455555556, -0.3340666667, 3.7264965986], atol=1e-10)
    np.testing.assert_allclose(x_2, [1.5126618291], atol=1e-10)


# --- Groups, the handshake, and what is reported --------------------------------------------------


@pytest.mark.parametrize(("fraction", "size"), [(0.51, 4), (0.01, 1)])
def test_the_admm_group_has_ceil_s_m_clients(fraction: float, size: int) -> None:
    strategy = run(regression(), 1, fraction_admm=fraction)
    groups = [strategy.admm_group(r) for r in range(1, 601)]
    assert {len(group) for group in groups} == {size}
    # Every client is in with probability size/m; three standard deviations of 600 draws
    share = size / M
    found = np.mean([[i in group for i in range(M)] for group in groups], axis=0)
    assert np.abs(found - share).max() <= 3 * math.sqrt(share * (1 - share) / 600)


def saying(curvature: float, losses: list[DataLoss], liars: Collection[int] = range(M)) -> Any:
    """Return a grid of clients of which some report this r_i."""

    class Client(FedGiALinearClient):
        def measure_curvature(self, asked: Any, config: Any) -> float:
            lies = self.context.node_config["partition-id"] in liars
            return curvature if lies else super().measure_curvature(asked, config)

    app = client_app(lambda c: Client(c, losses[int(c.node_config["partition-id"])]))
    return Federation(app, len(losses))


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_a_curvature_that_is_no_positive_number_ends_the_run(value: float) -> None:
    with refused(RuntimeError, "curvature", "client 5", value):
        run(regression(), 1, grid=saying(value, regression()))


@pytest.mark.parametrize(("curvature", "members"), [(101.0, [0, 1, 3]), (99.0, [0, 1, 2, 3])])
def test_a_run_begins_without_a_curvature_far_above_the_others(
    curvature: float, members: list[int], warned: Warned
) -> None:
    losses = one_number(1.0, 1.0, 1.0, 1.0)
    strategy = run(losses, 1, grid=saying(curvature, losses, [2]))
    assert strategy.client_ids == members
    assert bool(warned("client 2 refused", "101")) == (len(members) == 3)


@KINDS
def test_it_stops_at_the_first_stationary_point_and_reports_the_true_gradient(kind: str) -> None:
    losses = regression()
    strategy = FedGiA(hessian=kind, fraction_evaluate=0, seed=1)  # type: ignore[arg-type]
    squares = []

    def record(server_round: int, metrics: Any) -> None:
        x = strategy.state.seen.point
        squares.append(float(np.sum(gradient(losses, x) ** 2)))
        mean = np.mean([loss.value_and_gradient(x)[0] for loss in losses])  # uniform weights (5)
        found = strategy.metrics("train", {}, {})
        assert found["objective"] == pytest.approx(mean, rel=1e-10)
        assert found["squared-gradient"] == pytest.approx(squares[-1], rel=1e-10)

    rule = strategy.gradient_tolerance(1e-6)
    strategy.start(grid_of(losses), initial(losses), 200, stop=rule, on_round=record)
    assert squares[-1] <= N * 1e-6 < min(squares[:-1])
    # x^1 = 0 is the first aggregation and took no local work (P5)
    assert strategy.communication_rounds == len(squares) - 1


# --- The default t follows the curvature ----------------------------------------------------------


def one_number(*curvatures: float) -> list[DataLoss]:
    """f_i(x) = a_i/2 (x - 1)^2: f has the curvature mean a_i."""
    return [LeastSquares(np.array([[a**0.5]]), np.array([a**0.5])) for a in curvatures]


def pulls(losses: list[DataLoss], num_rounds: int, **settings: Any) -> list[float]:
    """Return m sigma of every round, with clients that say r_i = 0.5."""
    found: list[float] = []
    grid, m = saying(0.5, losses), len(losses)
    run(losses, num_rounds, on_round=lambda s: found.append(m * s.sigma), grid=grid, **settings)
    return found


@KINDS
def test_sigma_follows_a_curvature_that_is_larger_than_where_it_was_measured(kind: str) -> None:
    # The clients say r_i = 0.5, but f has 3. Two gradients are needed to see it, so sigma m is
    # 2 * 0.5 in rounds 1 and 2; round 3 expects the growth by 6 once more, round 4 none.
    found = pulls(one_number(1.0, 2.0, 6.0), 4, local_steps=1, hessian=kind)
    np.testing.assert_allclose(found, [2 * 0.5, 2 * 3 * 6, 2 * 3, 2 * 3], rtol=1e-9)
    # From one round to the next it grows tenfold at most.
    found = pulls(one_number(100.0, 100.0), 2, hessian=kind)
    np.testing.assert_allclose(found, [1.0, 2 * 100 * 10], rtol=1e-9)
    np.testing.assert_allclose(pulls(one_number(1.0, 9.0), 3, t=0.3), [0.15] * 3)  # a t stays


# --- PyTorch models -----------------------------------------------------------------------------


class Linear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, 0]


def test_a_pytorch_model_gives_what_the_closed_form_gives() -> None:
    losses = [Logistic(loss.matrix, loss.targets, mu=0.0) for loss in classification()]

    def client_fn(context: Context) -> NumPyClient:
        loss = losses[int(context.node_config["partition-id"])]
        data = TensorDataset(torch.tensor(loss.matrix), torch.tensor(loss.targets))
        model = Linear(N, 1, bias=False, dtype=torch.float64)
        return FedGiAClient(context, model, DataLoader(data, 4), nn.BCEWithLogitsLoss())

    closed = run(losses, 4)
    x = ArrayRecord({"weight": Array(np.zeros((1, N)))})
    grid = Federation(client_app(client_fn), M)
    measured = FedGiA(fraction_evaluate=0, seed=1)  # at x = 0, where l'' has its maximum
    measured.start(grid, x, 4)
    columns = [strategy.state.clients.column("curvature") for strategy in (measured, closed)]
    ratio = columns[0] / columns[1]
    assert (ratio >= 1 - 1e-12).all()
    assert (ratio <= 1.001).all()
    columns = [strategy.state.clients.column("z") for strategy in (measured, closed)]
    np.testing.assert_allclose(*columns, rtol=1e-2)
    one, other = (strategy.metrics("train", {}, {})["objective"] for strategy in (measured, closed))
    assert one == pytest.approx(other, rel=1e-3)
