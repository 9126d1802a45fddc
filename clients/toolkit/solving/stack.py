"""The loss of many clients at once: their models in one stack of parameters, their batches in one.

Each parameter of all clients is one tensor, which begins with the clients' axis. `torch.func.vmap`
calls the model of all of them at once, and autograd has the gradient. `solvers.descend` takes the
steps, as it does for a client alone.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from inspect import signature
from itertools import accumulate
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ..data.draws import bits, orders
from .calls import ClientCalls
from .objective import LocalObjective
from .solvers import UNKNOWN, Epoch, Gradient, LossFn


class CannotStackError(Exception):
    """These clients cannot be trained in one stack; alone they may."""


class StackBatch(NamedTuple):
    """What the first clients of a stack take a step on.

    Attributes
    ----------
    inputs, targets : Tensor of shape (clients, rows, ...)
    weights : Tensor of shape (clients, rows)
        1/n of a client's samples, 0 of what fills its rows up.
    sizes : Tensor of shape (clients,)
    firsts : Tensor of shape (clients,)
        The place of the first sample in the epoch.
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor
    sizes: Tensor
    firsts: Tensor


class Samples:
    """The samples of some clients, those with the most batches first, and what each step takes.

    Parameters
    ----------
    epochs : sequence of Epoch
        Of each client.
    whole : bool
        Whether a client takes one step, on all of its samples.
    dtype : torch.dtype
        Of the losses.
    """

    def __init__(self, epochs: Sequence[Epoch], whole: bool, dtype: torch.dtype) -> None:
        self.inputs = torch.cat([epoch.inputs for epoch in epochs])
        self.targets = torch.cat([epoch.targets for epoch in epochs])
        device = self.inputs.device
        counts = [len(epoch.targets) for epoch in epochs]
        self._counts = torch.tensor(counts, device=device)
        self._starts = torch.tensor([0, *accumulate(counts)][:-1], device=device)
        self._longest = max(counts)
        sizes = [[count] for count in counts] if whole else [epoch.sizes for epoch in epochs]
        if sorted(map(len, sizes), reverse=True) != [*map(len, sizes)]:
            raise CannotStackError("a loader's epochs have different numbers of batches")
        self._steps: list[tuple[Tensor, ...]] = []
        firsts = torch.zeros(len(sizes), dtype=torch.int64)
        for step in range(len(sizes[0])):
            of_step = torch.tensor([own[step] for own in sizes if step < len(own)])
            row = torch.arange(int(of_step.max()))
            within = row < of_step[:, None]
            firsts = firsts[: len(of_step)]
            places = firsts[:, None] + row.where(within, 0)
            weights = (within / of_step.double()[:, None]).to(dtype)
            self._steps.append(tuple(t.to(device) for t in (places, weights, of_step, firsts)))
            firsts = firsts + of_step

    def batches(self, keys: Sequence[int | None]) -> Iterator[StackBatch]:
        """Yield the batches of an epoch; keys of the order are those of all clients, or None."""
        order: Tensor | None = None
        if keys[0] is not None:
            of_clients = torch.tensor(keys, device=self.inputs.device)
            order = orders(of_clients, self._counts, self._longest)
        for places, weights, sizes, firsts in self._steps:
            clients, rows = places.shape
            taken = places if order is None else order[:clients].gather(1, places)
            flat = (self._starts[:clients, None] + taken).view(-1)
            inputs, targets = (
                values.index_select(0, flat).view(clients, rows, *values.shape[1:])
                for values in (self.inputs, self.targets)
            )
            yield StackBatch(inputs, targets, weights, sizes, firsts)


