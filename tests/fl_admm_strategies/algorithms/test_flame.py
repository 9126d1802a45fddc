"""FLAME, strategy and client together, against golden vectors, identities and closed forms.

The clients' losses are quadratics f_i(theta) = b_i/2 ||theta - c_i||^2 in float64, run through the
real messages and the real solvers. Numbers and equations: arXiv:2407.16397 and
docs/methods/flame-notes.md, whose items the comments name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from clients import FLAMEClient, client_app
from clients.toolkit.solving.objective import LocalObjective
from fl_admm_strategies import FLAME
from tests.fl_admm_strategies.algorithms.quadratics import Point, point_client
from tests.support.federation import Federation
from tests.support.pace import fast

Matrix = NDArray[np.float64]

# E1: m = 3, d = 2, alpha_i = 1/3, lambda = 1, zero start.
C = np.array([[1.0, 2.0], [-1.0, 0.5], [3.0, -2.0]])
B = np.array([1.0, 2.0, 0.5])


@dataclass
class Quadratics:
    """A federation of quadratic losses, and what FLAME's equations say about its variables."""

    b: Matrix = field(default_factory=B.copy)
    c: Matrix = field(default_factory=C.copy)
    sizes: Sequence[int] = ()

    def grid(self, *, exact: bool = True, noise: float = 0.0, **kwargs: Any) -> Federation:
        federation = self

        class ExactClient(FLAMEClient):
            """Its loop returns argmin f_i + c/2 ||theta - a||^2 = (b c_i + c a) / (b + c)."""

            def minimise(self, objective: LocalObjective, *, lr: float, epochs: int) -> Any:
                i = int(self.context.node_config["partition-id"])
                b, c = float(federation.b[i]), torch.tensor(federation.c[i])
                (term,) = objective.terms
                objective.penalty(self.model)
                theta = (b * c + term.weight * term.constants["theta"]) / (b + term.weight)
                self.load_block({"theta": theta + noise * torch.randn_like(theta)})
                return {"loss": 0.0}

        kind, own = ExactClient if exact else FLAMEClient, (self.b, self.c, self.sizes)
        app = client_app(lambda context: point_client(kind, context, *own).to_client())
        return Federation(app, len(self.b), **kwargs)

    def run(self, strategy: FLAME, num_rounds: int, **grid: Any) -> list[Variables]:
        """Return the variables after rounds 0, 1, ..., num_rounds."""
        seen: list[Variables] = []
        start = ArrayRecord(Point(self.c.shape[1]).state_dict())
        with self.grid(**grid) as watched:
            strategy.start(
                watched,
                start,
                num_rounds,
                on_round=lambda server_round, metrics: seen.append(Variables.of(self, strategy)),
            )
        zero = np.zeros_like(self.c)
        first = Variables(
            self, alpha(strategy), strategy.lam, strategy.penalty, zero, zero, zero[0]
        )
        return [first, *seen]


def alpha(strategy: FLAME) -> Matrix:
    """Return alpha_i of all clients."""
    column: Matrix = strategy.state.clients.column("alpha")
    return column


@dataclass
class Variables:
    """Theta^t, W^t and w^t, and the functions of the paper at them."""

    federation: Quadratics
    alpha: Matrix
    lam: float
    rho: float
    theta: Matrix
    w_i: Matrix
    w: Matrix
    pi: Matrix = field(init=False)

    def __post_init__(self) -> None:
        self.a = self.lam * self.alpha[:, None]
        self.pi = self.a * (self.theta - self.w_i)

    @classmethod
    def of(cls, federation: Quadratics, strategy: FLAME) -> Variables:
        w, own = strategy.state.w.copy(), strategy.state.clients
        theta, rho = own.column("theta").copy(), strategy.penalty
        a = strategy.lam * alpha(strategy)[:, None]
        w_i = theta - rho * own.column("dual") / a
        return cls(federation, alpha(strategy), strategy.lam, rho, theta, w_i, w)

    def f(self, theta: Matrix, w: Matrix) -> float:
        """sum_i alpha_i (f_i(theta_i) + lambda/2 ||theta_i - w||^2), of (6) and (9)."""
        own = self.federation
        loss = own.b / 2 * ((theta - own.c) ** 2).sum(axis=1)
        return float(self.alpha @ (loss + self.lam / 2 * ((theta - w) ** 2).sum(axis=1)))

    def lagrangian(self) -> float:
        """(10)."""
        gap = self.w_i - self.w
        added = (self.pi * gap).sum() + self.rho / 2 * (gap**2).sum()
        return self.f(self.theta, self.w_i) + float(added)


