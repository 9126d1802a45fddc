"""Where FPFC's penalty comes from: the interface of a penalty source, and the fixed penalty.

`FPFC` is one algorithm. A penalty of the user's, a search for groups (`search.GroupSearch`) and a
path of lambdas (`path.PathProgress`) differ in what they answer as a `PenaltySource`: what clients
are asked, which upload is expected, what happens after a round, the penalty, nu and the clusters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...maths.blocks import Arrays, Spec, any_length, check_saved, spec_of
from ...maths.clienttable import ByClient, ClientTable, Row
from ...maths.pairs import PairwiseStore
from ...maths.penalties import Penalty, SmoothedSCAD, penalty_from_text, penalty_to_text
from ...runtime.common.settings import as_text
from ...runtime.members.membership import Membership
from ...runtime.messages.records import ClientInstruction, Reply

Replies = Mapping[int, Reply]
Rows = list[int]
Matrix = NDArray[Any]

DEFAULT_NU = 0.1
"""nu with a penalty of the user's: between xi and 0.5, which the paper calls satisfactory."""


NO_FUSION = SmoothedSCAD(0.0)


@dataclass
class Task:
    """What one client is asked for in a round: what differs between the sources of a penalty.

    Attributes
    ----------
    anchor : ndarray of shape (d,)
        The point that (5) pulls towards, or the first model to train or to measure.
    start : ndarray of shape (d,) or None
        Where the client starts, unless it surely holds that; None: at the anchor.
    rho : float
        The pull towards the anchor.
    epochs_factor : int
        How many times its usual local epochs it trains; 0: it only measures.
    settings : dict
        Further fields of its `FPFCInstruction`.
    """

    anchor: NDArray[Any]
    start: NDArray[Any] | None
    rho: float
    epochs_factor: int = 1
    settings: dict[str, Any] = field(default_factory=dict)


