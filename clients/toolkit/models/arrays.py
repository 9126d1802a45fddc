"""A PyTorch model as named arrays: what of its ``state_dict`` travels, and how it comes back."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.maths.checks import listing
from fl_admm_strategies.runtime.messages.records import owned
from fl_admm_strategies.runtime.trust import layout
from fl_admm_strategies.runtime.trust.layout import BUFFER, FROZEN, TRAINED, wrapper_of

with warnings.catch_warnings():  # PyTorch says once in a process that one may be read-only
    warnings.simplefilter("ignore")
    torch.from_numpy(np.broadcast_to(0.0, 1))

_HALVES = (torch.float16, torch.bfloat16)
_Place = tuple[str, dict[str, Any], str]
"""A name, and the dict that holds its tensor, under which key."""


class ModelArrays:
    """What of a model travels: the parameters that it trains, each once, and its buffers.

    A parameter is trained if it has ``requires_grad`` when this object is made; one that is used
    under several names goes by the first. Frozen parameters do not travel. Names are those of the
    ``state_dict`` without the prefix of a wrapper (``module.`` of `DataParallel`). Half precision
    travels as float32.

    Parameters
    ----------
    model : nn.Module

    Attributes
    ----------
    names : list of str
        What travels, in the order of the ``state_dict``.
    trained, buffers, frozen : list of str
        Trained parameters, persistent buffers, frozen parameters.
    tied : dict of str to str
        Second names, and the first name of the parameter.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        places = _places(model, "")
        self.prefix = wrapper_of({name: values[key] for name, values, key in places})
        self._places = {n.removeprefix(self.prefix): (values, key) for n, values, key in places}
        first: dict[int, str] = {}
        self.trained: list[str] = []
        self.buffers: list[str] = []
        self.frozen: list[str] = []
        self.tied: dict[str, str] = {}
        for name, tensor in self._state().items():
            if not isinstance(tensor, nn.Parameter):
                self.buffers.append(name)
            elif (known := first.setdefault(id(tensor), name)) != name:
                self.tied[name] = known
            else:
                (self.trained if tensor.requires_grad else self.frozen).append(name)
        kept = {*self.trained, *self.buffers}
        self.names = [name for name in self._places if name in kept]
        self._own = [name for name in self._places if name in first.values()]

    def _state(self) -> dict[str, Tensor]:
        """Return the tensors of the ``state_dict``, without the prefix of a wrapper.

        To make one takes as long as a step of a small model: these are what the modules hold.
        """
        return {name: values[key] for name, (values, key) in self._places.items()}

    def parameters(self, names: Iterable[str] | None = None) -> dict[str, nn.Parameter]:
        """Return parameters of the model, by default all."""
        found = {}
        for name in self._own if names is None else names:
            values, key = self._places[name]
            found[name] = values[key]
        return found

    def gradients(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the ``.grad`` of parameters; zeros where the loss does not reach one."""
        return {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in self.parameters(names).items()
        }

    def read(self, names: Collection[str] | None = None, *, to_send: bool = False) -> Arrays:
        """Return copies of arrays of the model as they travel; by default of all that do.

        Large ones are read-only with `to_send`, and not copied again on their way.
        """
        state = self._state()
        wanted = self.names if names is None else names
        return {name: to_array(state[name], to_send=to_send) for name in wanted}

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put arrays into the model, cast to its dtypes.

        Frozen parameters and second names may be among them.

        Raises
        ------
        ValueError
            If one that travels is missing, one is not the model's, or shapes differ.
        """
        state = self._state()
        if not (state.keys() >= arrays.keys() >= set(self.names)):
            raise ValueError(
                f"The server sent a model of {len(arrays)} arrays ({', '.join(arrays)}), the "
                f"client's has {len(self.names)} ({', '.join(self.names)}). Use one model "
                "definition on both sides, with the same parameters frozen."
            )
        for name, array in arrays.items():
            if (shape := state[name].shape) != array.shape:
                raise ValueError(
                    f"The server sent '{name}' of shape {array.shape}, the client's model "
                    f"has {tuple(shape)}. Use one model definition on both sides."
                )
        with torch.no_grad():
            for name, array in arrays.items():
                state[name].copy_(to_read(array))

    def complete(self, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        """Return a whole ``state_dict`` of the model, with these arrays in it, by its own names."""
        whole = {**self.read([*self.names, *self.frozen]), **arrays}
        whole |= {name: whole[first] for name, first in self.tied.items()}
        return {self.prefix + name: whole[name] for name in self._places}

    def answer(self, names: Sequence[str]) -> Arrays:
        """Return what a server wants to know of its initial arrays; see `runtime.layout`.

        Raises
        ------
        ValueError
            If the model trains something, or has a buffer, that is not among them.
        """
        if missing := [name for name in self.names if name not in names]:
            raise ValueError(
                f"The initial arrays lack {listing(missing)} of the clients' model. Start with "
                "ArrayRecord(model.state_dict())."
            )
        roles = dict.fromkeys(self.trained, TRAINED) | dict.fromkeys(self.buffers, BUFFER)
        roles |= dict.fromkeys(self.frozen, FROZEN)
        places = {name: place for place, name in enumerate(names)}
        roles |= {name: places[first] for name, first in self.tied.items() if first in places}
        sums = {name: self._checksum(name) for name in self.frozen if name in places}
        return layout.answer(names, roles, sums)

    def _checksum(self, name: str) -> int:
        try:
            return layout.checksum(self.read([name])[name])
        except (TypeError, RuntimeError, NotImplementedError):  # a quantised tensor
            return 0


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters, each by its first name and without the prefix of a wrapper."""
    named = dict(model.named_parameters())
    prefix = wrapper_of(named)
    return {name.removeprefix(prefix): parameter for name, parameter in named.items()}


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module and its parts."""
    held = [*module._parameters.values(), *module._buffers.values()]
    found = [tensor for tensor in held if tensor is not None]
    for part in module._modules.values():
        if part is not None:
            found += tensors_of(part)
    return found


def _places(module: nn.Module, prefix: str) -> list[_Place]:
    """Return where a module and its parts hold what is in their ``state_dict``."""
    found: list[_Place] = [
        (prefix + key, module._parameters, key)
        for key, parameter in module._parameters.items()
        if parameter is not None
    ]
    found += [
        (prefix + key, module._buffers, key)
        for key, buffer in module._buffers.items()
        if buffer is not None and key not in module._non_persistent_buffers_set
    ]
    for name, part in module._modules.items():
        if part is not None:
            found += _places(part, f"{prefix}{name}.")
    return found


def to_array(tensor: Tensor, *, to_send: bool = False) -> NDArray[Any]:
    """Return a tensor as a numpy array of its own, as it travels: half precision as float32."""
    array: NDArray[Any] = in_full(tensor.detach()).cpu().numpy()
    return owned(array) if to_send else array.copy()


def to_read(array: NDArray[Any]) -> Tensor:
    """Return an array, which may be a view of a message, as a tensor of it, not to be changed."""
    return torch.from_numpy(array)


def in_full(tensor: Tensor) -> Tensor:
    """Return a tensor with half precision as float32."""
    return tensor.float() if tensor.dtype in _HALVES else tensor


def initial_arrays(model: nn.Module) -> ArrayRecord:
    """Return a model's ``state_dict`` for ``strategy.start``.

    It is ``ArrayRecord(model.state_dict())``, which Flower cannot make of bfloat16: numpy has none.
    """
    arrays = {n: np.asarray(to_array(t)) for n, t in model.state_dict().items()}
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})
