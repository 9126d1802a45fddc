"""Which part of a model is personal: ready selectors for FedAPM, and a model with a split input.

Zhu et al., "FedAPM: Federated Learning via ADMM with Partial Model Personalization", KDD 2025,
section 3.4. A selector returns a regular expression over the names in a model's ``state_dict``, for
``FedAPM(personal=...)``: what it is found in is v_i and stays with the client, the rest is u.

Buffers that come with a layer, such as the running statistics of a batch norm, have no gradient and
so no dual variable either; the paper does not say where they go. The selectors name all of a
model's buffers as personal, while affine weights go with their layer (docs/methods/fedapm-notes.md,
P4).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from .arrays import parameters_of

_NORMALISATIONS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)


def input_layers(model: nn.Module, n: int) -> str:
    r"""Return a pattern that makes the first layers personal: input personalisation.

    A layer is a module with parameters of its own; layers count in the order in which the model
    defines them, and a normalisation belongs to the layer before it.

    Parameters
    ----------
    model : nn.Module
        The clients' model.
    n : int
        How many layers are personal: 1 or more, and fewer than the model has.

    Returns
    -------
    str
        The regular expression, for ``FedAPM(personal=...)``.

    Raises
    ------
    ValueError
        If the model has no parameters, `n` leaves nothing personal or nothing shared, or a
        personal and a shared layer use one and the same parameter.

    Examples
    --------
    >>> input_layers(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), 1)
    '^(?:0\\.)[^.]+$'
    """
    return _pattern_of(model, _layers(model, n)[:n])


def output_layers(model: nn.Module, n: int) -> str:
    """Return a pattern that makes the last layers personal: output personalisation.

    Parameters, result and errors are those of `input_layers`, with the last `n` layers in place of
    the first.
    """
    return _pattern_of(model, _layers(model, n)[-n:])


class SplitInput(nn.Module):
    """A network with an input layer of a personal and a shared part.

    Each part reads its own portion of the input; what they return is concatenated and goes on to
    the upper layers, which are shared. `split_input` gives the pattern.

    Parameters
    ----------
    personal : nn.Module
        The part that stays with the client.
    shared : nn.Module
        The other part. It may be without parameters, e.g. `nn.Identity`.
    upper : nn.Module
        The layers above both.
    split : callable
        ``split(inputs)`` returns the portions of a batch as (for personal, for shared), e.g.
        ``lambda x: (x[:, :3], x[:, 3:])``.
    dim : int (default: 1)
        The axis along which the outputs of both parts are concatenated.
    """

    def __init__(
        self,
        *,
        personal: nn.Module,
        shared: nn.Module,
        upper: nn.Module,
        split: Callable[[Tensor], tuple[Tensor, Tensor]],
        dim: int = 1,
    ) -> None:
        super().__init__()
        self.personal = personal
        self.shared = shared
        self.upper = upper
        self.split = split
        self.dim = dim

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output of the upper layers for a batch."""
        portions = self.split(inputs)
        if not isinstance(portions, tuple | list) or len(portions) != 2:
            raise TypeError(
                f"split(inputs) returned a {type(portions).__name__}, expected the two portions of "
                "a batch: (for personal, for shared)."
            )
        outputs = [self.personal(portions[0]), self.shared(portions[1])]
        upper: Tensor = self.upper(torch.cat(outputs, self.dim))
        return upper


def split_input(model: SplitInput) -> str:
    """Return the pattern of a split input's personal part, ``^personal[.]``.

    Parameters
    ----------
    model : SplitInput
        The clients' model.

    Returns
    -------
    str
        The regular expression, for ``FedAPM(personal=...)``.

    Raises
    ------
    TypeError
        If the model is of another kind.
    ValueError
        If the personal part and the rest use one and the same parameter.
    """
    if not isinstance(model, SplitInput):
        raise TypeError(
            f"split_input takes a SplitInput, got {type(model).__name__}. Build the model as "
            "SplitInput(personal=..., shared=..., upper=..., split=...), or name the personal "
            "parameters with a pattern of your own."
        )
    return _with_buffers(model, "^personal[.]")


def last_parameters(model: nn.Module, n: int) -> list[str]:
    """Return the names of the trained parameters in the last layers, as the selectors count them.

    Names are those that travel. `n` may be 0, or all of the layers.

    Raises
    ------
    ValueError
        If the model has fewer layers.
    """
    layers = _layers_of(model)
    if n > len(layers):
        raise ValueError(
            f"layers is {n}, but the model has {len(layers)} layers with parameters: "
            f"{_names_of(model, layers)}. Give at most {len(layers)}."
        )
    modules = [module for layer in layers[len(layers) - n :] for module in layer.values()]
    wanted = {id(p) for module in modules for p in module.parameters(recurse=False)}
    named = parameters_of(model).items()
    return [name for name, p in named if id(p) in wanted and p.requires_grad]


def _layers_of(model: nn.Module) -> list[dict[str, nn.Module]]:
    """Return the modules of every layer by name."""
    layers: list[dict[str, nn.Module]] = []
    # A module used twice counts twice, as it does in the state_dict.
    for name, module in model.named_modules(remove_duplicate=False):
        if next(module.parameters(recurse=False), None) is None:
            continue
        if layers and isinstance(module, _NORMALISATIONS):
            layers[-1][name] = module
        else:
            layers.append({name: module})
    return layers


def _names_of(model: nn.Module, layers: Sequence[Mapping[str, nn.Module]]) -> str:
    return ", ".join(next(iter(layer)) or type(model).__name__ for layer in layers)


def _layers(model: nn.Module, n: int) -> list[dict[str, nn.Module]]:
    """Return the modules of every layer, once `n` is known to leave some on each side."""
    layers = _layers_of(model)
    if not 1 <= n < len(layers):
        raise ValueError(
            f"n is {n}, expected 1 or more and fewer than the {len(layers)} layers of the model, a "
            f"{type(model).__name__}, that have parameters ({_names_of(model, layers)}). FedADMM "
            "shares a whole model."
        )
    return layers


def _pattern_of(model: nn.Module, layers: Sequence[Mapping[str, nn.Module]]) -> str:
    # Only what stands directly in a module: its submodules are layers in their own right.
    prefixes = (re.escape(f"{name}.") if name else "" for layer in layers for name in layer)
    return _with_buffers(model, f"^(?:{'|'.join(prefixes)})[^.]+$")


def _with_buffers(model: nn.Module, pattern: str) -> str:
    """Add to a pattern the buffers that it does not find; refuse to cut a tied parameter in two."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    personal = {id(p): name for name, p in parameters.items() if re.search(pattern, name)}
    for name, parameter in parameters.items():
        if id(parameter) in personal and not re.search(pattern, name):
            raise ValueError(
                f"'{personal[id(parameter)]}' would be personal and '{name}' shared, but they are "
                "one parameter under two names. Make both personal or both shared."
            )
    buffers = [n for n in model.state_dict() if n not in parameters and not re.search(pattern, n)]
    return "|".join([pattern, *(f"^{re.escape(name)}$" for name in buffers)])
