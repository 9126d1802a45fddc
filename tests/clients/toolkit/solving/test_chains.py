"""Stacks of chains of linear layers: what any models get, and the same bits in every stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from clients.toolkit.data.batches import split_batch
from clients.toolkit.models.arrays import parameters_of
from clients.toolkit.solving.chains import Chain, chain_of
from clients.toolkit.solving.objective import (
    LinearTerm,
    LocalObjective,
    ProjectedTerm,
    ProximalTerm,
    Term,
)
from clients.toolkit.solving.solvers import LocalProblem, gradient_descent
from clients.toolkit.solving.stacked import Member, Step, descend
from clients.toolkit.solving.vmapped import AnyModel
from tests.support.pace import fast

FEATURES, CLASSES = 61, 7
SIZES = (9, 16, 23, 40, 12)


def network(*between: nn.Module, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(FEATURES, 33, bias=bias)),
        *between,
        nn.Linear(33, CLASSES),
    )


class Own(nn.Module):
    """A class of a user's own, whose layers are used in another order than they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(33, CLASSES), nn.Linear(FEATURES, 33)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = F.relu(self.first(x.view(x.size(0), -1))) * 0.5
        return self.last(hidden)


CHAINS: dict[str, Callable[[], nn.Module]] = {
    "softmax": lambda: nn.Linear(FEATURES, CLASSES),
    "ReLU": lambda: network(nn.ReLU(inplace=True)),
    "without a bias": lambda: network(nn.ReLU(), bias=False),
    "Tanh, GELU": lambda: network(nn.Tanh(), nn.Linear(33, 33), nn.GELU(approximate="tanh")),
    "LeakyReLU, Sigmoid": lambda: network(nn.LeakyReLU(0.2), nn.Identity(), nn.Sigmoid()),
    "two in a row": lambda: network(nn.Linear(33, 33), nn.ELU(0.5)),
    "a class of its own": Own,
}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) + x)


class Twice(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.first(F.relu(self.first(x)))))


