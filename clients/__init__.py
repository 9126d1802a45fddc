"""The client half of every method: one `NumPyClient` each, over the solvers they share.

A name is imported when it is first used, so that clients that need NumPy only never load PyTorch.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The list of public names. Type checkers and IDEs read it as imports, `_HOME` reads it as text.
if TYPE_CHECKING:
    from .methods.clustered import CFLClient as CFLClient
    from .methods.clustered import IFCAClient as IFCAClient
    from .methods.clustered import PACFLClient as PACFLClient
    from .methods.ditto import DittoClient as DittoClient
    from .methods.fedadmm import FedADMMClient as FedADMMClient
    from .methods.fedala import FedALAClient as FedALAClient
    from .methods.fedals import FedALSClient as FedALSClient
    from .methods.fedalt import FedAltClient as FedAltClient
    from .methods.fedapm import FedAPMClient as FedAPMClient
    from .methods.fedcp import FedCPClient as FedCPClient
    from .methods.feddyn import FedDynClient as FedDynClient
    from .methods.fedease import FedEASEClient as FedEASEClient
    from .methods.fedgia import FedGiALinearClient as FedGiALinearClient
    from .methods.fedgia_torch import FedGiAClient as FedGiAClient
    from .methods.fedmavg import FedMAvgClient as FedMAvgClient
    from .methods.fedmc_admm import FedMCADMMClient as FedMCADMMClient
    from .methods.fedmgs import FedMGSClient as FedMGSClient
    from .methods.fedprox import FedProxClient as FedProxClient
    from .methods.fedrod import FedRoDClient as FedRoDClient
    from .methods.fedsim import FedSimClient as FedSimClient
    from .methods.flame import FLAMEClient as FLAMEClient
    from .methods.fpfc import FPFCClient as FPFCClient
    from .methods.lg_fedavg import LGFedAvgClient as LGFedAvgClient
    from .methods.local import LocalClient as LocalClient
    from .methods.localsgd import LocalSGDClient as LocalSGDClient
    from .methods.localsgd_linear import LocalSGDLinearClient as LocalSGDLinearClient
    from .methods.lp_proj import LpProjADMMClient as LpProjADMMClient
    from .methods.lp_proj import LpProjClient as LpProjClient
    from .methods.perfedavg import PerFedAvgClient as PerFedAvgClient
    from .methods.pfedme import PFedMeClient as PFedMeClient
    from .methods.pfedme import PFedMeMatchedClient as PFedMeMatchedClient
    from .methods.scaffold import SCAFFOLDClient as SCAFFOLDClient
    from .methods.sgd import FedAvgFTClient as FedAvgFTClient
    from .methods.sgd import SGDClient as SGDClient
    from .toolkit.data.minibatches import Minibatches as Minibatches
    from .toolkit.data.ranking import rank as rank
    from .toolkit.data.ratings import Ratings as Ratings
    from .toolkit.models.arrays import ModelArrays as ModelArrays
    from .toolkit.models.arrays import initial_arrays as initial_arrays
    from .toolkit.models.heads import RoutedHeads as RoutedHeads
    from .toolkit.models.heads import TwoHeaded as TwoHeaded
    from .toolkit.models.personalization import SplitInput as SplitInput
    from .toolkit.models.personalization import input_layers as input_layers
    from .toolkit.models.personalization import output_layers as output_layers
    from .toolkit.models.personalization import split_input as split_input
    from .toolkit.round.after import losses_of as losses_of
    from .toolkit.round.after import personalise as personalise
    from .toolkit.round.after import state_dict as state_dict
    from .toolkit.round.app import answer as answer
    from .toolkit.round.app import client_app as client_app
    from .toolkit.round.base import MethodClient as MethodClient
    from .toolkit.round.mirror import MirrorClient as MirrorClient
    from .toolkit.round.torch_client import MeanMetric as MeanMetric
    from .toolkit.round.torch_client import TorchClient as TorchClient
    from .toolkit.round.torch_client import rmse as rmse
    from .toolkit.solving.cohort import accuracy as accuracy
    from .toolkit.solving.curvature import LeastSquares as LeastSquares
    from .toolkit.solving.curvature import Logistic as Logistic
    from .toolkit.solving.objective import LocalObjective as LocalObjective
    from .toolkit.solving.recommender import FactorRecommender as FactorRecommender

_HOME = {
    name.name: f".{line.module}"
    for block in ast.parse(Path(__file__).read_text(encoding="utf-8")).body
    if isinstance(block, ast.If)
    for line in block.body
    if isinstance(line, ast.ImportFrom)
    for name in line.names
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(import_module(_HOME[name], __name__), name)
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
