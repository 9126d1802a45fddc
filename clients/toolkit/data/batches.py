"""The forms that a loader's batches and a model's answers come in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Loader = Iterable[Any]
SplitBatch = Callable[[Any], tuple[Any, Any]]

TARGETS = ("labels", "label", "targets", "target", "y")
"""What the targets of a batch that is a dict are called, one of these."""


def split_batch(batch: Any) -> tuple[Any, Tensor]:
    """Split a batch into inputs and targets.

    Parameters
    ----------
    batch : pair, or mapping of str to Tensor
        (inputs, targets), as `torch.utils.data.TensorDataset`'s is; or a dict, as Hugging Face's
        and flwr-datasets' are: the targets are under one of `TARGETS`, all other tensors are
        inputs.

    Returns
    -------
    inputs : Tensor, or dict of str to Tensor where there are several
    targets : Tensor

    Raises
    ------
    TypeError
        If it has another form.
    """
    if isinstance(batch, tuple | list | Sequence) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Mapping):
        inputs = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
        found = [key for key in TARGETS if key in inputs]
        if len(found) == 1 and len(inputs) > 1:
            targets = inputs.pop(found[0])
            return (next(iter(inputs.values())) if len(inputs) == 1 else inputs), targets
        form = f"a dict of {', '.join(map(str, batch))}"
    else:
        form = type(batch).__name__
    raise TypeError(
        f"The loader yields {form}, expected pairs (inputs, targets), or a dict of tensors, one "
        f"of them called {' or '.join(TARGETS)}. For batches of another form give split_batch, "
        "e.g. split_batch=lambda batch: (batch['img'], batch['fine_label'])."
    )


def split_for(loss_fn: object) -> Callable[[Any], tuple[Any, Any]]:
    """Return how batches are split by default; without a `loss_fn` the model returns its loss."""
    return whole_batch if loss_fn is None else split_batch


def whole_batch(batch: Any) -> tuple[Any, Tensor | None]:
    """Return all of a batch as inputs, for a model that returns its loss, and its targets if any.

    Of a dict those entries that are tensors.
    """
    if isinstance(batch, Mapping):
        inputs = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
        return inputs, next((inputs[key] for key in TARGETS if key in inputs), None)
    if isinstance(batch, Sequence):
        return tuple(batch), batch[-1] if len(batch) > 1 else None
    return batch, None


def to_device(values: Any, device: torch.device) -> Any:
    """Return tensors, alone or in dicts, lists and tuples, on a device."""
    return map_tensors(lambda tensor: tensor.to(device), values)


def map_tensors(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Return what a function makes of tensors, alone or in dicts, lists and tuples."""
    if isinstance(values, Tensor):
        return function(values)
    if isinstance(values, Mapping):
        return {key: map_tensors(function, value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        made = [map_tensors(function, value) for value in values]
        return tuple(made) if isinstance(values, tuple) else made
    return values


def size_of(values: Any) -> int:
    """Return the number of samples in the tensors of a batch."""
    if isinstance(values, Mapping):
        return size_of(next(iter(values.values())))
    if isinstance(values, tuple):
        return size_of(values[0])
    return len(values)


def answer_of(model: nn.Module, inputs: Any) -> Any:
    """Call a model: a dict gives its keyword arguments, a tuple its positional ones.

    Raises
    ------
    TypeError
        If the model does not take them.
    """
    named = dict(inputs) if isinstance(inputs, Mapping) else {}
    plain = () if named else inputs if isinstance(inputs, tuple) else (inputs,)
    try:
        return model(*plain, **named)
    except TypeError as error:
        try:
            inspect.signature(model.forward).bind(*plain, **named)
        except TypeError:
            parts = ", ".join(named) or f"{len(plain)} parts"
            raise TypeError(
                f"The model does not take a batch's {parts} ({error}). Without a "
                "loss_fn it gets whole batches and returns its loss: give the client a "
                "loss_fn(outputs, targets), or a split_batch that leaves what the model takes."
            ) from None
        raise


def outputs_of(answer: Any) -> Any:
    """Return the ``logits`` of a model's answer, where it has some, else the answer."""
    if isinstance(answer, Mapping) and "logits" in answer:
        return answer["logits"]
    return getattr(answer, "logits", answer)


def loss_of(answer: Any) -> Tensor:
    """Return the loss that a model has computed itself.

    Parameters
    ----------
    answer : Any
        The loss, or an object with it as ``.loss`` or ``["loss"]``, or a tuple that begins with it.

    Raises
    ------
    TypeError
        If it is none of these.
    """
    loss = answer
    if isinstance(answer, Mapping):
        loss = answer.get("loss")
    elif isinstance(answer, tuple):
        loss = answer[0]
    elif not isinstance(answer, Tensor):
        loss = getattr(answer, "loss", None)
    if isinstance(loss, Tensor) and loss.ndim == 0:
        return loss
    what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
    raise TypeError(
        f"The model's answer ({type(answer).__name__}) has {what} for its loss, expected one "
        "number. Give the client a loss_fn(outputs, targets), or have the model return its loss."
    )