class Unused(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(x)


class Turned(Residual):
    """A view that mixes the entries of samples."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).view(-1, len(x)).t())


class Noisy(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.first(x), 0.5))


class Scaled(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * self.first.bias)


@pytest.mark.parametrize("kind", [Residual, Twice, Unused, Turned, Noisy, Scaled])
def test_what_is_no_chain_is_seen(kind: type[nn.Module]) -> None:
    assert chain_of(kind(), torch.randn(3, FEATURES)) is None


def made(kind: str, dtype: torch.dtype, client: int) -> nn.Module:
    torch.default_generator.manual_seed(client)
    return CHAINS[kind]().to(dtype)


def batches_of(client: int, size: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(client)
    count = SIZES[client % len(SIZES)]
    x = torch.randn(count, FEATURES, generator=generator, dtype=dtype)
    y = torch.randint(0, CLASSES, (count,), generator=generator)
    return list(zip(x.split(size), y.split(size), strict=True))


Terms = Callable[[dict[str, Tensor], int], Sequence[Term]]


def member(
    kind: str, client: int, terms: Terms, dtype: torch.dtype, loss: nn.Module, moving: Any = None
) -> Member:
    model = made(kind, dtype, client)
    loader = batches_of(client, 8, dtype)
    if isinstance(loss, nn.MSELoss):
        loader = [(x, F.one_hot(y, CLASSES).to(dtype)) for x, y in loader]
    problem = LocalProblem(model, loader, loss, split_batch, torch.device("cpu"))
    anchors = {n: p.detach() + 0.1 for n, p in parameters_of(model).items()}
    if moving is not None:
        anchors = {name: anchor for name, anchor in anchors.items() if name in moving}
    objective = LocalObjective(terms(anchors, client), moving=moving)
    return Member(problem, parameters_of(model), objective, problem.epoch)


def none(anchors: dict[str, Tensor], client: int) -> Sequence[Term]:
    return ()


def pulls(anchors: dict[str, Tensor], client: int) -> Sequence[Term]:
    slope = {name: torch.full_like(anchor, 0.02) for name, anchor in anchors.items()}
    return ProximalTerm(0.5 + client, anchors), LinearTerm(0.3, slope)


def image(anchors: dict[str, Tensor], client: int) -> Sequence[Term]:
    count = sum(anchor.numel() for anchor in anchors.values())
    generator = torch.Generator().manual_seed(5)
    projection = torch.randn(3, count, generator=generator) / count
    return (ProjectedTerm(0.4, projection, torch.ones(3) * client, list(anchors)),)


def trained(
    members: Sequence[Member], model: Any, step: Step, full_batch: bool
) -> tuple[list[float], list[list[Tensor]]]:
    rows = 48 if full_batch else 16
    losses = descend(members, model=model, step=step, epochs=3, full_batch=full_batch, rows=rows)
    return losses, [[p.detach() for p in m.problem.model.parameters()] for m in members]


CASES: dict[str, tuple[str, Terms, Step, bool, nn.Module]] = {
    **{kind: (kind, none, Step(0.2), False, nn.CrossEntropyLoss()) for kind in CHAINS},
    "squared error": ("ReLU", none, Step(0.2), False, nn.MSELoss()),
    "smoothed": ("ReLU", none, Step(0.2), False, nn.CrossEntropyLoss(label_smoothing=0.1)),
    "all at once": ("ReLU", pulls, Step(0.2), True, nn.CrossEntropyLoss()),
    "momentum": ("ReLU", pulls, Step(0.1, 0.9, 0.01), False, nn.CrossEntropyLoss()),
    "nesterov": ("softmax", none, Step(0.1, 0.9, 0.01, True), False, nn.CrossEntropyLoss()),
    "clipping": ("ReLU", pulls, Step(0.1, max_grad_norm=0.3), False, nn.CrossEntropyLoss()),
    "an image": ("ReLU", image, Step(0.1), False, nn.CrossEntropyLoss()),
}
FAST = ["ReLU", "squared error", "all at once", "momentum"]


@pytest.mark.parametrize("case", fast(FAST, CASES))
@pytest.mark.parametrize("dtype", fast([torch.float64], [torch.float32, torch.float64]))
def test_a_chain_gets_what_any_models_get_and_what_each_gets_alone(
    case: str, dtype: torch.dtype
) -> None:
    kind, terms, step, full_batch, loss = CASES[case]
    few = 2e-6 if dtype == torch.float32 else 1e-7 if case == "an image" else 1e-13

    def members() -> list[Member]:
        return [member(kind, client, terms, dtype, loss) for client in range(5)]

    model = made(kind, dtype, 0)
    chain = chain_of(model, torch.randn(3, FEATURES, dtype=dtype))
    assert isinstance(chain, Chain)
    losses, found = trained(members(), chain, step, full_batch)
    for other in (AnyModel(model), None):
        if other is None:
            alone = members()
            theirs = [
                gradient_descent(
                    one.problem,
                    one.objective,
                    lr=step.lr,
                    epochs=3,
                    full_batch=full_batch,
                    optimizer_fn=partial(
                        torch.optim.SGD,
                        momentum=step.momentum,
                        weight_decay=step.weight_decay,
                        nesterov=step.nesterov,
                    ),
                    max_grad_norm=step.max_grad_norm,
                )
                for one in alone
            ]
            expected = [[p.detach() for p in one.problem.model.parameters()] for one in alone]
        else:
            theirs, expected = trained(members(), other, step, full_batch)
        assert losses == pytest.approx(theirs, rel=10 * few)
        for ours, those in zip(found, expected, strict=True):
            for mine, tensor in zip(ours, those, strict=True):
                gap = torch.linalg.vector_norm(mine - tensor)
                assert gap <= few * torch.linalg.vector_norm(tensor)


def test_layers_that_do_not_move_stay_and_those_below_them_move() -> None:
    for moving in (["first.weight", "first.bias"], ["last.weight", "last.bias"]):
        results = []
        for model in (chain_of(Own(), torch.randn(3, FEATURES)), AnyModel(Own())):
            members = [
                member("a class of its own", i, pulls, torch.float32, nn.CrossEntropyLoss(), moving)
                for i in range(3)
            ]
            before = [
                {n: p.detach().clone() for n, p in parameters_of(m.problem.model).items()}
                for m in members
            ]
            trained(members, model, Step(0.1), False)
            after = [parameters_of(m.problem.model) for m in members]
            for old, new in zip(before, after, strict=True):
                assert [n for n in old if not torch.equal(old[n], new[n])] == [
                    name for name in old if name in moving
                ]
            results.append(after)
        for ours, theirs in zip(*results, strict=True):
            for name in moving:
                torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", fast([torch.float32], [torch.float32, torch.float64]))
@pytest.mark.parametrize("kind", ["softmax", "Tanh, GELU", "LeakyReLU, Sigmoid"])
def test_a_client_gets_the_same_bits_in_every_stack(kind: str, dtype: torch.dtype) -> None:
    """At 61-33-7, of which nothing is a whole number of vectors, and any number of clients."""
    step = Step(0.1, 0.9, 0.01, max_grad_norm=2.0)
    chain = chain_of(made(kind, dtype, 0), torch.randn(3, FEATURES, dtype=dtype))

    def bits(clients: Sequence[int]) -> dict[int, list[bytes]]:
        members = [member(kind, i, pulls, dtype, nn.CrossEntropyLoss()) for i in clients]
        losses, found = trained(members, chain, step, False)
        return {
            i: [*(p.numpy().tobytes() for p in own), repr(loss).encode()]
            for i, own, loss in zip(clients, found, losses, strict=True)
        }

    everybody = bits(range(40))
    for company in ([0], [39], [4, 5], [1, 20, 3], range(0, 40, 6), [*range(17)][::-1]):
        assert bits(list(company)) == {i: everybody[i] for i in company}
