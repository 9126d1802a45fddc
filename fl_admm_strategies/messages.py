"""The messages of all methods, for clients of one's own: what each is sent, field by field.

docs/messages.md has their tables.
"""

from .algorithms.ditto import DittoInstruction as DittoInstruction
from .algorithms.fedala import FedALAEvaluation as FedALAEvaluation
from .algorithms.fedala import FedALAInstruction as FedALAInstruction
from .algorithms.fedals import FedALSInstruction as FedALSInstruction
from .algorithms.fedalt import FedAltInstruction as FedAltInstruction
from .algorithms.fedapm import FedAPMEvaluation as FedAPMEvaluation
from .algorithms.fedapm import FedAPMInstruction as FedAPMInstruction
from .algorithms.fedavg import FedAvgInstruction as FedAvgInstruction
from .algorithms.fedcp import FedCPInstruction as FedCPInstruction
from .algorithms.fedease import FedEASEEvaluation as FedEASEEvaluation
from .algorithms.fedease import FedEASEInstruction as FedEASEInstruction
from .algorithms.fedgia import FedGiAInstruction as FedGiAInstruction
from .algorithms.fedgia import FedGiAQuestion as FedGiAQuestion
from .algorithms.fedmavg import FedMAvgInstruction as FedMAvgInstruction
from .algorithms.fedmc_admm import FedMCInstruction as FedMCInstruction
from .algorithms.fedmgs import FedMGSInstruction as FedMGSInstruction
from .algorithms.fedprox import FedProxInstruction as FedProxInstruction
from .algorithms.fedrod import FedRoDInstruction as FedRoDInstruction
from .algorithms.fpfc.messages import FPFCInstruction as FPFCInstruction
from .algorithms.ifca import IFCAEvaluation as IFCAEvaluation
from .algorithms.ifca import IFCAInstruction as IFCAInstruction
from .algorithms.local import LocalInstruction as LocalInstruction
from .algorithms.localsgd import LocalSGDInstruction as LocalSGDInstruction
from .algorithms.lp_proj import LpProjInstruction as LpProjInstruction
from .algorithms.lp_proj_sgd import LpProjSGDInstruction as LpProjSGDInstruction
from .algorithms.pacfl import PACFLQuestion as PACFLQuestion
from .algorithms.perfedavg import PerFedAvgEvaluation as PerFedAvgEvaluation
from .algorithms.perfedavg import PerFedAvgInstruction as PerFedAvgInstruction
from .algorithms.pfedme import PFedMeInstruction as PFedMeInstruction
from .algorithms.scaffold import SCAFFOLDInstruction as SCAFFOLDInstruction
from .algorithms.shared.clustered import ClusterInstruction as ClusterInstruction
from .algorithms.shared.completion import FedMCFactors as FedMCFactors
from .algorithms.shared.consensus import ProximalInstruction as ProximalInstruction
from .algorithms.shared.models import OwnModelEvaluation as OwnModelEvaluation
from .algorithms.shared.split import SplitEvaluation as SplitEvaluation
from .algorithms.shared.split import SplitInstruction as SplitInstruction
from .runtime.algorithm import FineTuningEvaluation as FineTuningEvaluation
