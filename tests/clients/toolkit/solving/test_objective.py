"""The local objective in training loops that are not ours."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from clients import (
    FedGiAClient,
    FedMCADMMClient,
    FedProxClient,
    MethodClient,
    TorchClient,
    client_app,
)
from clients.toolkit.solving.objective import (
    LinearTerm,
    LocalObjective,
    ProjectedTerm,
    ProximalTerm,
    Term,
)
from fl_admm_strategies.algorithms.fedprox import FedProxInstruction
from tests.clients.methods.lines import line_client, new_context
from tests.clients.methods.messages import received, scalars
from tests.support.cases import NUM_CLIENTS, case_of, plain, run, sampling
from tests.support.federation import (
    Federation,
    assert_equal_to_rounding,
    assert_same_bits,
    client_fn_of,
    method_state,
)
from tests.support.pace import fast
from tests.support.refusals import refused


def number(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


class Pair(nn.Module):
    """u x + v, in float64."""

    def __init__(self, u: float, v: float) -> None:
        super().__init__()
        self.u = nn.Parameter(number(u))
        self.v = nn.Parameter(number(v))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.u * inputs + self.v


# --- By hand ------------------------------------------------------------------------------------

# u = 3, v = 4. (2/2) |u - 1|^2 = 4, slope 4 in u. (3/2) |(1 -1)(u v) - 2|^2 = 3/2 (-3)^2 = 13.5,
# slope 3 (-3)(1 -1) = (-9, 9). f = 5 u + 7 v has slope (5, 7).
PULL = ProximalTerm(2.0, {"u": number(1.0)})
# 2 <1.5, u> = 9, slope 3 in u.
LINE = LinearTerm(2.0, {"u": number(1.5)})
IMAGE = ProjectedTerm(3.0, torch.tensor([[1.0, -1.0]]).double(), number(2.0), ["u", "v"])


@pytest.mark.parametrize(
    ("terms", "value", "slope"),
    [
        ([PULL], 4.0, (4.0, 0.0)),
        ([IMAGE], 13.5, (-9.0, 9.0)),
        ([PULL, IMAGE], 17.5, (-5.0, 9.0)),
        ([LINE], 9.0, (3.0, 0.0)),
    ],
)
@pytest.mark.parametrize("alpha", [1.0, 0.25])
def test_penalty_and_gradient_by_hand(
    terms: list[Term], value: float, slope: tuple[float, float], alpha: float
) -> None:
    # Over alpha, so that the loss counts as it is: both are 1/alpha of the terms.
    objective = LocalObjective(terms, loss_weight=alpha)
    by_gradient, by_penalty = Pair(3.0, 4.0), Pair(3.0, 4.0)
    (5 * by_gradient.u + 7 * by_gradient.v).backward()
    objective.add_gradient(by_gradient)
    penalty = objective.penalty(by_penalty)
    (5 * by_penalty.u + 7 * by_penalty.v + penalty).backward()
    assert penalty.item() == pytest.approx(value / alpha, rel=1e-15)
    for model in (by_gradient, by_penalty):
        expected = (5 + slope[0] / alpha, 7 + slope[1] / alpha)
        assert (model.u.grad.item(), model.v.grad.item()) == pytest.approx(expected, rel=1e-15)


def test_a_wrapped_model_is_the_same_model_and_another_one_is_refused() -> None:
    model = Pair(3.0, 4.0)
    LocalObjective([PULL]).add_gradient(nn.DataParallel(model))
    assert model.u.grad.item() == 4.0
    with refused(ValueError, "u", "Linear"):
        LocalObjective([PULL]).penalty(nn.Linear(1, 1))


def test_what_does_not_move_is_neither_pulled_nor_counted() -> None:
    model = Pair(3.0, 4.0)
    objective = LocalObjective([PULL], moving=["v"])
    assert objective.penalty(model).item() == 0.0
    objective.add_gradient(model)
    assert model.u.grad is None


# --- A loop of one's own takes the steps of the method's client ----------------------------------


class OwnLoop(TorchClient[Any]):
    """The loop of any project: SGD on its loss, and one line."""

    def minimise(self, objective: LocalObjective, *, lr: float, epochs: int) -> dict[str, float]:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.model.train()
        for _ in range(epochs):
            total = 0.0
            for inputs, labels in self.train_loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(self.model(inputs), labels)
                loss.backward()
                objective.add_gradient(self.model)
                optimizer.step()
                total += loss.item() * len(labels)
        return {"loss": total / len(self.train_loader.dataset)}


def with_own_loop(client_class: Any) -> Any:
    return type(f"Own{client_class.__name__}", (OwnLoop, client_class), {})


EXACT = ["FLAME", "LpProjADMM", "FedProx", "Ditto", "Local"]
EXACT += ["PFedMe", "PFedMeMatched", "LpProj"]
# alpha (g + c/alpha d) is alpha g + c d but for rounding, and rho follows from the measured S.
ROUNDED = ["FPFC", "FPFC-head", "FedADMM", "FedADMM-client-duals", "FedAPM"]


@pytest.mark.parametrize("name", fast(["Ditto", "FedADMM-client-duals"], EXACT + ROUNDED))
def test_a_loop_of_ones_own_ends_where_the_methods_client_does(name: str) -> None:
    case = case_of(name)
    clients = client_app(client_fn_of(with_own_loop(case.client_class)))
    users = run(case, Federation(clients, NUM_CLIENTS), strategy=sampling(case))
    ours, _ = plain(case)
    if name in EXACT:
        assert_same_bits(method_state(users), method_state(ours))
    assert_equal_to_rounding(users, ours)


# --- What cannot be honoured is refused ---------------------------------------------------------


class Forgetful(OwnLoop):
    """Never asks the objective."""

    def minimise(self, objective: LocalObjective, *, lr: float, epochs: int) -> dict[str, float]:
        return {"loss": 0.0}


def message() -> Any:
    model = scalars(w=0.0, b=0.0, seen=0.0)
    return received(FedProxInstruction(model, mu=1.0, lr=0.1, local_epochs=1))


def test_a_loop_that_forgets_the_objective_is_refused() -> None:
    forgetful = line_client(type("Own", (Forgetful, FedProxClient), {}))
    with refused(ValueError, "Own.minimise", "objective.add_gradient(model)"):
        forgetful.fit(*message())


def test_what_a_loop_reports_is_a_dict() -> None:
    class Loose(FedProxClient):
        def minimise(self, objective: Any, *, lr: float, epochs: int) -> Any:
            objective.penalty(self.model)
            return 0.5

    with refused(TypeError, "Loose.minimise", "0.5"):
        line_client(Loose).fit(*message())


@pytest.mark.parametrize("client_class", [FedGiAClient, FedMCADMMClient])
def test_a_method_in_closed_form_has_no_objective(client_class: Any) -> None:
    descending = type("Own", (client_class,), {"minimise": OwnLoop.minimise})
    with refused(TypeError, "Own", "minimise()", client_class.strategy.__name__):
        MethodClient.__init__(descending.__new__(descending), new_context())


def test_steps_that_are_a_formula_take_no_optimizer() -> None:
    halved = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    with refused(ValueError, "FedGiAClient", "optimizer_fn, scheduler_fn, max_grad_norm"):
        line_client(
            FedGiAClient, optimizer_fn=torch.optim.Adam, scheduler_fn=halved, max_grad_norm=1.0
        )


# --- Optimizers that own their gradients ----------------------------------------------------------


class SampleWise(torch.optim.Optimizer):
    """As Opacus' `DPOptimizer`: its step makes ``.grad`` of ``.grad_sample``; without noise."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.original_optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.original_optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad_sample.mean(dim=0)
        self.original_optimizer.step()