def flame(**settings: Any) -> FLAME:
    usual = {"published": True, "lam": 1.0, "rho": 0.5}
    usual |= {"fraction_evaluate": 0, "seed": 3}
    return FLAME(**usual | settings)


def close(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


# --- Golden vectors (E1 to E3; printed to 8 digits, hence 1e-8 beside exact arithmetic) -----------

ROUND = 5.1e-9  # half a unit of the last printed digit, and a little


def test_exact_steps_give_the_golden_vectors() -> None:
    _, one, two, three = Quadratics().run(flame(), 3)
    close(one.theta, [(0.5, 1), (-2 / 3, 1 / 3), (1, -2 / 3)])
    close(one.w_i, [(0.2, 0.4), (-4 / 15, 2 / 15), (0.4, -4 / 15)])
    close(one.pi, [(0.1, 0.2), (-2 / 15, 1 / 15), (0.2, -2 / 15)])
    close(one.w, (2 / 9, 8 / 45))
    assert one.lagrangian() == pytest.approx(1.2603703704, abs=1e-10)
    assert one.f(one.theta, one.w) == pytest.approx(1.2170370370, abs=1e-10)
    close(two.theta, [(0.6, 1.2), (-0.75555556, 0.37777778), (1.26666667, -0.84444444)], ROUND)
    close(two.w_i, [(0.25333333, 0.34666667), (-0.00888889, 0.17777778), (0.4, -0.07111111)], ROUND)
    close(
        two.pi,
        [(0.11555556, 0.28444444), (-0.24888889, 0.06666667), (0.28888889, -0.25777778)],
        ROUND,
    )
    close(two.w, (0.31851852, 0.21333333), ROUND)
    assert two.lagrangian() == pytest.approx(1.2465958848, abs=1e-10)
    assert two.f(two.theta, two.w) == pytest.approx(1.2284263374, abs=1e-10)
    close(
        three.theta,
        [(0.62666667, 1.17333333), (-0.66962963, 0.39259259), (1.26666667, -0.71407407)],
        ROUND,
    )
    close(
        three.w_i, [(0.30311111, 0.256), (0.22192593, 0.20503704), (0.35111111, 0.15170370)], ROUND
    )
    close(
        three.pi,
        [(0.10785185, 0.30577778), (-0.29718519, 0.06251852), (0.30518519, -0.28859259)],
        ROUND,
    )
    close(three.w, (0.36928395, 0.25738272), ROUND)
    assert three.lagrangian() == pytest.approx(1.1941946191, abs=1e-10)
    assert three.f(three.theta, three.w) == pytest.approx(1.1908334925, abs=1e-10)


def test_two_gradient_steps_a_round_give_the_golden_vectors() -> None:
    strategy = flame(lr=0.1, local_epochs=2)
    _, one, two = Quadratics().run(strategy, 2, exact=False)
    close(one.theta, [(0.18, 0.36), (-0.34, 0.17), (0.2775, -0.185)])
    close(one.w, (0.094 / 3, 0.092))  # printed as .03133333
    assert one.lagrangian() == pytest.approx(1.7021265625, abs=1e-10)
    close(two.theta, [(0.30816, 0.61632), (-0.52972, 0.26486), (0.49852875, -0.3323525)])
    close(two.w_i, [(0.098864, 0.215328), (-0.111488, 0.120344), (0.1516115, -0.033341)])
    close(
        two.pi, [(0.06976533, 0.133664), (-0.13941067, 0.048172), (0.11563908, -0.0996705)], ROUND
    )
    close(two.w, (0.07699167, 0.155554), ROUND)
    assert two.lagrangian() == pytest.approx(1.4279823653, abs=1e-10)


def test_at_rho_equal_to_a_clients_send_theta_and_the_lagrangian_may_rise() -> None:
    # P1: u_i = w_i + (a/rho)(theta_i - w_i) = theta_i, so w is the mean of the theta_i.
    _, one, two = Quadratics().run(flame(rho=1 / 3), 2)
    close(one.w, (0.27777778, 0.22222222), ROUND)
    assert one.lagrangian() == pytest.approx(1.2145061728, abs=1e-10)
    assert one.f(one.theta, one.w) == pytest.approx(1.2145061728, abs=1e-10)
    close(two.theta, [(0.625, 1.25), (-0.77777778, 0.38888889), (1.33333333, -0.88888889)], ROUND)
    close(
        two.w_i,
        [(0.32638889, 0.48611111), (-0.08333333, 0.22222222), (0.55555556, -0.16666667)],
        ROUND,
    )
    close(two.w, (0.39351852, 0.25), ROUND)
    assert two.lagrangian() == pytest.approx(1.2429805384, abs=1e-10)
    assert two.f(two.theta, two.w) == pytest.approx(1.2429805384, abs=1e-10)
    for variables in (one, two):
        close(variables.w_i + variables.pi * 3, variables.theta)
        close(variables.w, variables.theta.mean(axis=0))


# --- Identities that hold at every round, whatever the clients do (T1 to T7) ----------------------


def random_federation(seed: int, m: int = 6, d: int = 4) -> Quadratics:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, size=m).tolist()
    return Quadratics(rng.uniform(0.2, 3, m), rng.standard_normal((m, d)), sizes)


