"""What stands around a strategy in its users' projects, and which method goes with what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.clientapp.mod import (
    LocalDpMod,
    adaptiveclipping_mod,
    arrays_size_mod,
    fixedclipping_mod,
    message_size_mod,
)
from flwr.serverapp import strategy as flowers

from clients import client_app
from fl_admm_strategies import StatefulStrategy
from tests.support.cases import NUM_CLIENTS, Case
from tests.support.federation import WatchedGrid, client_fn_of

CLIP, NOISE = 0.1, 0.1
LOCAL_DP = {"clipping_norm": CLIP, "sensitivity": 1e-4, "epsilon": 1.0, "delta": 1e-2}


def nothing(strategy: Any) -> Any:
    return strategy


def own_mod(message: Any, context: Any, call_next: Any) -> Any:
    """A mod of a user's own, which notes something and changes nothing."""
    reply = call_next(message, context)
    if reply.content.metric_records:
        next(iter(reply.content.metric_records.values()))["from-a-mod"] = 1.0
    return reply


@dataclass(frozen=True)
class Companion:
    """Something around a strategy or its clients.

    Attributes
    ----------
    name : str
    column : str
        What it is: one of the names below.
    wrap : callable
    mods : sequence
    per_node : int
        Clients on a node.
    """

    name: str
    column: str
    wrap: Callable[[Any], Any] = nothing
    mods: Sequence[Any] = ()
    per_node: int = 1

    def run(self, case: Case, strategy: StatefulStrategy, num_rounds: int = 2) -> Any:
        """Run a strategy in this company; return what the outermost strategy returned."""
        client_fn, mods = client_fn_of(case.client_class), list(self.mods)
        total = None if self.per_node == 1 else NUM_CLIENTS
        app = client_app(client_fn, num_clients=total, mods=mods)
        grid = WatchedGrid(app, NUM_CLIENTS // self.per_node)
        return self.wrap(strategy).start(grid, case.initial_arrays(), num_rounds)


def wrapped_by(wrapper: type[Any], noise: float = NOISE) -> Callable[[Any], Any]:
    """Return what puts a strategy into one of Flower's privacy wrappers."""
    bound = [CLIP] if "Fixed" in wrapper.__name__ else []  # the adaptive ones find theirs
    return lambda strategy: wrapper(strategy, noise, *bound, NUM_CLIENTS)


SERVER_SIDE = flowers.DifferentialPrivacyServerSideFixedClipping
CLIENT_SIDE = flowers.DifferentialPrivacyClientSideFixedClipping
ADAPTIVE_SERVER_SIDE = flowers.DifferentialPrivacyServerSideAdaptiveClipping
ADAPTIVE_CLIENT_SIDE = flowers.DifferentialPrivacyClientSideAdaptiveClipping

SERVER, CLIENT, LOCAL, OTHER = "server's wrapper", "clients' wrapper", "LocalDpMod", "sizes"

COMPANIONS = [
    Companion("server-side", SERVER, wrapped_by(SERVER_SIDE)),
    Companion("adaptive-server-side", SERVER, wrapped_by(ADAPTIVE_SERVER_SIDE)),
    Companion("client-side", CLIENT, wrapped_by(CLIENT_SIDE), [fixedclipping_mod]),
    Companion(
        "client-side-packed", CLIENT, wrapped_by(CLIENT_SIDE), [fixedclipping_mod], per_node=3
    ),
    Companion(
        "adaptive-client-side", CLIENT, wrapped_by(ADAPTIVE_CLIENT_SIDE), [adaptiveclipping_mod]
    ),
    Companion("local", LOCAL, mods=[LocalDpMod(**LOCAL_DP)]),
    Companion("local-packed", LOCAL, mods=[LocalDpMod(**LOCAL_DP)], per_node=3),
    Companion("other", OTHER, mods=[message_size_mod, arrays_size_mod, own_mod]),
    Companion("other-packed", OTHER, mods=[message_size_mod, own_mod], per_node=3),
]


KINDS: dict[str, list[str]] = {
    "mean": [
        *("FedAvg", "FedProx", "LocalSGD", "PerFedAvg", "Ditto", "FedALA", "PFedMe"),
        *("FedAlt", "FedSim", "LG-FedAvg", "FedRoD", "FedCP", "FedMAvg", "LpProj", "FedEASE"),
    ],
    "sum": [
        *("FedDyn", "SCAFFOLD", "FedADMM-client-duals", "FedAPM-client-duals"),
        *("FLAME-client-duals", "FedMC-ADMM-client-duals"),
    ],
    "own copy": [
        *("FedADMM", "FedADMM-published", "FLAME", "FedAPM", "LpProjADMM", "PFedMeMatched"),
        *("FedMC-ADMM", "FedMC-ADMM-published", "CFL", "Local"),
        *("FPFC", "FPFC-head", "FPFC-auto", "FPFC-path"),
    ],
    "statistic": [
        *("IFCA", "PACFL", "FedALS", "FedGiA", "FedGiA-gram", "FedMGS", "FedMC-ADMM-rated"),
    ],
}
"""What an upload is, by case."""
NO_MODEL = {"FedMAvg", "LpProj", "FedEASE"}
"""Means that are no model of all clients."""
PARTS = {"FedAlt", "FedSim", "LG-FedAvg", "FedRoD", "FedCP"}
"""Those that upload a part of the model."""


def kind_of(case: Case) -> str:
    (kind,) = (kind for kind, names in KINDS.items() if case.name in names)
    return kind


def goes(case: Case, what: str) -> bool:
    """Return whether a case works in such company."""
    kind = kind_of(case)
    if what == LOCAL:
        return kind in ("mean", "own copy") and case.name != "FedEASE"  # it is sent no arrays
    if what in (SERVER, CLIENT):
        parts = what == SERVER and case.name in PARTS
        return kind == "mean" and case.name not in NO_MODEL and not parts
    return True
