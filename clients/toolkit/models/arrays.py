"""A PyTorch model as named arrays: what of its ``state_dict`` travels, and how it comes back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.maths.checks import listing
from fl_admm_strategies.runtime.messages.records import packed
from fl_admm_strategies.runtime.trust import layout
from fl_admm_strategies.runtime.trust.layout import BUFFER, FROZEN, TRAINED, wrapper_of

_HALVES = (torch.float16, torch.bfloat16)
_LARGE = 2**16  # bytes that are copied once


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

    def parameters(self, names: Iterable[str]) -> dict[str, nn.Parameter]:
        """Return some of the model's parameters."""
        parameters = parameters_of(self.model)
        return {name: parameters[name] for name in names}

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
        state = self.model.state_dict()
        wanted = self.names if names is None else names
        return {name: to_array(state[self.prefix + name], to_send=to_send) for name in wanted}

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put arrays into the model, cast to its dtypes.

        Frozen parameters and second names may be among them.

        Raises
        ------
        ValueError
            If one that travels is missing, one is not the model's, or shapes differ.
        """
        state = self.model.state_dict()
        known = {*self.names, *self.frozen, *self.tied}
        if not set(self.names) <= arrays.keys() <= known:
            raise ValueError(
                f"The server sent a model of {len(arrays)} arrays ({', '.join(arrays)}), the "
                f"client's has {len(self.names)} ({', '.join(self.names)}). Use one model "
                "definition on both sides, with the same parameters frozen."
            )
        for name, array in arrays.items():
            if (shape := tuple(state[self.prefix + name].shape)) != array.shape:
                raise ValueError(
                    f"The server sent '{name}' of shape {array.shape}, the client's model "
                    f"has {shape}. Use one model definition on both sides."
                )
        parameters = parameters_of(self.model)
        others: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, array in arrays.items():
                own, kept = parameters.get(name), state[self.prefix + name]
                if own is not None and own.data_ptr() == kept.data_ptr():
                    own.copy_(to_read(array))
                else:  # a buffer, a second name, or what the module's hooks give another form
                    others[self.prefix + name] = to_read(array)
        if others:
            self.model.load_state_dict(others, strict=False)

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
    named: dict[str, nn.Parameter] = {}
    _collect(model, "", named, set())
    if prefix := wrapper_of(named):
        named = {name.removeprefix(prefix): parameter for name, parameter in named.items()}
    return named


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module and its parts."""
    held = [*module._parameters.values(), *module._buffers.values()]
    found = [tensor for tensor in held if tensor is not None]
    for part in module._modules.values():
        if part is not None:
            found += tensors_of(part)
    return found


def _collect(
    module: nn.Module, prefix: str, named: dict[str, nn.Parameter], seen: set[int]
) -> None:
    """Do what ``dict(module.named_parameters())`` does, in less time."""
    for name, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in seen:
            seen.add(id(parameter))
            named[prefix + name] = parameter
    for name, part in module._modules.items():
        if part is not None:
            _collect(part, f"{prefix}{name}.", named, seen)


def to_array(tensor: Tensor, *, to_send: bool = False) -> NDArray[Any]:
    """Return a tensor as a numpy array of its own, as it travels: half precision as float32."""
    array: NDArray[Any] = in_full(tensor.detach()).cpu().numpy()
    return packed(array) if to_send and array.nbytes >= _LARGE else array.copy()


def to_read(array: NDArray[Any]) -> Tensor:
    """Return an array, which may be a view of a message, as a tensor of it that nobody changes."""
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Unlocked(array)))


class _Unlocked:
    """An array that is read-only, as one that is not: PyTorch has no tensors of the former."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array  # which lives as long as what is made of this
        place, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (place, False)}


def in_full(tensor: Tensor) -> Tensor:
    """Return a tensor with half precision as float32."""
    return tensor.float() if tensor.dtype in _HALVES else tensor


def initial_arrays(model: nn.Module) -> ArrayRecord:
    """Return a model's ``state_dict`` for ``strategy.start``.

    It is ``ArrayRecord(model.state_dict())``, which Flower cannot make of bfloat16: numpy has none.
    """
    arrays = {n: np.asarray(to_array(t)) for n, t in model.state_dict().items()}
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})
