"""The client half of every method: one `NumPyClient` each, over the solvers they share.

A name is imported when it is first used, so that clients that need NumPy only never load PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .methods.clustered import CFLClient, IFCAClient, PACFLClient
    from .methods.ditto import DittoClient
    from .methods.fedadmm import FedADMMClient
    from .methods.fedala import FedALAClient
    from .methods.fedalt import FedAltClient
    from .methods.fedapm import FedAPMClient
    from .methods.fedcp import FedCPClient
    from .methods.fedgia import FedGiALinearClient
    from .methods.fedgia_torch import FedGiAClient
    from .methods.fedmavg import FedMAvgClient
    from .methods.fedmc_admm import FedMCADMMClient
    from .methods.fedmgs import FedMGSClient
    from .methods.fedprox import FedProxClient
    from .methods.fedrod import FedRoDClient
    from .methods.fedsim import FedSimClient
    from .methods.flame import FLAMEClient
    from .methods.fpfc import FPFCClient
    from .methods.lg_fedavg import LGFedAvgClient
    from .methods.local import LocalClient
    from .methods.localsgd import LocalSGDClient
    from .methods.localsgd_linear import LocalSGDLinearClient
    from .methods.lp_proj import LpProjADMMClient, LpProjClient
    from .methods.perfedavg import PerFedAvgClient
    from .methods.pfedme import PFedMeClient, PFedMeMatchedClient
    from .methods.sgd import SGDClient
    from .toolkit.data.minibatches import Minibatches
    from .toolkit.data.ratings import Ratings
    from .toolkit.models.arrays import ModelArrays, initial_arrays
    from .toolkit.models.heads import RoutedHeads, TwoHeaded
    from .toolkit.models.personalization import SplitInput, input_layers, output_layers, split_input
    from .toolkit.round.after import losses_of, personalise, state_dict
    from .toolkit.round.app import answer, client_app
    from .toolkit.round.attacks import Attack, AttackingClient, attacked_app, attacked_client_fn
    from .toolkit.round.base import MethodClient
    from .toolkit.round.torch_client import MeanMetric, TorchClient, accuracy, rmse
    from .toolkit.solving.curvature import LeastSquares, Logistic
    from .toolkit.solving.objective import LocalObjective

__all__ = [
    "Attack",
    "AttackingClient",
    "CFLClient",
    "DittoClient",
    "FLAMEClient",
    "FPFCClient",
    "FedADMMClient",
    "FedALAClient",
    "FedAPMClient",
    "FedAltClient",
    "FedCPClient",
    "FedGiAClient",
    "FedGiALinearClient",
    "FedMAvgClient",
    "FedMCADMMClient",
    "FedMGSClient",
    "FedProxClient",
    "FedRoDClient",
    "FedSimClient",
    "IFCAClient",
    "LGFedAvgClient",
    "LeastSquares",
    "LocalClient",
    "LocalObjective",
    "LocalSGDClient",
    "LocalSGDLinearClient",
    "Logistic",
    "LpProjADMMClient",
    "LpProjClient",
    "MeanMetric",
    "MethodClient",
    "Minibatches",
    "ModelArrays",
    "PACFLClient",
    "PFedMeClient",
    "PFedMeMatchedClient",
    "PerFedAvgClient",
    "Ratings",
    "RoutedHeads",
    "SGDClient",
    "SplitInput",
    "TorchClient",
    "TwoHeaded",
    "accuracy",
    "answer",
    "attacked_app",
    "attacked_client_fn",
    "client_app",
    "initial_arrays",
    "input_layers",
    "losses_of",
    "output_layers",
    "personalise",
    "rmse",
    "split_input",
    "state_dict",
]

_HOME = {
    ".methods.clustered": ("CFLClient", "IFCAClient", "PACFLClient"),
    ".methods.ditto": ("DittoClient",),
    ".methods.fedadmm": ("FedADMMClient",),
    ".methods.fedala": ("FedALAClient",),
    ".methods.fedalt": ("FedAltClient",),
    ".methods.fedapm": ("FedAPMClient",),
    ".methods.fedcp": ("FedCPClient",),
    ".methods.fedgia": ("FedGiALinearClient",),
    ".methods.fedgia_torch": ("FedGiAClient",),
    ".methods.fedmavg": ("FedMAvgClient",),
    ".methods.fedmc_admm": ("FedMCADMMClient",),
    ".methods.fedmgs": ("FedMGSClient",),
    ".methods.fedprox": ("FedProxClient",),
    ".methods.fedrod": ("FedRoDClient",),
    ".methods.fedsim": ("FedSimClient",),
    ".methods.flame": ("FLAMEClient",),
    ".methods.fpfc": ("FPFCClient",),
    ".methods.lg_fedavg": ("LGFedAvgClient",),
    ".methods.local": ("LocalClient",),
    ".methods.localsgd": ("LocalSGDClient",),
    ".methods.localsgd_linear": ("LocalSGDLinearClient",),
    ".methods.lp_proj": ("LpProjADMMClient", "LpProjClient"),
    ".methods.perfedavg": ("PerFedAvgClient",),
    ".methods.pfedme": ("PFedMeClient", "PFedMeMatchedClient"),
    ".methods.sgd": ("SGDClient",),
    ".toolkit.round.after": (
        "losses_of",
        "personalise",
        "state_dict",
    ),
    ".toolkit.round.app": (
        "answer",
        "client_app",
    ),
    ".toolkit.round.attacks": ("Attack", "AttackingClient", "attacked_app", "attacked_client_fn"),
    ".toolkit.round.base": ("MethodClient",),
    ".toolkit.solving.curvature": (
        "LeastSquares",
        "Logistic",
    ),
    ".toolkit.models.heads": ("RoutedHeads", "TwoHeaded"),
    ".toolkit.data.minibatches": ("Minibatches",),
    ".toolkit.models.arrays": (
        "ModelArrays",
        "initial_arrays",
    ),
    ".toolkit.solving.objective": ("LocalObjective",),
    ".toolkit.models.personalization": (
        "SplitInput",
        "input_layers",
        "output_layers",
        "split_input",
    ),
    ".toolkit.data.ratings": ("Ratings",),
    ".toolkit.round.torch_client": (
        "MeanMetric",
        "TorchClient",
        "accuracy",
        "rmse",
    ),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return _imported(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _imported(module: str, name: str) -> Any:
    try:
        found = getattr(import_module(module, __name__), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"{name} needs PyTorch, which is not installed. Install it with "
            "pip install 'fl-admm-strategies[torch]'.",
            name="torch",
        ) from None
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
