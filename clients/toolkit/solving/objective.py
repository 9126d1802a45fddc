"""The local objective of a method, for the clients' own solvers and for a user's training loop."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..models.arrays import parameters_of
from .stepsum import StepMeter

Weight = float | Tensor


@dataclass(frozen=True)
class _ConstantsTerm(ABC):
    """A term with a constant vector for each parameter of u.

    Attributes
    ----------
    weight : float, or Tensor of shape (clients,)
        c > 0. In a stack each client has its own, and the axes of constants and parameters begin
        with clients.
    constants : mapping of str to Tensor
        By parameter name; parameters that it does not name are not in u.
    """

    weight: Weight
    constants: Mapping[str, Tensor]

    @staticmethod
    @abstractmethod
    def slope(u: Tensor, constant: Tensor) -> Tensor:
        """Return the gradient of a parameter's part, without c."""

    @staticmethod
    @abstractmethod
    def part(u: Tensor, constant: Tensor) -> Tensor:
        """Return a parameter's part, without c."""

    @property
    def names(self) -> Collection[str]:
        """The parameters that u consists of."""
        return self.constants.keys()

    def add_gradient(self, moving: Mapping[str, nn.Parameter]) -> None:
        """Add the term's gradient to the parameters' ``.grad``."""
        for u, constant in self._pairs(moving):
            _add(_gradient_of(u), self.slope(u.detach(), constant), self.weight)

    def value(self, moving: Mapping[str, nn.Parameter]) -> Tensor:
        """Return the term."""
        parts = (self.part(u, constant) for u, constant in self._pairs(moving))
        return self.weight * sum(parts, torch.zeros(()))

    @classmethod
    def stacked(cls, terms: Sequence[Self]) -> Self:
        """Return the terms of several clients as one."""
        constants = {n: torch.stack([term.constants[n] for term in terms]) for n in terms[0].names}
        like = next(iter(constants.values()))
        return cls(_numbers([term.weight for term in terms], like), constants)

    def _pairs(self, moving: Mapping[str, nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield those parameters that move of the named ones, with their constants."""
        for name, constant in self.constants.items():
            if (parameter := moving.get(name)) is not None:
                yield parameter, rows(constant.to(parameter.device), parameter)


class ProximalTerm(_ConstantsTerm):
    """A term (c/2) ||u - a||^2 of a local objective; its constants are a."""

    @staticmethod
    def slope(u: Tensor, constant: Tensor) -> Tensor:
        """Return u - a."""
        return u - constant

    @staticmethod
    def part(u: Tensor, constant: Tensor) -> Tensor:
        """Return (1/2) ||u - a||^2."""
        return 0.5 * (u - constant).square().sum()


class LinearTerm(_ConstantsTerm):
    """A term c <s, u> of a local objective; its constants are s."""

    @staticmethod
    def slope(u: Tensor, constant: Tensor) -> Tensor:
        """Return s."""
        return constant

    @staticmethod
    def part(u: Tensor, constant: Tensor) -> Tensor:
        """Return <s, u>."""
        return (u * constant).sum()


@dataclass(frozen=True)
class ProjectedTerm:
    """A term (c/2) ||P u - a||^2, or c ||P u - a||_1, of some linear features of u.

    Attributes
    ----------
    weight : float, or Tensor of shape (clients,)
        c > 0.
    projection : Tensor of shape (k, d)
        P; its columns are the entries of the named parameters, one parameter after another.
    target : Tensor of shape (k,), or (clients, k)
        a.
    names : sequence of str
        The parameters that u consists of; all of them must move.
    power : {2, 1} (default: 2)
        Half the squared Euclidean norm, or the sum of the absolute values, with the subgradient
        sign(.), 0 at 0.
    """

    weight: Weight
    projection: Tensor
    target: Tensor
    names: Sequence[str]
    power: int = 2

    def image(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return P u, shape (k,) or (clients, k)."""
        clients = self.target.ndim - 1
        flat = torch.cat([parameters[name].flatten(clients) for name in self.names], -1)
        return flat.to(self.projection.dtype) @ self.projection.to(flat.device).t()

    def add_gradient(self, moving: Mapping[str, nn.Parameter]) -> None:
        """Add c P^T psi(P u - a) to the parameters' ``.grad``."""
        slope = self.slope(self._gap(moving))
        gradient = slope @ self.projection.to(slope)
        clients = self.target.ndim - 1
        sizes = [moving[name].shape[clients:].numel() for name in self.names]
        for name, part in zip(self.names, torch.split(gradient, sizes, -1), strict=True):
            _add(_gradient_of(moving[name]), part.view_as(moving[name]), self.weight)

    def value(self, moving: Mapping[str, nn.Parameter]) -> Tensor:
        """Return the term."""
        gap = self._gap(moving)
        if self.power == 1:
            return self.weight * gap.abs().sum()
        return 0.5 * self.weight * gap.square().sum()

    def slope(self, gap: Tensor) -> Tensor:
        """Return psi: the gradient of the norm in the gap P u - a."""
        return gap.sign() if self.power == 1 else gap

    def moved(self, parameters: Mapping[str, Tensor], step: float) -> ProjectedTerm:
        """Return the term with a one gradient step nearer to P u, of a step size."""
        change = step * self.weight * self.slope(self._gap(parameters))
        return replace(self, target=self.target + change.to(self.target))

    @staticmethod
    def stacked(terms: Sequence[ProjectedTerm]) -> ProjectedTerm:
        """Return the terms of several clients, which share their projection, as one."""
        first = terms[0]
        others = [t.projection for t in terms if t.projection is not first.projection]
        if not all(torch.equal(other, first.projection) for other in others):
            raise ValueError("The projections of the clients differ, expected one.")
        target = torch.stack([term.target for term in terms])
        return replace(
            first, weight=_numbers([term.weight for term in terms], target), target=target
        )

    def _gap(self, moving: Mapping[str, Tensor]) -> Tensor:
        image = self.image(moving)
        return image - rows(self.target.to(image), image)


Term = ProximalTerm | LinearTerm | ProjectedTerm


def rows(constant: Tensor, like: Tensor) -> Tensor:
    """Return what a stack's first clients have of a constant, as many as in another tensor."""
    return constant if constant.shape == like.shape else constant[: len(like)]


def times(weight: Weight, values: Tensor) -> Tensor:
    """Return values times their clients' weights, or the one of all."""
    return (_beside(weight, values) if isinstance(weight, Tensor) else weight) * values


def _beside(weights: Tensor, values: Tensor) -> Tensor:
    """Return the weights of a stack's first clients, which the values have, in their shape."""
    return weights[: len(values)].view(-1, *[1] * (values.ndim - 1)) if weights.ndim else weights


def _add(gradient: Tensor, change: Tensor, weight: Weight) -> None:
    if isinstance(weight, Tensor):
        gradient.addcmul_(_beside(weight, change), change)
    else:
        gradient.add_(change, alpha=weight)


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:  # a parameter the loss does not reach
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _numbers(numbers: Sequence[Weight], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)


class LocalObjective:
    """What a client minimises in a round: f(u) + sum_k (c_k / 2 alpha) ||u - a_k||^2.

    f is the client's own loss. A training loop of a user's own computes f as it always did and
    lets this object add the rest, in one of two ways::

        loss.backward()                                       loss = loss + objective.penalty(net)
        objective.add_gradient(net)                           loss.backward()
        optimizer.step()                                      optimizer.step()

    Where the optimizer makes the gradients itself, as Opacus' does, `attach` is the way.

    Where a paper has alpha f(u) + sum_k (c_k/2) ||u - a_k||^2, it is divided by alpha here: the
    minimiser is the same, and a step size, momentum, weight decay and clipping mean what they mean
    for f alone.

    Parameters
    ----------
    terms : sequence of ProximalTerm, LinearTerm or ProjectedTerm
        May be empty: then u minimises f alone.
    loss_weight : float (default: 1.0)
        alpha, the client's weight in the sum over clients.
    moving : collection of str, optional
        The parameters that u consists of; the others are held fixed. By default all.
    wants_step_sum : bool (default: False)
        Whether the sum of the step sizes is asked for.
    """

    def __init__(
        self,
        terms: Sequence[Term] = (),
        *,
        loss_weight: float = 1.0,
        moving: Collection[str] | None = None,
        wants_step_sum: bool = False,
    ) -> None:
        self.terms = list(terms)
        self.wants_step_sum = wants_step_sum
        self.meter: StepMeter | None = None
        """What measures that sum, where it does not follow from the settings."""
        self.loss_weight = loss_weight
        self._moving = None if moving is None else frozenset(moving)
        self.pulls = [replace(term, weight=term.weight / loss_weight) for term in self.terms]
        """The terms as they stand beside f: their weights over alpha."""
        self.used = not any(term.weight for term in self.terms)
        """Whether the terms were asked for; a loop that never did minimises another function."""
        self.first_loss: float | None = None
        """f before the first step, on all samples or the first batch, where the solver noted it."""
        self.constant_loss = math.nan
        """The same of a constant prediction."""
        self.steps = 0
        """How many steps were taken: how often its gradient was added, or its value."""

    @staticmethod
    def stacked(objectives: Sequence[LocalObjective]) -> LocalObjective:
        """Return the objectives of several clients, which have terms of the same kinds, as one."""
        made = LocalObjective(moving=objectives[0]._moving)
        of_terms: Any = zip(*(objective.pulls for objective in objectives), strict=True)
        made.pulls = [type(terms[0]).stacked(terms) for terms in of_terms]
        return made

    def add_gradient(self, model: nn.Module) -> None:
        """Add sum_k (c_k / alpha) (u - a_k) to the ``.grad`` of the model's parameters.

        To be called once for each step: after ``backward()`` (with gradients that are accumulated,
        the last one; with a `GradScaler`, after ``scaler.unscale_(optimizer)``) and before
        ``optimizer.step()``. Before a clipping of the gradient it is clipped too.

        Parameters
        ----------
        model : nn.Module
            The one that is trained.

        Raises
        ------
        ValueError
            If it lacks parameters of the objective.
        """
        self.complete_gradient(self._parameters(model))

    def attach(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> RemovableHandle:
        """Add the gradient of the terms in every step of an optimizer, before it moves anything.

        For loops in which the optimizer owns the gradients: Opacus' `DPOptimizer`, which makes
        ``.grad`` of clipped and noised ``.grad_sample`` in its own step, and `GradScaler`. The
        terms are of the server's and the client's models and need no noise. To be called once, for
        each objective with an optimizer of its own, in place of `add_gradient`::

            optimizer = engine.make_private(...)[1]
            objective.attach(optimizer, net)

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            The one that steps.
        model : nn.Module
            The one that is trained.

        Returns
        -------
        RemovableHandle
            Its ``remove()`` detaches the objective, where the optimizer outlives it.

        Raises
        ------
        ValueError
            If the model lacks parameters of the objective, or the optimizer has none of them.
        """
        moving = self._parameters(model)
        while (inner := getattr(optimizer, "original_optimizer", None)) is not None:
            optimizer = inner  # what Opacus' calls once it has made the gradients
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if moving and held.isdisjoint(map(id, moving.values())):
            raise ValueError(
                f"The optimizer has none of the parameters {', '.join(moving)} of the model "
                f"({type(model).__name__}). Give attach() the model that it trains."
            )

        def before_step(stepping: torch.optim.Optimizer, *_: object) -> None:
            if getattr(stepping, "grad_scale", None) is not None:
                raise ValueError(
                    f"{type(stepping).__name__} is fused and takes gradients that GradScaler has "
                    "not unscaled. Call scaler.unscale_(optimizer) before scaler.step(optimizer)."
                )
            self._complete(moving)

        return optimizer.register_step_pre_hook(before_step)

    def penalty(self, model: nn.Module) -> Tensor:
        """Return sum_k (c_k / 2 alpha) ||u - a_k||^2, to be added to the loss.

        Parameters
        ----------
        model : nn.Module
            The one that is trained.

        Returns
        -------
        Tensor of shape ()

        Raises
        ------
        ValueError
            If it lacks parameters of the objective.
        """
        moving = self._parameters(model)
        self._refuse_samples(moving)
        self.steps += 1
        total = torch.zeros(())  # on no device: it may be added to what is on any
        if self.meter is not None:
            total = total + self.meter.follow(moving)
        for term in self.pulls:
            total = total + term.value(moving)
        return total

    def note_loss(self, value: float, constant: float) -> None:
        """Keep f of before the first step, and that of a constant prediction."""
        if self.first_loss is None:
            self.first_loss, self.constant_loss = value, constant

    def complete_gradient(self, moving: Mapping[str, nn.Parameter]) -> None:
        """Turn grad f, in the parameters' ``.grad``, into that of the whole objective."""
        self._refuse_samples(moving)
        self._complete(moving)

    def _complete(self, moving: Mapping[str, nn.Parameter]) -> None:
        self.used = True
        self.steps += 1
        with torch.no_grad():
            for term in self.pulls:
                term.add_gradient(moving)
        if self.meter is not None:
            self.meter.add(moving)

    @contextmanager
    def others_fixed(self, model: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
        """Freeze all parameters of the model that are not in u; yield those that move."""
        named = parameters_of(model)
        moving = self.moving_of(named)
        fixed = [p for name, p in named.items() if p.requires_grad and name not in moving]
        try:
            for parameter in fixed:
                parameter.requires_grad_(False)
                parameter.grad = None
            yield moving
        finally:
            for parameter in fixed:
                parameter.requires_grad_(True)

    def _refuse_samples(self, moving: Mapping[str, nn.Parameter]) -> None:
        """Raise ValueError if a gradient that is added now would not be used.

        Opacus' optimizer makes ``.grad`` anew in its step, of the gradients of single samples.
        """
        asked = any(term.weight for term in self.terms)
        if asked and any(hasattr(parameter, "grad_sample") for parameter in moving.values()):
            raise ValueError(
                "The model's parameters have a grad_sample, of which their optimizer makes .grad "
                "anew in step(): what the objective adds before would be lost, and with it the "
                "method. Call objective.attach(optimizer, model) once, before the loop, in place "
                "of add_gradient and penalty."
            )

    def _parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        self.used = True
        named = parameters_of(model)
        lacking = [name for term in self.terms for name in term.names if name not in named]
        if lacking:
            raise ValueError(
                f"The objective is one of the parameters {', '.join(lacking)}, which the model "
                f"that it was given ({type(model).__name__}) does not have. Give it the client's "
                "model, the one that is trained."
            )
        return self.moving_of(named)

    def moving_of(self, named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return those of a model's parameters that move."""
        trained = {name: p for name, p in named.items() if p.requires_grad}
        return {n: p for n, p in trained.items() if self._moving is None or n in self._moving}
