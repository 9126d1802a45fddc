"""The models of the experiments, by name, their losses and reproducible initial weights.

Names of layers are what ``clustered`` and ``personal`` patterns refer to. Pooling stands before the
ReLU, where the papers have it after: the largest of several numbers and the ReLU can be exchanged,
with the same outputs and gradients bit for bit, and the ReLU then sees a quarter of the numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from clients.toolkit.models.personalization import SplitInput

from ..data import FederatedData
from ..settings.imported import imported
from ..settings.wording import unknown

Scheme = Literal["pytorch", "normal"]


def _named(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


class _LinearRegression(nn.Linear):
    """Linear regression with intercept: (n, features) to (n,), the shape of the labels."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze(-1)


# Shapes of input that the convolutional models take; the fully connected ones flatten any.
_SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "cnn": ((1, 28, 28),),
    "cnn-cifar": ((3, 32, 32),),
    "har": ((9, 128), (6, 128)),
}


def _convolutions(*layers: nn.Conv2d) -> dict[str, nn.Module]:
    """Return conv1, pool1, relu1, conv2, ...: each convolution with a pooling of 2 and a ReLU."""
    parts: dict[str, nn.Module] = {}
    for k, layer in enumerate(layers, start=1):
        parts |= {f"conv{k}": layer, f"pool{k}": nn.MaxPool2d(2), f"relu{k}": nn.ReLU()}
    return parts


