"""Where FPFC's penalty comes from: the interface of a penalty source, with a given penalty.

`FPFC` is one algorithm. A penalty of the user's, a search for groups (`search.GroupSearch`) and a
path of lambdas (`path.PathProgress`) differ in what they answer as a `PenaltySource`: the messages,
the uploads that are expected, what happens after a round, the penalty, nu and the clusters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...maths.blocks import Arrays, Block, Pattern, Spec
from ...maths.checks import Count, Fraction, Positive
from ...maths.clienttable import ClientTable
from ...maths.pairs import PairwiseStore
from ...maths.penalties import Penalty, Rescaled, SmoothedSCAD
from ...maths.schedules import EpochSchedule, StepSize, epochs_in, rate_in
from ...runtime.messages.records import Reply
from ...runtime.strategy import StatefulStrategy
from ..shared.base import OwnBuffers
from ..shared.stepsum import pull_by
from .messages import AnyMessage, FPFCInstruction, FPFCRule

Replies = Mapping[int, Reply]
Messages = Mapping[int, AnyMessage]
Vector = NDArray[Any]

DEFAULT_NU = 0.1
"""nu with a penalty of the user's: between xi and 0.5, which the paper calls satisfactory."""

NO_FUSION = SmoothedSCAD(0.0)


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
        Rows ``num_examples``: n_i as last reported, 0 before a client's first upload; ``moved_in``,
        the last round that set omega_i to something else than the client's upload of a model; and
        ``buffers``, where the model has some (see `OwnBuffers`).
    """

    source: PenaltySource
    pairs: PairwiseStore
    averaged_arrays: Arrays
    clients: ClientTable

    @property
    def mean(self) -> Vector:
        """The mean of the omega_i of all clients that count, shape (d,)."""
        omega, ids = self.pairs.omega, self.clients.ids
        rows = [row for row, client in enumerate(ids) if client not in self.source.outside]
        mean: Vector = (omega[rows] if 0 < len(rows) < len(ids) else omega).mean(axis=0)
        return mean


class FusionStrategy(StatefulStrategy):
    """The settings of `FPFC`, and what its stages need of it."""

    rule: ClassVar = FPFCRule
    own: ClassVar = ""

    state: FPFCState = field(init=False)
    block: Block = field(init=False)  # omega_i; `init_state` sets it
    buffers: OwnBuffers = field(init=False)
    seeks_step_sum: bool = field(init=False)  # whether rho follows from S, which clients report

    rho: Positive | None = None
    lr: StepSize = 0.1
    local_epochs: EpochSchedule = 10
    clustered: Pattern | None = None
    nu: Positive | None = None
    consensus_rounds: Count = 20
    validation_share: Fraction = 0.2

    def hold_out(self, client_ids: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Return by client the fields of a message that say which samples it holds out."""
        seeds = self.run.sampling.client_seeds(client_ids, 0)
        share = self.validation_share
        return {c: {"held_out": share, "held_out_seed": seeds[c]} for c in client_ids}

    def start_of(self, client: int) -> Arrays | None:
        """Return omega_i where a client may not hold it, else None.

        The paper's clients keep omega_i. A client that has not taken part yet has only seen omega^0
        in the paper's initial broadcast. The server may have moved omega_i since a client's upload.
        """
        members, moved_in = self.membership, self.state.clients[client].moved_in
        if members.has_current_state(client) and members.last_accepted[client] > moved_in:
            return None
        return {"omega": self.state.pairs.omega[members.row(client)]}

    def personal(self, vector: NDArray[Any], client: int) -> Arrays:
        """Return omega_i as a whole model, with the client's buffers."""
        return self.buffers.into(self.whole(vector), self.state.clients[client])

    def whole(self, vector: NDArray[Any]) -> Arrays:
        """Return a clustered block as a whole model, with the averaged arrays."""
        return self.block.model(vector, self.state.averaged_arrays)


