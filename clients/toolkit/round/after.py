"""After a run: a model for a client that took no part in it, and arrays as PyTorch has them."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from fl_admm_strategies.maths.blocks import Arrays

from ..data import batches
from ..data.batches import Loader, SplitBatch
from ..models.arrays import parameters_of
from ..solving.objective import LocalObjective, ProximalTerm
from ..solving.solvers import LocalProblem, LossFn, OptimizerFn, gradient_descent

Key = TypeVar("Key", bound=Hashable)


def state_dict(arrays: Arrays) -> dict[str, Tensor]:
    """Return a model's arrays as tensors, for ``model.load_state_dict``."""
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


def losses_of(
    model: nn.Module,
    candidates: Mapping[Key, Arrays],
    loader: Loader,
    loss_fn: LossFn | None = None,
    *,
    split_batch: SplitBatch | None = None,
) -> dict[Key, float]:
    """Return the mean loss of each of some models on a client's data, the best first.

    A new client belongs to the cluster with the model that fits its data best: the first of
    ``losses_of(Net(), models.clusters, loader, loss_fn)``. Use data that are enough to tell the
    models apart, and not those that the result is tested on.

    Parameters
    ----------
    model : nn.Module
        The architecture, on the device to compute on. It is left as it was.
    candidates : mapping to Arrays
        Such as `Models.clusters`, or ``Models.named()``.
    loader : iterable of batches
        The client's.
    loss_fn : callable, optional
        ``loss_fn(outputs, targets)``: the mean over the batch. Without it the model returns its
        loss.
    split_batch : callable, optional
        As `TorchClient` has it.

    Raises
    ------
    ValueError
        If there is no candidate.
    RuntimeError
        If a candidate does not fit the model, as ``load_state_dict`` says it.
    """
    if not candidates:
        raise ValueError(
            "There are no models to choose from, expected one at least: only methods that find "
            "clusters, such as FPFC, have Models.clusters. Give Models.named()."
        )
    problem, found = _problem(model, loader, loss_fn, split_batch), {}
    problem.model.eval()
    for key, arrays in candidates.items():
        problem.model.load_state_dict(state_dict(arrays))
        total, count = 0.0, 0
        with torch.no_grad():
            for batch in problem.batches():
                total += float(problem.loss(batch)) * batch.size
                count += batch.size
        found[key] = total / count
    return dict(sorted(found.items(), key=lambda item: item[1]))


def personalise(
    model: nn.Module,
    start: Arrays,
    loader: Loader,
    loss_fn: LossFn | None = None,
    *,
    lr: float,
    epochs: int,
    lam: float = 0.0,
    full_batch: bool = False,
    optimizer_fn: OptimizerFn = torch.optim.SGD,
    split_batch: SplitBatch | None = None,
) -> Arrays:
    """Return a personal model for a new client: min f(u) + lam/2 ||u - start||^2, from `start`.

    This is the client's step of `Ditto` and of `FLAME`, with `start` in the place of the global
    model: take ``Models.global_``, or the cluster's. With lam = 0 it is fine-tuning.

    Parameters
    ----------
    model : nn.Module
        The architecture, on the device to compute on. It is left as it was; what has no
        ``requires_grad`` is not trained.
    start : Arrays
        The model to start from.
    loader, loss_fn, split_batch
        As in `losses_of`.
    lr, epochs : float, int
        Step size, and passes over the data.
    lam : float (default: 0.0)
        lambda, how strongly the model is held near `start`.
    full_batch : bool (default: False)
        Full-gradient steps, one an epoch, in place of mini-batch SGD.
    optimizer_fn : callable (default: torch.optim.SGD)

    Returns
    -------
    Arrays
        With the names of `start`.
    """
    problem = _problem(model, loader, loss_fn, split_batch)
    problem.model.load_state_dict(state_dict(start))
    trained = {n: p for n, p in parameters_of(problem.model).items() if p.requires_grad}
    anchor = {name: parameter.detach().clone() for name, parameter in trained.items()}
    gradient_descent(
        problem,
        LocalObjective([ProximalTerm(lam, anchor)] if lam else [], moving=trained),
        lr=lr,
        epochs=epochs,
        full_batch=full_batch,
        optimizer_fn=optimizer_fn,
    )
    state = problem.model.state_dict()
    return {n: state[n].cpu().to(state_dict({n: a})[n].dtype).numpy() for n, a in start.items()}


def _problem(
    model: nn.Module, loader: Loader, loss_fn: LossFn | None, split_batch: SplitBatch | None
) -> LocalProblem:
    twin = copy.deepcopy(model)
    device = next((p.device for p in twin.parameters()), torch.device("cpu"))
    split = split_batch or batches.split_for(loss_fn)
    return LocalProblem(twin, loader, loss_fn, split, device)