def quadratic() -> tuple[nn.Linear, LocalObjective]:
    """Return a model of two numbers at 0, and the objective that pulls them to 1 with weight 3."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, LocalObjective([ProximalTerm(3.0, {"weight": torch.ones(1, 2)})])


def add_samples(model: nn.Linear) -> None:
    """Give the parameters the gradients 2 and 4 of two samples."""
    model.weight.grad_sample = torch.tensor([2.0, 4.0]).reshape(2, 1, 1).expand(2, 1, 2)  # type: ignore[assignment]


def test_a_step_that_makes_the_gradients_itself_gets_the_terms_as_well() -> None:
    model, objective = quadratic()
    optimizer = SampleWise(torch.optim.SGD(model.parameters(), lr=0.1))
    objective.attach(optimizer, model)
    add_samples(model)
    for _ in range(2):
        optimizer.step()
    # The mean 3 of the samples and the pull 3 (0 - 1) cancel in every step.
    assert torch.equal(model.weight, torch.zeros(1, 2))
    assert (objective.used, objective.steps) == (True, 2)


@pytest.mark.parametrize("way", ["add_gradient", "penalty"])
def test_what_such_a_step_would_lose_is_refused(way: str) -> None:
    model, objective = quadratic()
    add_samples(model)
    with refused(ValueError, "grad_sample", "objective.attach(optimizer, model)"):
        getattr(objective, way)(model)
    getattr(LocalObjective(), way)(model)  # FedAvg adds nothing


def test_attached_it_is_what_add_gradient_does() -> None:
    found = []
    for attached in (True, False):
        model, objective = quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        handle = objective.attach(optimizer, model) if attached else None
        for _ in range(3):
            optimizer.zero_grad()
            (model(torch.ones(4, 2)) - 1).square().mean().backward()
            if not attached:
                objective.add_gradient(model)
            optimizer.step()
        found.append(model.weight.detach().clone())
        if handle is not None:
            handle.remove()
            optimizer.step()
            assert objective.steps == 3
    assert torch.equal(*found)


def test_attached_it_goes_with_a_scaler_of_gradients() -> None:
    model, objective = quadratic()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objective.attach(optimizer, model)
    scaler.scale((3 * model.weight).sum()).backward()  # 3, which the pull cancels
    scaler.step(optimizer)
    assert torch.equal(model.weight, torch.zeros(1, 2))


def test_attached_to_another_models_optimizer_it_is_refused() -> None:
    (model, objective), (other, _) = quadratic(), quadratic()
    with refused(ValueError, "attach", "weight"):
        objective.attach(torch.optim.SGD(other.parameters(), lr=0.1), model)