class Round:
    """A round of training that begins, and the messages of it.

    Parameters
    ----------
    fpfc : FusionStrategy
    number : int
    sampled : sequence of int
        The clients that were drawn.

    Attributes
    ----------
    connected : list of int
        The clients of the run that are there.
    lr : float
        alpha of the round.
    rounds_left : float
        How many rounds there are with this one; infinity where that is unknown, 0 where replies are
        taken in one by one.
    """

    def __init__(self, fpfc: FusionStrategy, number: int, sampled: Sequence[int]) -> None:
        self.fpfc, self.number, self.sampled = fpfc, number, sampled
        members = fpfc.membership
        self.connected = [c for c in members.ids if members.last_seen[c] >= number]
        end = np.inf if fpfc.run.num_rounds is None else fpfc.run.num_rounds
        self.rounds_left = end - number + 1 if fpfc.in_rounds else 0
        self.lr = rate_in(number, fpfc.lr)

    def message(
        self,
        kind: type[AnyMessage],
        client: int,
        model: Vector,
        epochs_factor: int = 1,
        **fields: Any,
    ) -> AnyMessage:
        """Return a message with a client's model and the settings of the round."""
        return kind(
            model=self.fpfc.personal(model, client),
            lr=self.lr,
            local_epochs=epochs_factor * epochs_in(self.number, client, self.fpfc.local_epochs),
            optimised=self.fpfc.block.names,
            **fields,
        )

    def alone(
        self,
        client: int,
        model: Vector,
        kind: type[FPFCInstruction] = FPFCInstruction,
        epochs_factor: int = 1,
        **fields: Any,
    ) -> AnyMessage:
        """Return the message to train from a model without a pull."""
        return self.message(kind, client, model, epochs_factor, start={}, rule=_rule(0.0), **fields)

    def zeta(self, clients: Sequence[int]) -> dict[int, Vector]:
        """Return zeta_i of those clients that belong to the run."""
        members = self.fpfc.membership
        known = [client for client in clients if client in members]
        vectors = self.fpfc.state.pairs.zeta([members.row(client) for client in known])
        return dict(zip(known, vectors, strict=True))

    def fusion(
        self,
        clients: Sequence[int],
        zeta: Mapping[int, Vector],
        kind: type[FPFCInstruction] = FPFCInstruction,
        fields: Mapping[int, Mapping[str, Any]] | None = None,
        rho: Mapping[int, float] | None = None,
    ) -> Messages:
        """Return the messages for (5), from omega_i.

        A client without a zeta_i, such as one that is joining the run, trains the mean of all
        models on its own, without a pull (section 6.4.2).

        Parameters
        ----------
        clients : sequence of int
        zeta : mapping of int to ndarray of shape (d,)
        kind : type
        fields : mapping of int to mapping, optional
            Further fields by client.
        rho : mapping of int to float, optional
            The pull of each client; by default rho.
        """
        fpfc, messages = self.fpfc, {}
        mean, rho_of_all = fpfc.state.mean, fpfc.state.pairs.rho
        wanted = fpfc.seeks_step_sum and math.isnan(fpfc.state.source.found.step_sum)
        for client in clients:
            more = dict(fields[client]) if fields else {}
            if client in zeta:
                pull = rho_of_all if rho is None else rho[client]
                more |= {"start": fpfc.start_of(client), "rule": _rule(pull)}
                more["wants_step_sum"] = wanted
                messages[client] = self.message(kind, client, zeta[client], **more)
            else:
                messages[client] = self.alone(client, mean, kind, **more)
        return messages


def _rule(rho: float) -> str:
    return FPFCRule(True, float(rho)).text()


@dataclass
class Variables:
    """Base of the dataclasses with what a source keeps: numbers, arrays, and what is by client.

    Attributes
    ----------
    step_sum : float
        S, the sum of the step sizes of a client's round; NaN until it is known, or not sought.
    """

    step_sum: float = field(default=math.nan, kw_only=True)

    def remove(self, clients: Collection[int]) -> None:
        """Forget clients."""
        for name, value in vars(self).items():
            if isinstance(value, dict):
                kept = {client: row for client, row in value.items() if client not in clients}
                setattr(self, name, kept)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the variables as plain arrays; those by client are two, ids and rows."""
        found: dict[str, NDArray[Any]] = {}
        for name, value in vars(self).items():
            if isinstance(value, dict):
                found[f"{name}/ids"] = np.array(list(value), np.uint64)
                found[f"{name}/rows"] = np.array(list(value.values()))
            else:
                found[name] = np.asarray(value)
        return found

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `arrays` returned."""
        for name, value in vars(self).items():
            if isinstance(value, dict):
                ids, rows = arrays[f"{name}/ids"].tolist(), np.array(arrays[f"{name}/rows"])
                setattr(self, name, dict(zip(ids, rows, strict=True)))
            elif isinstance(value, np.ndarray):
                setattr(self, name, np.array(arrays[name]))
            else:
                setattr(self, name, type(value)(arrays[name]))


