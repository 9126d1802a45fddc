"""The curvature of any PyTorch loss, by products with its Hessian."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .solvers import LocalProblem


def power_iteration(
    problem: LocalProblem, seed: int, *, tolerance: float = 1e-6, most: int = 200
) -> float:
    """Return the largest curvature of a loss where its model stands: ||Hessian||, from below.

    Power iteration with Hessian-vector products, each a pass over the data, until ||Hessian v||
    grows by less than `tolerance` of itself. The model is in evaluation mode, so that the loss is
    one function. Elsewhere the curvature of a loss that is not quadratic may be larger.

    Parameters
    ----------
    problem : LocalProblem
        The loss, and the model at whose present parameters it is looked at.
    seed : int
        Of the direction to start from.
    tolerance : float
    most : int
        Products at most.

    Raises
    ------
    ValueError
        If the Hessian is zero or not finite there.
    """
    problem.model.eval()
    parameters = [p for p in problem.model.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(seed)
    direction = [torch.randn(p.shape, generator=generator).to(p) for p in parameters]
    before = 0.0
    for _ in range(most):
        length = _norm(direction)
        direction = [part / length for part in direction]
        direction = _hessian_product(problem, parameters, direction)
        curvature = _norm(direction)
        if not (np.isfinite(curvature) and curvature > 0):
            raise ValueError(
                f"The loss has curvature {curvature} where the model starts, so none can be "
                "estimated there. Give the strategy curvature=..., or start from another model."
            )
        if abs(curvature - before) <= tolerance * curvature:
            break
        before = curvature
    return curvature


def _norm(parts: Sequence[torch.Tensor]) -> float:
    squares = [float(torch.linalg.vector_norm(part)) ** 2 for part in parts]
    return float(np.sqrt(sum(squares)))


def _hessian_product(
    problem: LocalProblem, parameters: list[torch.nn.Parameter], direction: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return Hessian @ direction of the mean loss over all samples."""
    total = [torch.zeros_like(part) for part in direction]
    seen = 0
    for batch in problem.batches():
        loss = problem.loss(batch) * batch.size
        # A parameter the loss does not reach, or reaches linearly, has no curvature: None, or zero.
        gradient = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        slope = sum(
            (g * v).sum() for g, v in zip(gradient, direction, strict=True) if g is not None
        )
        seen += batch.size
        if not (isinstance(slope, torch.Tensor) and slope.requires_grad):
            continue
        product = torch.autograd.grad(slope, parameters, allow_unused=True)
        for sum_, part in zip(total, product, strict=True):
            if part is not None:
                sum_ += part
    return [part / seen for part in total]