def _softmax(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Linear(shape[0], classes)


def _linear(shape: tuple[int, ...], classes: int) -> nn.Module:
    return _LinearRegression(shape[0], 1)


def _cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two convolutions and a linear head, as FPFC's authors' (docs/methods/fpfc-notes.md, P12).

    2572 parameters in front of the head (156 + 2416), 4010 in the head, which is the block that
    FPFC clusters.
    """
    return _named(
        **_convolutions(nn.Conv2d(1, 6, kernel_size=5, padding=2), nn.Conv2d(6, 16, kernel_size=5)),
        flatten=nn.Flatten(),
        head=nn.Linear(16 * 5 * 5, classes),
    )


def _mlr(shape: tuple[int, ...], classes: int) -> nn.Module:
    return _named(flatten=nn.Flatten(), fc=nn.Linear(prod(shape), classes))


def _mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Hidden layers of 128 and 64 units, as in the FLAME authors' code: 109,386 parameters.

    See docs/methods/flame-notes.md, P12. Table II prints 7,850 parameters for MNIST: 'mlr'.
    """
    return _named(
        flatten=nn.Flatten(),
        fc1=nn.Linear(prod(shape), 128),
        relu1=nn.ReLU(),
        fc2=nn.Linear(128, 64),
        relu2=nn.ReLU(),
        fc3=nn.Linear(64, classes),
    )


def _cnn_cifar(shape: tuple[int, ...], classes: int) -> nn.Module:
    """FedAPM's (B.2) and FLAME's CNN for CIFAR-10: conv 5,088 parameters, fc 263,562.

    FedAPM shares conv1 and conv2; ``personal = "^fc"``. Its text puts a ReLU on fc2 too; these are
    logits (docs/methods/fedapm-notes.md, P14).
    """
    return _named(
        **_convolutions(
            nn.Conv2d(3, 16, kernel_size=3, padding=1), nn.Conv2d(16, 32, kernel_size=3, padding=1)
        ),
        flatten=nn.Flatten(),
        fc1=nn.Linear(32 * 8 * 8, 128),
        relu3=nn.ReLU(),
        fc2=nn.Linear(128, classes),
    )


def _accelerometer_and_gyroscope(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the three channels of each sensor.

    Of UCI HAR's nine channels (body acceleration, gyroscope, total acceleration) the accelerometer
    is the total acceleration, which is what the sensor measured: body acceleration was filtered out
    of it. Of six channels the accelerometer is the first three, as in KU-HAR.
    """
    accelerometer = x[:, 6:9] if x.shape[1] == 9 else x[:, 0:3]
    return accelerometer, x[:, 3:6]


def _sensor_convolutions() -> nn.Module:
    """Three convolutions over time, (n, 3, t) to (n, 128, t / 8): 51,904 parameters."""
    layers: dict[str, nn.Module] = {}
    for number, (inputs, outputs) in enumerate([(3, 32), (32, 64), (64, 128)], start=1):
        layers[f"conv{number}"] = nn.Conv1d(inputs, outputs, kernel_size=5, padding=2)
        layers[f"pool{number}"] = nn.MaxPool1d(2)
        layers[f"relu{number}"] = nn.ReLU()
        layers[f"dropout{number}"] = nn.Dropout(0.1)
    return _named(**layers)


class _HARUpperLayers(nn.Module):
    """A GRU for each sensor, attention over the time steps of both, and the classifier."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.gru_accelerometer = nn.GRU(128, 128, batch_first=True)
        self.gru_gyroscope = nn.GRU(128, 128, batch_first=True)
        self.attention = nn.Sequential(nn.Linear(128, 512), nn.Tanh(), nn.Linear(512, 6))
        self.classifier = nn.Sequential(
            nn.Linear(6 * 128, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, classes)
        )

    def forward(self, features: Tensor) -> Tensor:
        accelerometer, gyroscope = features.transpose(1, 2).chunk(2, dim=2)  # (n, t, 128) each
        steps = torch.cat(
            [self.gru_accelerometer(accelerometer)[0], self.gru_gyroscope(gyroscope)[0]], dim=1
        )
        weights = self.attention(steps).softmax(dim=1)  # (n, 2 t, 6): six heads, each over time
        pooled = weights.transpose(1, 2) @ steps  # (n, 6, 128)
        logits: Tensor = self.classifier(pooled.flatten(1))
        return logits


def _har(shape: tuple[int, ...], classes: int) -> nn.Module:
    """FedAPM's HARClassifier, with what FedMultimodal's has (docs/methods/fedapm-notes.md, P14).

    420,814 parameters with 8 classes. The accelerometer's convolutions are personal, 51,904:
    ``personal = "^personal[.]"``. The authors' code makes the gyroscope's personal as well:
    ``"^(personal|shared)[.]"``, 103,808.
    """
    return SplitInput(
        personal=_sensor_convolutions(),
        shared=_sensor_convolutions(),
        upper=_HARUpperLayers(classes),
        split=_accelerometer_and_gyroscope,
    )


MODELS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "softmax": _softmax,
    "linear": _linear,
    "cnn": _cnn,
    "mlr": _mlr,
    "mlp": _mlp,
    "cnn-cifar": _cnn_cifar,
    "har": _har,
}
"""Of the shape of one input and the number of classes."""


class _HalfSquaredError(nn.MSELoss):
    """(1/2) mean (y - x'w)^2, whose gradient FPFC's appendix D uses.

    The appendix prints f without the half (docs/methods/fpfc-notes.md, P11); the choice scales
    lambda by 2.
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002
        return 0.5 * super().forward(input, target)


def loss_of(task: str) -> nn.Module:
    """Return the loss of a task, the mean over a batch: half the squared error or cross-entropy."""
    return _HalfSquaredError() if task == "regression" else nn.CrossEntropyLoss()


def build(name: str, data: FederatedData) -> nn.Module:
    """Build a model that fits a data set, on the CPU.

    Its weights are whatever PyTorch draws; use `initialise` for reproducible ones. The global
    random numbers stay where they were.

    Parameters
    ----------
    name : str
        A key of `MODELS`:

        - 'softmax', 'mlr': softmax regression (logits) of vectors, and of inputs of any shape;
        - 'linear': linear regression of vectors;
        - 'mlp': two hidden layers, inputs of any shape;
        - 'cnn', 'cnn-cifar': images; FPFC clusters ``head`` of 'cnn';
        - 'har': windows of an accelerometer and a gyroscope.
    data : FederatedData
        Gives the shapes.

    Raises
    ------
    ValueError
        If there is no such model, or it does not fit the data set.
    """
    if name not in MODELS:
        raise unknown("model", name, [*MODELS, "yourmodule:function"])
    if name not in (fitting := list(filter(partial(_fits, data), MODELS))):
        wanted = " or ".join(map(str, _SHAPES.get(name, ["(features,)"])))
        raise ValueError(
            f"Model {name!r} does not fit data set {data.name}: {data.task} of inputs of shape "
            f"{data.input_shape}, expected of {wanted}. Use {' or '.join(map(repr, fitting))}."
        )
    with torch.random.fork_rng(devices=[]):
        return MODELS[name](data.input_shape, data.num_classes or 1)


def _fits(data: FederatedData, name: str) -> bool:
    vectors_only, shape = name in ("softmax", "linear"), data.input_shape
    return (
        (name == "linear") == (data.task == "regression")
        and shape in _SHAPES.get(name, [shape])
        and (len(shape) == 1 or not vectors_only)
    )


def build_own(name: str, data: FederatedData, seed: int) -> nn.Module:
    """Return a model of the user's own, ``module:function``, with the initial weights of a seed.

    Raises
    ------
    ValueError
        If ``function(data)`` returns no model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = imported("model", name)(data)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} returned a {type(model).__name__}, expected a torch.nn.Module.")
    return model


def initialise(model: nn.Module, seed: int, scheme: Scheme = "pytorch") -> nn.Module:
    """Overwrite a CPU model's weights with those of a seed, and return the model.

    The global random numbers stay where they were.

    Parameters
    ----------
    model : torch.nn.Module
        The model, changed in place.
    seed : int
        Same seed, same weights.
    scheme : {'pytorch', 'normal'}
        PyTorch's default, or every weight and bias ~ N(0, 1), as the FPFC authors start the
        softmax model (docs/methods/fpfc-notes.md, S4).
    """
    # Not torch.manual_seed: it would set the accelerators' generators too, which are not forked.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        if scheme == "normal":
            for parameter in model.parameters():
                parameter.normal_()
        else:
            for module in model.modules():
                if (reset := getattr(module, "reset_parameters", None)) is not None:
                    reset()
    return model
