"""What stands around a strategy in its users' projects, and which method goes with what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
        Of the table in docs/composition.md.
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

SERVER, CLIENT, LOCAL = "wrapper, server side", "wrapper, client side", "`LocalDpMod`"
OTHER, ADOPTED = "sizes, your own mods", "another model back"
COLUMNS = [SERVER, CLIENT, LOCAL, OTHER, ADOPTED]
"""Of the table in docs/composition.md."""

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


@dataclass(frozen=True)
class Row:
    """A row of the table in docs/composition.md.

    Attributes
    ----------
    methods : str
        What stands in the first column.
    cases : list of str
    refused : dict of str to str
        By column, the note that says why; what is not there works.
    """

    methods: str
    cases: list[str]
    refused: dict[str, str] = field(default_factory=dict)


CLIPPED = (SERVER, CLIENT, LOCAL)


def never(note: str, *columns: str) -> dict[str, str]:
    return dict.fromkeys(columns or CLIPPED, note)


ROWS = [
    Row(
        "`FedAvg`, `FedProx`, `LocalSGD`, `PerFedAvg`, `Ditto`, `FedALA`",
        ["FedAvg", "FedProx", "LocalSGD", "PerFedAvg", "Ditto", "FedALA"],
    ),
    Row(
        "`FedADMM`, `FLAME`, `FedMCADMM`, `FedMAvg`, `PFedMe`, `PFedMeMatched`",
        [
            *(
                "FedADMM",
                "FedADMM-published",
                "FLAME",
                "FedMC-ADMM",
                "FedMC-ADMM-published",
                "FedMAvg",
            ),
            *("PFedMe", "PFedMeMatched"),
        ],
    ),
    Row(
        "`FedAPM`, `FedAlt`, `FedSim`, `LGFedAvg`, `FedRoD`, `FedCP`",
        ["FedAPM", "FedAlt", "FedSim", "LG-FedAvg", "FedRoD", "FedCP"],
        never("a", SERVER),
    ),
    Row(
        "`FPFC`, `CFL`, `LpProj`, `LpProjADMM`",
        ["FPFC", "FPFC-l1", "FPFC-head", "FPFC-auto", "CFL", "LpProj", "LpProjADMM"],
        never("b", SERVER, CLIENT, ADOPTED),
    ),
    Row(
        "`FPFC` with a `LambdaPath`",
        ["FPFC-path"],
        never("b", SERVER, CLIENT, ADOPTED),
    ),
    Row("`Local`", ["Local"], never("b", SERVER, CLIENT, ADOPTED)),
    Row("`IFCA`", ["IFCA"], never("e") | never("b", ADOPTED)),
    Row(
        '`PACFL`, `FedMCADMM(rows="rated")`',
        ["PACFL", "FedMC-ADMM-rated", "FedMC-ADMM-exact-rated"],
        never("c") | never("b", ADOPTED),
    ),
    Row(
        '`FedDyn`, `SCAFFOLD`, every `duals="client"`',
        [
            *("FedDyn", "SCAFFOLD", "FedADMM-client-duals", "FedADMM-published-client-duals"),
            *("FedAPM-client-duals", "FLAME-client-duals", "FedMC-ADMM-client-duals"),
            *("FedMC-ADMM-implicit-client-duals",),
        ],
        never("f"),
    ),
    Row(
        "`FedALS`",
        ["FedALS", "FedALS-implicit"],
        never("f", SERVER, CLIENT, LOCAL),
    ),
    Row("`FedEASE`", ["FedEASE"], never("g") | never("b", ADOPTED)),
    Row("`FedGiA`, `FedMGS`", ["FedGiA", "FedGiA-gram", "FedMGS"], never("g")),
]
"""The table in docs/composition.md, which the contract tests check."""


def row_of(case: Case) -> Row:
    return next(row for row in ROWS if case.name in row.cases)


def as_table() -> list[str]:
    """Return the lines of the table."""
    head = ["method", *COLUMNS]
    cells = [[row.methods, *(row.refused.get(c, "yes") for c in COLUMNS)] for row in ROWS]
    lines = [head, ["---"] * len(head), *cells]
    return [f"| {' | '.join(line)} |" for line in lines]