class PenaltySource:
    """Where the penalty of a run comes from; here the user's, for FPFC as in the paper.

    Parameters
    ----------
    fpfc : FusionStrategy
        The strategy, whose state and settings a source reads.
    penalty : Penalty
        That of the next update, where it does not change in the run.

    Attributes
    ----------
    found : Variables
        What the source keeps from round to round.
    """

    self_checked: ClassVar[bool] = True
    outside: Collection[int] = ()
    """Clients of the run that count nowhere yet: not in pairs, clusters and means."""
    is_searching: bool = False
    """Whether the penalty that the run is to end with is not known yet."""
    stage_text: str = ""
    """What the last round was for, where that is not to train by this penalty."""

    def __init__(self, fpfc: FusionStrategy, penalty: Penalty = NO_FUSION) -> None:
        self.fpfc, self._penalty = fpfc, penalty
        self.found: Any = Variables()

    @property
    def state(self) -> FPFCState:
        """The state of the run."""
        return self.fpfc.state

    @property
    def penalty(self) -> Penalty:
        """The penalty of the next update."""
        return self.in_unit(self._penalty)

    def in_unit(self, penalty: Penalty) -> Penalty:
        """Return a penalty of the user's, of distances in the unit in which rho is 1.

        A rho of the user's leaves it as it is.
        """
        rho, follows = self.state.pairs.rho, self.fpfc.seeks_step_sum
        return Rescaled(penalty, rho**-0.5) if follows else penalty

    @property
    def lam_inside(self) -> float:
        """The lambda by which a cluster is held together."""
        return self.penalty.lam

    @property
    def nu(self) -> float:
        """The threshold of the clusters."""
        if self.fpfc.nu is not None:
            return self.fpfc.nu
        flat_from = getattr(self.penalty, "flat_from", None) if self.fpfc.seeks_step_sum else None
        return DEFAULT_NU if flat_from is None else flat_from / 2

    @property
    def waits_for_all(self) -> bool:
        """Whether a round is over only when all sampled clients have replied, also if async."""
        return self.is_searching

    def labels(self, nu: float | None = None) -> NDArray[np.int64]:
        """Return the cluster of every client, by default at this source's nu."""
        return self.state.pairs.clusters(self.nu if nu is None else nu)

    def examples(self) -> NDArray[np.float64]:
        """Return how much every client counts in its cluster's model."""
        return self.state.clients.column("num_examples")

    def report(self) -> dict[str, Any]:
        """Return what the source found, as fields of `FPFCDiagnostics`."""
        return {}

    def messages(self, now: Round) -> Messages:
        """Return the messages of a round: by default (5) for the sampled clients."""
        return now.fusion(now.sampled, now.zeta(now.sampled))

    def upload_spec(self) -> Spec | None:
        """Return the arrays of an upload of this round; None: the client's model, with omega_i."""
        return None

    def take_models(self, rows: list[int], omega: Vector) -> NDArray[np.intp]:
        """Take in the new omega_i of a round, by default (6) and (A.3) of their pairs.

        Return the rows of clients whose omega_i is not what they uploaded last.
        """
        self.state.pairs.penalty = self.penalty
        return self.state.pairs.update(rows, omega)

    def after_round(self, server_round: int, replies: Replies) -> None:
        """Take in the replies of a round; models among them are in the state already."""

    def remove(self, clients: Collection[int]) -> None:
        """Forget clients."""
        self.found.remove(clients)

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the variables as plain arrays."""
        arrays: dict[str, NDArray[Any]] = self.found.arrays()
        return arrays

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned.

        Raises
        ------
        ValueError
            If the arrays were saved with another kind of source.
        """
        if different := sorted(arrays.keys() ^ self.state_arrays().keys()):
            raise ValueError(
                f"The saved penalty and this run's differ in {different}. Continue with the "
                "`penalty` of the saved run."
            )
        self.found.load(arrays)
        if self.fpfc.seeks_step_sum:
            self.state.pairs.rho = pull_by(self.found.step_sum)


def scad(lam: float) -> SmoothedSCAD:
    """Return the penalty of a lambda; the paper's a and xi, or less where xi is not below."""
    return replace(NO_FUSION, lam=lam, xi=min(NO_FUSION.xi, lam / 10) if lam else NO_FUSION.xi)
