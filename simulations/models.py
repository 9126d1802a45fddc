"""The models of the experiments, by name, and their reproducible initial weights."""

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from simulations.data import FederatedData
from simulations.data.registry import unknown


class _LinearRegression(nn.Linear):
    """Linear regression with intercept: (n, features) to (n,), the shape of the labels."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze(-1)


def _num_classes(model: str, data: FederatedData) -> int:
    if data.num_classes is None:
        raise ValueError(
            f"model {model!r} classifies, data set {data.name} is one of regression: use 'linear'"
        )
    return data.num_classes


def _num_features(model: str, data: FederatedData) -> int:
    if len(data.input_shape) != 1:
        raise ValueError(
            f"model {model!r} takes vectors, inputs of {data.name} have shape {data.input_shape}: "
            "use 'cnn'"
        )
    return data.input_shape[0]


def _softmax(data: FederatedData) -> nn.Module:
    return nn.Linear(_num_features("softmax", data), _num_classes("softmax", data))


def _linear(data: FederatedData) -> nn.Module:
    if data.task != "regression":
        raise ValueError(
            f"model 'linear' is for regression, data set {data.name} is one of {data.task}: "
            "use 'softmax' or 'cnn'"
        )
    return _LinearRegression(_num_features("linear", data), 1)


def _cnn(data: FederatedData) -> nn.Module:
    """Two convolutions and a linear head, as in the FPFC authors' code (spec §4.1).

    2572 parameters in front of the head (156 + 2416), 4010 in the head, which is the block that
    FPFC clusters.
    """
    classes = _num_classes("cnn", data)
    if data.input_shape != (1, 28, 28):
        raise ValueError(
            f"model 'cnn' takes images of shape (1, 28, 28), inputs of {data.name} have shape "
            f"{data.input_shape}: use 'softmax'"
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(1, 6, kernel_size=5, padding=2),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 16, kernel_size=5),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        head=nn.Linear(16 * 5 * 5, classes),
    )
    return nn.Sequential(layers)


MODELS: dict[str, Callable[[FederatedData], nn.Module]] = {
    "softmax": _softmax,
    "linear": _linear,
    "cnn": _cnn,
}


def build(name: str, data: FederatedData) -> nn.Module:
    """Build a model that fits a data set, on the CPU.

    Its weights are whatever PyTorch draws; use `initialise` for reproducible ones. The global
    random numbers stay where they were.

    Parameters
    ----------
    name : {'softmax', 'linear', 'cnn'}
        Softmax regression (logits), linear regression, or the CNN, whose last layer is ``head``.
    data : FederatedData
        Gives the shapes.

    Raises
    ------
    ValueError
        If there is no such model, or it does not fit the data set.
    """
    if name not in MODELS:
        raise unknown("model", name, list(MODELS))
    with torch.random.fork_rng(devices=[]):
        return MODELS[name](data)


def _pytorch(model: nn.Module) -> None:
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()


def _normal(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()


SCHEMES: dict[str, Callable[[nn.Module], None]] = {"pytorch": _pytorch, "normal": _normal}


def initialise(model: nn.Module, seed: int, scheme: str = "pytorch") -> nn.Module:
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
        softmax model (spec §2.1).

    Raises
    ------
    ValueError
        If there is no such scheme.
    """
    if scheme not in SCHEMES:
        raise unknown("initialisation scheme", scheme, list(SCHEMES))
    # Not torch.manual_seed: it would set the accelerators' generators too, which are not forked.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        SCHEMES[scheme](model)
    return model