class HoldOut(NamedTuple):
    """Which of their samples clients hold out: a share, by seeds that stay the same."""

    share: float
    seeds: Callable[[Sequence[int]], Mapping[int, int]]

    def settings(self, clients: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Return by client the fields of an `FPFCInstruction` that say so."""
        seeds = self.seeds(clients)
        return {c: {"held_out": self.share, "held_out_seed": seeds[c]} for c in clients}


class RoundStart(NamedTuple):
    """What a source knows before a round of training.

    Attributes
    ----------
    sampled, connected : sequence of int
        The clients that were drawn; the clients of the run that are there.
    members : Membership
    state : FPFCState
    lr : float
        alpha of the round.
    round : int
        The round that begins.
    rounds_left : float
        How many there are with this one; infinity where nobody knows, 0 where replies are taken in
        as they come.
    """

    sampled: Sequence[int]
    connected: Sequence[int]
    members: Membership
    state: FPFCState
    lr: float
    round: int
    rounds_left: float


@dataclass
class FPFCState:
    """The server's variables.

    Attributes
    ----------
    source : PenaltySource
        Where the penalty comes from, and what that needs to know from round to round.
    pairs : PairwiseStore
        The client models omega, shape (m, d), and theta_ij, v_ij of every pair.
    averaged_arrays : Arrays
        phi, the arrays that are averaged and not clustered, by name.
    clients : ClientTable
        Rows ``num_examples``: n_i as last reported, 0 before a client's first upload; ``buffers``,
        where the model has some (see `OwnBuffers`); and the columns of the source.
    """

    source: PenaltySource
    pairs: PairwiseStore
    averaged_arrays: Arrays
    clients: ClientTable

    @property
    def mean(self) -> NDArray[Any]:
        """The mean of the omega_i of all clients that count, shape (d,)."""
        omega, ids = self.pairs.omega, self.clients.ids
        rows = [row for row, client in enumerate(ids) if client not in self.source.outside]
        mean: NDArray[Any] = (omega[rows] if 0 < len(rows) < len(ids) else omega).mean(axis=0)
        return mean


class PenaltySource(ByClient):
    """Where the penalty of a run comes from; here the defaults, which are FPFC's own rounds.

    Parameters
    ----------
    given : Penalty, LambdaPath or "auto"
        What the run was given.
    nu : float or None
        The user's threshold of clusters.

    Attributes
    ----------
    replacement : Penalty or None
        What was set in the course of the run in the place of `given`.
    offset : int
        The rounds before the one from which step sizes and local epochs are counted.
    columns : dict
        What the source keeps of every client, with what it starts from; see `ClientTable`.
    """

    self_checked: ClassVar[bool] = True
    outside: Collection[int] = ()
    """Clients of the run that count nowhere yet: not in pairs, clusters and means."""

    def __init__(self, given: Any, nu: float | None) -> None:
        self.given = given
        self.replacement: Penalty | None = None
        self.offset = 0
        self.columns: dict[str, ArrayLike] = {}
        self._nu = nu

    # ------------------------------------------------------------------------------------------
    # The penalty and the clusters
    # ------------------------------------------------------------------------------------------

    @property
    def found_penalty(self) -> Penalty:
        """The penalty that the source has come to."""
        raise NotImplementedError

    @property
    def penalty(self) -> Penalty:
        """The penalty of the next update."""
        return self.found_penalty if self.replacement is None else self.replacement

    @property
    def lam_inside(self) -> float:
        """The lambda by which a cluster is held together."""
        return self.penalty.lam

    @property
    def nu(self) -> float:
        """The threshold of the clusters."""
        return DEFAULT_NU if self._nu is None else self._nu

    @property
    def is_searching(self) -> bool:
        """Whether the penalty that the run is to end with is not known yet."""
        return False

    @property
    def waits_for_all(self) -> bool:
        """Whether a round is over only when all that were asked have replied, in AsyncFPFC too."""
        return self.is_searching

    def too_short(self, last_round: int) -> str:
        """Return what to tell the user of a run that ends while `is_searching`."""
        return ""

    def replace(self, penalty: Penalty, rho: float) -> None:
        """Set the penalty between two rounds.

        Raises
        ------
        TypeError, ValueError
            If it cannot be saved, does not go with rho, or the run is still finding its own.
        """
        penalty_to_text(penalty)  # raises where it cannot be saved
        penalty.check(rho)
        if self.is_searching:
            raise ValueError(
                f"penalty is set to {penalty!r}, but this run finds its lambda itself: the "
                f"constructor got {self.given!r}. Give it the penalty instead."
            )
        self.replacement = penalty

    def labels(self, state: FPFCState, nu: float | None = None) -> NDArray[np.int64]:
        """Return the cluster of every client, by default at this source's nu."""
        return state.pairs.clusters(self.nu if nu is None else nu)

    def examples(self, clients: ClientTable) -> NDArray[np.float64]:
        """Return how much every client counts in its cluster's model."""
        return clients.column("num_examples")

    def report(self, clients: ClientTable) -> dict[str, Any]:
        """Return what the source found, as fields of `FPFCDiagnostics`."""
        return {}

    # ------------------------------------------------------------------------------------------
    # A round
    # ------------------------------------------------------------------------------------------

    def handshake_instructions(self, client_ids: Sequence[int]) -> dict[int, ClientInstruction]:
        """Return what clients are asked before their first round."""
        return {}

    def tasks(self, start: RoundStart) -> dict[int, Task]:
        """Return what clients are asked for in a round: by default the sampled ones for (5)."""
        return fusion_tasks(start)

    def holds_omega(self, client: int, last_accepted: int) -> bool:
        """Return whether what a client uploaded in its last accepted round is still its omega_i."""
        return True

    def upload_spec(self) -> Spec | None:
        """Return what an upload of this round holds; None: the client's model, which is omega_i."""
        return None

    def take_models(self, state: FPFCState, rows: Rows, omega: Matrix) -> None:
        """Take in the new omega_i of a round, by default (6) and (A.3) of their pairs."""
        state.pairs.penalty = self.penalty
        state.pairs.update(rows, omega)

    def after_round(self, server_round: int, state: FPFCState, replies: Replies) -> None:
        """Take in the replies of a round; models among them are in `state` already."""

    # ------------------------------------------------------------------------------------------
    # Clients that come and go; saving
    # ------------------------------------------------------------------------------------------

    def insert(self, rows: Mapping[int, Row]) -> None:
        """Nothing: the rows of new clients are in the table."""

    def add_pending(self, rows: Mapping[int, Row]) -> None:
        """Nothing, likewise."""

    def remove(self, clients: Iterable[int], server_round: int = 0) -> None:
        """Forget clients."""

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the variables as plain arrays: what was given, what was set since, as text."""
        replacement = "" if self.replacement is None else penalty_to_text(self.replacement)
        texts = {"given": as_text(self.given) or "", "replacement": replacement}
        return {name: np.frombuffer(text.encode(), np.uint8) for name, text in texts.items()}

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned.

        A penalty that was set counts only in a run that was given the same as the saved one:
        another one was given on purpose.

        Raises
        ------
        ValueError
            If an array is missing or damaged, or was saved with another kind of source.
        """
        expected = PenaltySource.state_arrays(self)
        check_saved(arrays, any_length(spec_of(expected)))
        self.replacement = None
        if np.array_equal(arrays["given"], expected["given"]) and arrays["replacement"].size:
            text = arrays["replacement"].tobytes().decode(errors="replace")
            self.replacement = penalty_from_text(text)


class FixedPenalty(PenaltySource):
    """A penalty of the user's: FPFC as in the paper."""

    @property
    def found_penalty(self) -> Penalty:
        """What was given."""
        penalty: Penalty = self.given
        return penalty

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """See `PenaltySource`; a state of a run that found its lambda itself is refused."""
        if more := sorted(arrays.keys() - self.state_arrays().keys()):
            raise ValueError(
                f"The saved penalty has {more}: the saved run found its lambda itself. Continue "
                "with the `penalty` that it was given."
            )
        super().load_state_arrays(arrays)


def fusion_tasks(start: RoundStart) -> dict[int, Task]:
    """Ask the sampled clients for T_i epochs of (5), from omega_i.

    A client that is joining the run trains the mean of all models on its own, without a pull
    (section 6.4.2).
    """
    pairs, members = start.state.pairs, start.members
    mean = pairs.omega.mean(axis=0)
    tasks = {client: Task(mean, mean, 0.0) for client in start.sampled}
    rows = {client: members.row(client) for client in start.sampled if client in members}
    for (client, row), zeta in zip(rows.items(), pairs.zeta(list(rows.values())), strict=True):
        tasks[client] = Task(zeta, pairs.omega[row], pairs.rho)
    return tasks


def scad(lam: float) -> SmoothedSCAD:
    """Return the penalty of a lambda; the paper's a and xi, or less where xi is not below."""
    return replace(NO_FUSION, lam=lam, xi=min(NO_FUSION.xi, lam / 10) if lam else NO_FUSION.xi)
