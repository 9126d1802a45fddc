"""What an upload is to its method's server, and what may happen to it on its way.

Clipping, noise, half precision, a robust rule and a simulated attack change an upload's change:
what it is more than what the client was sent. No method's file names them. A method declares the
kind of its upload, and one table says what goes with which kind (docs/composition.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from .messages.records import Reply

UploadKind = Literal["mean", "sum", "own copy", "statistic"]
Alteration = Literal[
    "clipping", "noise at the server", "noise at the clients", "mods", "wrappers", "another model"
]

GOES_WITH: dict[Alteration, tuple[UploadKind, ...]] = {
    "clipping": ("mean", "own copy"),
    "noise at the server": ("mean", "sum"),
    "noise at the clients": ("mean", "own copy"),
    "mods": ("mean",),
    "wrappers": ("mean",),
    "another model": ("mean",),
}
"""By what may change an upload, or what the server makes of it, the kinds that it goes with."""

_BECAUSE: dict[UploadKind, str] = {
    "mean": "",
    "sum": "its clients go on from what they sent, and the server has the sum of their variables "
    "(where there is the setting, duals='strategy' has every client's)",
    "own copy": "its server keeps or compares the clients' uploads one by one",
    "statistic": "its clients send statistics of their data, which must arrive as they are",
}


@dataclass(frozen=True)
class Upload:
    """What an upload is to its method's server.

    Attributes
    ----------
    kind : {"mean", "sum", "own copy", "statistic"}
        "mean": what the server gives out follows from the means, or sums, of the rounds' uploads.
        "sum": the same, of changes of variables that the clients keep; a client goes on from what
        it sent. "own copy": the server keeps or compares uploads one by one. "statistic": a label,
        a count or a matrix, which has to arrive as it was computed.
    stateless : bool
        Whether an upload depends on nothing but the client's data and what the client was sent in
        that round. Then `privacy` counts that the server alone knows who was sampled.
    """

    kind: UploadKind = "own copy"
    stateless: bool = False

    def goes_with(self, what: Alteration) -> bool:
        """Return whether such an upload may be changed so."""
        return self.kind in GOES_WITH[what]

    def because(self) -> str:
        """Return why something does not go with it, as a part of a sentence."""
        return f"{_BECAUSE[self.kind]} (docs/composition.md)"


class Altered(NamedTuple):
    """The replies of a round after something has happened to their uploads.

    Attributes
    ----------
    replies : dict of int to Reply
        With ``altered`` set where the client has to be told its variables.
    refused : dict of int to str
        Why the replies of other clients are not used.
    """

    replies: dict[int, Reply]
    refused: dict[int, str]


class OnTheWay(Protocol):
    """What happens to the uploads of a round at the server."""

    def apply(self, server_round: int, replies: dict[int, Reply]) -> Altered:
        """Return replies with other uploads."""