class Stack:
    """The losses of clients of one architecture, as `LocalProblem` is that of one.

    Parameters
    ----------
    model : nn.Module
        The architecture; its own parameters are not used.
    loss_fn : callable
        The mean over a batch of its samples' losses.
    parameters : dict of str to Tensor
        Of all clients.
    seeds : sequence of int
        Of the clients' dropout. It and the batches are for descents.
    epochs : callable
        ``epochs(epoch)`` yields the batches.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        parameters: dict[str, Tensor],
        seeds: Sequence[int] = (0,),
        epochs: Callable[[int], Iterator[StackBatch]] = lambda _: iter(()),
    ) -> None:
        self.model, self.parameters = model, parameters
        self._losses, self._epochs = sample_losses(loss_fn), epochs
        self._seeds = torch.tensor(seeds, device=next(iter(parameters.values())).device)
        self._recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())

    @contextmanager
    def moving(self, objective: LocalObjective) -> Iterator[dict[str, Tensor]]:
        """Yield those parameters that move."""
        trained = dict(self.model.named_parameters())
        yield {name: self.parameters[name] for name in objective.moving_of(trained)}

    def gradients(
        self, moving: dict[str, Tensor], epoch: int, full_batch: bool
    ) -> Iterator[Gradient]:
        """Yield the gradient of every step of an epoch, as `LocalProblem.gradients` does."""
        keys, leaves = bits(self._seeds, epoch), moving
        known: dict[str, Tensor] = {}
        for batch in self._epochs(epoch):
            clients, is_first = len(batch.sizes), epoch == 0 and not known
            if not known or len(next(iter(known.values()))) != clients:
                known = {name: stack[:clients] for name, stack in self.parameters.items()}
                leaves = {name: known[name].detach().requires_grad_() for name in moving}
                known |= leaves
            outputs = self.outputs(known, batch, keys[:clients])
            losses = self.losses(outputs, batch)
            losses.sum().backward()  # type: ignore[no-untyped-call]
            constants = UNKNOWN
            if is_first and not full_batch:
                means = torch.einsum("cr,cr...->c...", batch.weights, outputs.detach())
                constants = self.losses(means.unsqueeze(1).expand_as(outputs), batch)
                constants = constants.where(batch.sizes > 1, torch.nan)
            yield Gradient(leaves, losses.detach(), batch.sizes, constants)

    def losses(self, outputs: Tensor, batch: StackBatch) -> Tensor:
        """Return the clients' mean losses, shape (clients,)."""
        return (self._losses(outputs, batch.targets) * batch.weights).sum(1)

    def outputs(
        self, parameters: Mapping[str, Tensor], batch: StackBatch, keys: Tensor | None = None
    ) -> Tensor:
        """Return what the models make of samples, shape (clients, rows, ...).

        Parameters
        ----------
        parameters : mapping of str to Tensor
        batch : StackBatch
        keys : Tensor of shape (clients,), optional
            Of the clients' random numbers in this epoch; not needed in an evaluation.
        """

        def of_one(own: dict[str, Tensor], samples: Tensor, key: Tensor, first: Tensor) -> Any:
            with ClientCalls(key, first, stacked=True):
                return functional_call(self.model, own, (samples,))

        keys = batch.sizes if keys is None else keys
        with _plain_layers() if self._recurrent else nullcontext():
            run = vmap(of_one)
            outputs: Tensor = run(dict(parameters), batch.inputs, keys, batch.firsts)
        return outputs


@contextmanager
def _plain_layers() -> Iterator[None]:
    """Do without cuDNN and oneDNN: `vmap` cannot go through their recurrent layers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # to set oneDNN's flags warns of TF32
        with torch.backends.cudnn.flags(enabled=False), torch.backends.mkldnn.flags(enabled=False):
            yield


def sample_losses(loss_fn: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the losses of stacked samples, (clients, rows), of a loss that is a mean over a batch.

    Any such loss is that of batches of one. PyTorch's have `reduction`, and with classes before
    samples, which is how outputs lie in memory, take half the time of a step of small models.
    """
    single: Any = None
    if isinstance(loss_fn, nn.Module) and getattr(loss_fn, "reduction", None) == "mean":
        single = copy.copy(loss_fn)
        single.reduction = "none"
    elif isinstance(loss_fn, FunctionType) and "reduction" in signature(loss_fn).parameters:
        single = partial(loss_fn, reduction="none")
    if single is None:
        return vmap(vmap(lambda output, target: loss_fn(output[None], target[None])))
    by_class = isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss) or loss_fn in (
        nn.functional.cross_entropy,
        nn.functional.nll_loss,
    )

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        if by_class and outputs.ndim == 3 and targets.ndim == 2:
            values: Tensor = single(outputs.transpose(1, 2), targets)
            return values
        values = single(outputs.flatten(0, 1), targets.flatten(0, 1))
        return values.view(*outputs.shape[:2], -1).mean(2)

    return losses