@pytest.mark.parametrize("rho", fast([0.4], [0.05, 0.4]))
def test_identities_hold_with_noise_partial_participation_and_unequal_weights(rho: float) -> None:
    federation = random_federation(1)
    strategy = flame(lam=0.7, rho=rho, weights="size", fraction_train=0.5)
    rounds = federation.run(strategy, 8, noise=0.3)
    sizes = np.array(federation.sizes)
    close(alpha(strategy), sizes / sizes.sum())
    for server_round, (old, new) in enumerate(pairwise(rounds), start=1):
        took_part = np.isin(range(6), sorted(strategy.train_metrics[server_round]))
        assert took_part.sum() == 3
        close((new.pi - old.pi)[took_part], rho * (new.w_i - old.w)[took_part])  # T1, (13)
        for name in ("theta", "w_i"):  # T1 for the others: bit for bit
            np.testing.assert_array_equal(
                getattr(new, name)[~took_part], getattr(old, name)[~took_part]
            )
        a = new.a
        right = a * new.theta + rho * old.w - old.pi
        close(((a + rho) * new.w_i)[took_part], right[took_part])  # (12)
        close((new.pi + rho * (new.w_i - new.w)).sum(axis=0), np.zeros(4))  # T3
        gap = float(((rho - a) / 2 * (new.w_i - new.w) ** 2).sum())
        close(new.lagrangian(), new.f(new.theta, new.w) + gap)  # T4, (38)
        message = new.w_i + new.pi / rho  # T5
        expected = (2 * a * new.theta + (rho - a) * (old.w - old.pi / rho)) / (a + rho)
        close(message[took_part], expected[took_part])
        close(new.w, message.mean(axis=0))  # (14), stale messages included


# --- Fixed points -------------------------------------------------------------------------------


def optimum(b: Matrix, c: Matrix, alpha: Matrix, lam: float) -> tuple[Matrix, Matrix]:
    """(136), the corrected (135) for A_i = b_i I: w*, theta_i*."""
    pull = (alpha * b / (b + lam))[:, None]
    w = (pull * c).sum(axis=0) / pull.sum()
    return w, (b[:, None] * c + lam * w) / (b[:, None] + lam)


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "fraction"), [("uniform", 1.0), ("size", 0.5)])
def test_the_limit_is_the_minimiser(weights: str, fraction: float) -> None:
    federation = random_federation(2, m=4, d=2)
    lam = 0.8
    strategy = flame(lam=lam, rho=0.15, weights=weights, fraction_train=fraction)
    last = federation.run(strategy, 80 if fraction == 1 else 200)[-1]
    w, theta = optimum(federation.b, federation.c, alpha(strategy), lam)
    close(last.w, w, 1e-10)
    close(last.theta, theta, 1e-10)
    close(last.w_i, np.tile(w, (4, 1)), 1e-10)
    close(alpha(strategy) @ last.theta, w, 1e-10)  # (15)


# --- Accuracy-tested steps (17), (18) -----------------------------------------------------------


