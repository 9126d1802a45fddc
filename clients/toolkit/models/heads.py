"""Models with two heads, for FedRoD and FedCP: what such a model is, and how to make one.

A model with two heads has features ``base``, a head ``head`` that all clients share and a personal
one ``personal_head``, which begins as a copy of the other. `TwoHeaded.of` and `RoutedHeads.of` make
one of any model that ends in an `nn.Linear`; others are written as two modules, ``TwoHeaded(base,
head)``.
"""

from __future__ import annotations

import copy
from functools import reduce
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class TwoHeaded(nn.Module):
    """A model with a generic head, and a personal one that adds to its logits.

    Parameters
    ----------
    base : nn.Module
        Makes features of inputs. What the loaders give goes to it.
    head : nn.Module
        Makes logits of features.

    Attributes
    ----------
    base, head : nn.Module
    personal_head : nn.Module
        A copy of the head, with parameters of its own.

    Examples
    --------
    >>> two = TwoHeaded.of(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    >>> [name for name in two.state_dict() if "weight" in name]
    ['base.0.weight', 'head.weight', 'personal_head.weight']
    """

    def __init__(self, base: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.head = head
        self.personal_head = copy.deepcopy(head)
        self._cuts = [module for module in base.modules() if isinstance(module, _Cut)]

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Split a model at its last `nn.Linear`, which becomes the head.

        Parameters
        ----------
        model : nn.Module
            It is left as it is; what it returns must be what its last linear layer returns.

        Raises
        ------
        ValueError
            If it has no such layer. That it does not end there is found with the first batch.
        """
        base = copy.deepcopy(model)
        linear = [name for name, part in base.named_modules() if isinstance(part, nn.Linear)]
        if not linear:
            raise ValueError(
                f"The model, a {type(model).__name__}, has no nn.Linear layer, so that its head "
                f"cannot be told from its features. Write it as two modules: {cls.__name__}(base, "
                "head)."
            )
        cut = _Cut(f"{type(model).__name__} ... {linear[-1]!r}", cls.__name__)
        head = base.get_submodule(linear[-1])
        if head is base:
            return cls(cut, head)
        parent, _, name = linear[-1].rpartition(".")
        setattr(base.get_submodule(parent), name, cut)
        return cls(base, head)

    def features(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the base makes of inputs.

        Raises
        ------
        ValueError
            If a model that was split does not end in its last linear layer.
        """
        for cut in self._cuts:
            cut.received.clear()
        features: Tensor = self.base(*args, **kwargs)
        for cut in self._cuts:
            cut.check(features)
        return features

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the personal prediction: the logits of both heads together."""
        features = self.features(*args, **kwargs)
        logits: Tensor = self.head(features) + self.personal_head(features)
        return logits


class RoutedHeads(TwoHeaded):
    """A model with two heads and a policy that divides the features of each sample between them.

    With the features h of a sample, the sum v of the rows of the personal head's weight, and
    (a, b) = policy(h * v/||v||), a share r = e^a / (e^a + e^b) of every feature is for the personal
    head: the logits are personal_head(r * h) + head((1 - r) * h).

    Parameters and examples are those of `TwoHeaded`. A head is an `nn.Linear`, or several of them
    in a row, with what stands in between; then v sums the rows of the product of their weights.

    Attributes
    ----------
    policy : nn.Module
        Of K features it makes 2 K numbers.
    """

    def __init__(self, base: nn.Module, head: nn.Module) -> None:
        super().__init__(base, head)
        layers = self._linear_layers()
        if not layers:
            raise ValueError(
                f"The head, a {type(head).__name__}, has no nn.Linear layer; its weights "
                "tell features apart. Give a head that is one, or has some."
            )
        size = layers[0].in_features
        self.policy = nn.Sequential(
            nn.Linear(size, 2 * size), nn.LayerNorm(2 * size), nn.ReLU()
        ).to(layers[0].weight.dtype)

    def _linear_layers(self) -> list[nn.Linear]:
        return [part for part in self.personal_head.modules() if isinstance(part, nn.Linear)]

    def context(self) -> Tensor:
        """Return v, shape (K,), without a gradient."""
        weights = [layer.weight.detach() for layer in self._linear_layers()]
        return reduce(lambda product, weight: weight @ product, weights).sum(0)

    def route(self, features: Tensor, context: Tensor, *, noise: bool = False) -> Tensor:
        """Return r, shape (n, K): the share of each feature that is for the personal head.

        Parameters
        ----------
        features : Tensor of shape (n, K)
        context : Tensor of shape (K,)
        noise : bool (default: False)
            Whether Gumbel noise is added to a and b.
        """
        if features.ndim != 2 or features.shape[1] != len(context):
            raise ValueError(
                f"The base returns features of shape {tuple(features.shape)}, expected one row of "
                f"{len(context)} for every sample. Let it end in a flattening or a pooling."
            )
        pair = self.policy(F.normalize(context, dim=0) * features).view(len(features), 2, -1)
        shares = F.gumbel_softmax(pair, dim=1) if noise else pair.softmax(dim=1)
        return shares[:, 0]

    def join(self, features: Tensor, shares: Tensor) -> Tensor:
        """Return the logits for features that are divided by shares r."""
        logits: Tensor = self.personal_head(shares * features) + self.head((1 - shares) * features)
        return logits

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits, without noise."""
        features = self.features(*args, **kwargs)
        return self.join(features, self.route(features, self.context()))


class _Cut(nn.Module):
    """Stands in the place of a model's head and keeps what that would have received."""

    def __init__(self, place: str, kind: str) -> None:
        super().__init__()
        self.place, self.kind = place, kind
        self.received: list[Tensor] = []

    def forward(self, features: Tensor) -> Tensor:
        self.received.append(features)
        return features

    def check(self, returned: Tensor) -> None:
        """Raise ValueError unless the head was used once, and last."""
        used = [features is returned for features in self.received]
        self.received.clear()
        if used != [True]:
            raise ValueError(
                f"The model was split at its last linear layer ({self.place}), but it does not end "
                f"there: what it returns is not that layer's output. Write it as two modules: "
                f"{self.kind}(base, head)."
            )


def mean_discrepancy(x: Tensor, y: Tensor) -> Tensor:
    """Return the squared maximum mean discrepancy of two samples, by four Gaussian kernels.

    The mean over all pairs, a row with itself included, of k(x, x') + k(y, y') - 2 k(x, y), with
    k(a, b) = sum_B exp(-||a - b||^2 / (2 B)), B = 10, 15, 20, 50.

    Parameters
    ----------
    x, y : Tensor of shape (n, K)
    """

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        # Not torch.cdist: the gradient of a root at 0 is none.
        gaps = a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.t()
        return sum((torch.exp(-gaps / (2 * width)) for width in (10, 15, 20, 50)), torch.zeros(()))

    return (kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)).mean()
