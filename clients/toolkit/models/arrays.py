"""A PyTorch model as named arrays: what of its ``state_dict`` travels, and how it comes back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.maths.checks import listing
from fl_admm_strategies.runtime.messages.records import owned, room_for
from fl_admm_strategies.runtime.trust import layout
from fl_admm_strategies.runtime.trust.layout import BUFFER, FROZEN, TRAINED, wrapper_of

with warnings.catch_warnings():  # PyTorch says once in a process that one may be read-only
    warnings.simplefilter("ignore")
    torch.from_numpy(np.broadcast_to(0.0, 1))

_HALVES = (torch.float16, torch.bfloat16)
_Place = tuple[str, dict[str, Any], str]  # a name, and what holds its tensor under which key


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
        state = model.state_dict()
        self.prefix = wrapper_of(state)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        self.trained: list[str] = []
        self.buffers: list[str] = []
        self.frozen: list[str] = []
        self.tied: dict[str, str] = {}
        for full, tensor in state.items():
            name = full.removeprefix(self.prefix)
            if (parameter := parameters.get(full)) is None:
                if isinstance(tensor, Tensor):  # extra state may be anything
                    self.buffers.append(name)
            elif (known := first.setdefault(id(parameter), name)) != name:
                self.tied[name] = known
            else:
                (self.trained if parameter.requires_grad else self.frozen).append(name)
        kept = {*self.trained, *self.buffers}
        self.names = [n for n in (full.removeprefix(self.prefix) for full in state) if n in kept]
        self._known = {*self.names, *self.frozen, *self.tied}
        places = _places(model, "")
        held = {full: values[key].data_ptr() for full, values, key in places}
        self._places = None
        if held.keys() == state.keys() and all(held[n] == state[n].data_ptr() for n in held):
            self._places = [(f.removeprefix(self.prefix), values, k) for f, values, k in places]
            own = {*self.trained, *self.frozen}
            self._parameters = [place for place in self._places if place[0] in own]

    def _state(self) -> Mapping[str, Tensor]:
        """Return the tensors of the ``state_dict``, without the prefix of a wrapper.

        To make one takes as long as a step of a small model. Where hooks give nothing another form,
        they are what the modules hold.
        """
        if self._places is not None:
            return {name: values[key] for name, values, key in self._places}
        state = self.model.state_dict()
        return {name.removeprefix(self.prefix): tensor for name, tensor in state.items()}

    def parameters(self, names: Iterable[str] | None = None) -> dict[str, nn.Parameter]:
        """Return parameters of the model, by default all."""
        if self._places is None:
            parameters = parameters_of(self.model)
        else:
            parameters = {name: values[key] for name, values, key in self._parameters}
        return parameters if names is None else {name: parameters[name] for name in names}

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
        if not (self._known >= arrays.keys() and arrays.keys() >= set(self.names)):
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
        if self._places is None:
            whole = {self.prefix + name: to_read(array) for name, array in arrays.items()}
            self.model.load_state_dict(whole, strict=False)
            return
        with torch.no_grad():
            for name, array in arrays.items():
                state[name].copy_(to_read(array))

    def complete(self, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        """Return a whole ``state_dict`` of the model, with these arrays in it, by its own names."""
        whole = {self.prefix + n: a for n, a in self.read([*self.names, *self.frozen]).items()}
        whole |= {self.prefix + name: array for name, array in arrays.items()}
        whole |= {self.prefix + n: whole[self.prefix + first] for n, first in self.tied.items()}
        return {name: whole[name] for name in self.model.state_dict() if name in whole}

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


class Room:
    """Room for tensors like others, that are then kept or sent without being copied again.

    Attributes
    ----------
    tensors : dict of str to Tensor
        To be written; what is in them is anything.
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._packed: dict[str, Callable[[], NDArray[Any]]] = {}
        for name, tensor in like.items():
            if tensor.is_cpu:
                shape, dtype = tuple(tensor.shape), tensor.numpy().dtype
                array, self._packed[name] = room_for(shape, dtype)
                self.tensors[name] = torch.from_numpy(array)
            else:
                self.tensors[name] = torch.empty_like(tensor)

    def packed(self) -> Arrays:
        """Return them as arrays, once they are written for the last time."""
        return {
            name: self._packed[name]() if name in self._packed else to_array(tensor, to_send=True)
            for name, tensor in self.tensors.items()
        }


def to_read(array: NDArray[Any]) -> Tensor:
    """Return an array, which may be a view of a message, as a tensor of it that nobody changes."""
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