def test_accuracy_tested_steps_meet_their_tolerance() -> None:
    federation = random_federation(3)
    settings = {"tolerance": 1e-2, "tolerance_decay": 0.5}
    settings |= {"weights": "size", "fraction_train": 0.5}
    strategy = flame(lam=0.7, rho=0.4, lr=1 / 3.7, **settings)  # 1/(L + lambda), since b_i <= 3
    rounds = federation.run(strategy, 12, exact=False)
    epsilon = np.full(6, 1e-2)
    for server_round, (old, new) in enumerate(pairwise(rounds), start=1):
        for i, metrics in strategy.train_metrics[server_round].items():
            epsilon[i] *= 0.5  # (18); the others keep theirs
            gradient = federation.b[i] * (new.theta[i] - federation.c[i])
            gradient += 0.7 * (new.theta[i] - old.w_i[i])
            residual = float(((alpha(strategy)[i] * gradient) ** 2).sum())
            assert residual <= epsilon[i]  # T7, (17)
            # A step shrinks the gradient of a quadratic by 1 - lr (b_i + lambda): the step before
            # the last was not enough.
            shrunk = 1 - (federation.b[i] + 0.7) / 3.7
            assert metrics["steps"] == 0 or residual / shrunk**2 > epsilon[i]
            assert metrics["residual"] == pytest.approx(residual, rel=1e-9, abs=1e-25)
            assert metrics["tolerance"] == pytest.approx(epsilon[i])


# --- The default: theta_i and w_i jointly, in FedDyn's form (P18) ---------------------------------


def joint(**settings: Any) -> FLAME:
    return flame(**{"published": False} | settings)


def test_a_joint_step_minimises_the_lagrangian_over_theta_and_w_i() -> None:
    # The gradient of (10) in theta_i and in w_i, with w and pi_i as they were, is 0 at both.
    federation = random_federation(5)
    strategy = joint(lam=0.7, rho=0.05, weights="size", fraction_train=0.5)
    for server_round, (old, new) in enumerate(pairwise(federation.run(strategy, 8)), start=1):
        took_part = np.isin(range(6), sorted(strategy.train_metrics[server_round]))
        slope = alpha(strategy)[:, None] * federation.b[:, None] * (new.theta - federation.c)
        in_theta = slope + new.a * (new.theta - new.w_i)
        in_w_i = new.a * (new.w_i - new.theta) + old.pi + 0.05 * (new.w_i - old.w)
        close(in_theta[took_part], 0)
        close(in_w_i[took_part], 0)
        close((new.pi - old.pi)[took_part], 0.05 * (new.w_i - old.w)[took_part])  # (13)
        close(new.w, new.w_i[took_part].mean(axis=0) + new.pi.mean(axis=0) / 0.05)


def test_the_default_starts_where_theta_would_be_had_it_moved_with_w() -> None:
    # One step of 0.1, by hand: start s = theta_i + (w - w before) and
    # theta = s - 0.1 [b (s - c) + q (s - (w - pi/rho))] with
    # q = lambda rho/(a + rho) = 1 (1/3)/(2/3) = 1/2 and pi/rho = theta_i - w_i, as rho = a_i = 1/3.
    strategy = joint(rho=1 / 3, lr=0.1, local_epochs=1)
    _, one, two = Quadratics().run(strategy, 2, exact=False)
    close(one.theta, 0.1 * B[:, None] * C)
    start = one.theta + one.w
    step = B[:, None] * (start - C) + (start - one.w + one.theta - one.w_i) / 2
    close(two.theta, start - 0.1 * step)


def test_a_client_without_a_turn_has_the_global_model_as_its_own() -> None:
    strategy = FLAME(fraction_train=0.4, seed=3)  # one client of three a round
    strategy.start(Quadratics().grid(exact=False), ArrayRecord({"theta": Array(np.zeros(2))}), 1)
    (trained,) = strategy.train_metrics[1]
    w = strategy.global_arrays["theta"].numpy()
    assert np.abs(w).max() > 0
    own = [strategy.personal_arrays(client)["theta"].numpy() for client in range(3)]
    assert [np.array_equal(theta, w) for theta in own] == [c != trained for c in range(3)]


def test_rho_without_a_number() -> None:
    # published lambda/m; else kappa = min(0.3/S, lambda/2) = 0.2 with S = 3 * 0.1, so rho = a.
    for published, expected in ((True, 0.4 / 3), (False, 0.4 / 3)):
        strategy = FLAME(lam=0.4, published=published, lr=0.1, fraction_evaluate=0)
        with Quadratics().grid(exact=False) as grid:
            strategy.start(grid, ArrayRecord(Point(2).state_dict()), 1)
        assert strategy.penalty == pytest.approx(expected)
