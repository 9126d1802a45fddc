"""What several methods share: how much a client counts, and consensus over a model's parameters."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ...maths.blocks import Arrays, Block, average, spec_of
from ...maths.clienttable import ClientRow, ClientTable
from ...maths.clustering import cluster_models
from ...maths.consensus import Consensus
from ...runtime.algorithm import OnClient
from ...runtime.messages.records import ClientInstruction, Reply
from ...runtime.messages.schema import Instruction
from ...runtime.sampled import SampledStrategy
from ...runtime.uploads import Upload
from .models import ToldStrategy

Weights = Literal["uniform", "size"]
Duals = Literal["strategy", "client"]


@dataclass
class SummedState:
    """The global model, and the sum of the variables that the clients keep.

    `consensus` has the trained arrays as w, and the sum in `total`.
    """

    consensus: Consensus
    buffers: Arrays


def participants_mean(arrays: Arrays, replies: Mapping[int, Reply], weights: Weights) -> Arrays:
    """Return the mean of the uploads' arrays of these names, plain or weighted by examples."""
    return average(arrays, replies, mean_weights(replies, weights))


def mean_weights(replies: Mapping[int, Reply], weights: Weights) -> NDArray[np.float64]:
    """Return the weights of replies in their mean: n_i, or all alike."""
    sizes = np.array([reply.num_examples for reply in replies.values()])
    return sizes if weights == "size" else np.ones_like(sizes)


@dataclass(frozen=True)
class ConsensusInstruction(Instruction):
    """What a client gets of any method of consensus ADMM.

    `anchor` is w, or w - pi_i/rho for a client that does not know pi_i. Sent where the client may
    not hold them: `start`, which is u_i, and, to a client that starts at w, `dual`, which is pi_i
    (empty: 0).
    """

    anchor: Arrays
    start: Arrays | None
    dual: Arrays | None
    duals: str
    start_at: str
    averaging: str
    optimised: list[str]

    @property
    def averaged(self) -> Arrays:
        """The arrays that are not optimised, as they were sent."""
        return {n: array for n, array in self.anchor.items() if n not in self.optimised}

    @property
    def begins(self) -> bool:
        """Whether the message has the client's variables: those that it holds do not count."""
        return self.start is not None or self.dual is not None


class SummedMessages(SampledStrategy):
    """Base of the methods whose server has a message of every client, and their sum.

    The state has the sum as `consensus`. Here a message changes as much as the upload does.
    """

    _block: Block = field(init=False)  # what is optimised; `init_state` sets it

    @property
    def _summed(self) -> Block:
        """The arrays of an upload that a message is made of."""
        return self._block


class KeptMessages(SummedMessages):
    """Base of those whose state, `consensus` and `averaged_arrays`, says every client's message.

    Parameters
    ----------
    **base
        The parameters of `SampledStrategy`.
    """

    def _messages(self, client_ids: Sequence[int]) -> Iterable[NDArray[Any]]:
        """Return the messages of some clients, shape (k, d)."""
        raise NotImplementedError

    def add_clients(self, client_ids: Sequence[int], places: Sequence[int]) -> None:
        """Take new clients into the mean, with w_i = w and pi_i = 0."""
        self.state.consensus.join(len(client_ids))

    def remove_clients(self, client_ids: Sequence[int], rows: Sequence[int]) -> None:
        """Take their messages out of the sum."""
        gone = self._messages(client_ids)
        self.state.consensus.drop(gone, lambda: self._messages(self.client_ids))


class ConsensusForm(SummedMessages):
    """Base of the ADMM methods whose clients agree on a model: which iteration, and what is where.

    Parameters
    ----------
    published : bool (default: False)
        The paper's iteration: clients start their steps at their own copy u_i, and w is the mean of
        u_i + pi_i/rho over all clients, those that sat out included. By default it is FedDyn's
        (Acar et al., ICLR 2021): clients start at w, and w is the mean of this round's u_i plus the
        mean of all pi_i/rho. Where everybody takes part the two differ in the start alone; where
        few do, ours learns in fewer rounds (docs/methods/fedadmm-notes.md, P5).
    start_at : {"global", "own"}, optional
        Where clients start, to change that alone.
    averaging : {"participants", "all"}, optional
        Whose u_i w is made of, to change that alone.
    duals : {"strategy", "client"} (default: "strategy")
        Where the clients' variables live. "strategy": the server keeps them and a client that was
        lost can go on. "client", the papers' own placement: the clients keep them and send the
        change of their message, so that the server needs O(d) memory and never sees them. The same
        trajectory up to rounding, the same bytes. With "client" all clients start afresh from the
        global model when one has lost its state or has left: nobody can take its part out of the
        server's sum.
    **base
        The parameters of `SampledStrategy`.
    """

    symbols: ClassVar = ("u_i", "u_i", "w", "pi_i/rho")
    """What the paper calls where clients start, what w is the mean of, w, and the scaled dual."""
    default_start: ClassVar = "global"
    """`start_at` where it is not given."""

    published: bool = False
    start_at: Literal["global", "own"] | None = None
    averaging: Literal["participants", "all"] | None = None
    duals: Duals = "strategy"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, paper, default in (
            ("start_at", "own", self.default_start),
            ("averaging", "all", "participants"),
        ):
            given = getattr(self, name)
            if self.published and given not in (None, paper):
                raise ValueError(
                    f"{name} is {given!r}, expected {paper!r} with published=True, which is the "
                    f"paper's iteration. Leave out one of the two."
                )
            setattr(self, name, given or (paper if self.published else default))

    @property
    def default_norm(self) -> float | None:
        """The paper's iteration takes in every upload as it is."""
        return math.inf if self.published else None

    @property
    def is_published(self) -> bool:
        """Whether the paper's iteration runs, however it was asked for."""
        return (self.start_at, self.averaging) == ("own", "all")

    @property
    def form(self) -> str:
        """Which form runs, and what it changes against the paper."""
        first, u, w, dual = self.symbols
        start = {"own": f"their own {first}", "global": f"the global {w}"}[str(self.start_at)]
        over = {
            "all": f"the mean of {u} + {dual} over all clients",
            "participants": f"the participants' mean of {u} plus the mean of all {dual}",
        }[str(self.averaging)]
        here = f"local steps start at {start}{self._more}, and {w} is {over}"
        if self.is_published:
            return f"the paper's form: {here}."
        return f"not the paper's form (published=True is): {here}."

    @property
    def _more(self) -> str:
        """What else `form` says of the local steps."""
        return ""

    @property
    def upload(self) -> Upload:
        """Changes of the clients' messages where the clients keep their variables."""
        return Upload("sum" if self.duals == "client" else "own copy")

    def variables(
        self, start: NDArray[Any] | None, dual: NDArray[Any] | None
    ) -> dict[str, Arrays | None]:
        """Return the fields of a message for what a client may not hold; a dual of 0 is empty."""
        arrays = partial(self._block.arrays, copy=False)
        return {
            "start": None if start is None else arrays(start),
            "dual": None if dual is None else arrays(dual) if dual.any() else {},
        }

    def upload_reference(self, sent: ClientInstruction) -> Arrays:
        """Measure u_i, or theta_i, from the first group sent, the change of a message from 0."""
        arrays = super().upload_reference(sent)
        return arrays if self.duals == "strategy" else self._block.rest(arrays)

    def on_state_lost(self, server_round: int, client_ids: Sequence[int]) -> None:
        """Start everybody from the global model where the clients keep their variables."""
        if self.duals == "client":
            self.state.consensus.restart(server_round, len(self.membership))


class SummedStrategy(ToldStrategy):
    """Base of the methods whose clients keep a variable each and send its changes.

    The server knows the sum of these variables alone. So all begin at 0 again when a client has
    left or has lost its own: nobody can take it out of the sum.
    """

    upload = Upload("sum")
    _block: Block = field(init=False)  # what is trained; `init_state` sets it

    def __post_init__(self) -> None:
        super().__post_init__()

    def init_state(self, arrays: Arrays) -> SummedState:
        """Start with the initial model and all variables at 0."""
        self._block = Block.optimised(arrays, self.trained)
        consensus = Consensus.start(self._block.vector(arrays), of_participants=True)
        return SummedState(consensus, self._block.rest(arrays))

    def is_fresh(self, client: int) -> bool:
        """Return whether a client's variable is 0: it has not taken part since all of them were."""
        last_accepted = self.membership.last_accepted.get(client, 0)
        return self.state.consensus.starting_point(last_accepted) is not None

    def remove_clients(self, client_ids: Sequence[int], rows: Sequence[int]) -> None:
        """Begin again: nobody here knows the variables of those that have left."""
        self.state.consensus.restart(self.last_round, len(self.membership))

    def on_state_lost(self, server_round: int, client_ids: Sequence[int]) -> None:
        """Begin again: nobody knows the variables that were lost."""
        self.state.consensus.restart(server_round, len(self.membership))

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return the global model."""
        return self._block.model(self.state.consensus.w, self.state.buffers)


class OwnBuffers:
    """The buffers of the clients' own models, in the column ``buffers`` of the state's table.

    Each client's are those of its last upload. Where models have none there is no such column.

    Parameters
    ----------
    arrays : Arrays
        The initial model.
    trained : collection of str
        What of it is trained; the rest are buffers.
    """

    def __init__(self, arrays: Arrays, trained: Collection[str]) -> None:
        buffers = {name: array for name, array in arrays.items() if name not in trained}
        self._block = Block(spec_of(buffers))

    def column(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Return the buffers of a model as an entry of the column."""
        return {"buffers": self._block.vector(arrays)} if self._block.names else {}

    def keep(self, row: ClientRow, upload: Arrays) -> None:
        """Take a client's buffers from its upload."""
        if self._block.names:
            row.buffers = self._block.vector(upload)

    def into(self, model: Arrays, row: ClientRow) -> Arrays:
        """Return a model with the buffers of a client."""
        return model | self._block.arrays(row.buffers) if self._block.names else model

    def into_clusters(
        self, models: list[Arrays], table: ClientTable, labels: NDArray[np.int64]
    ) -> list[Arrays]:
        """Return clusters' models with the means of their clients' buffers, as `cluster_models`."""
        if not self._block.names:
            return models
        weights = table.column("num_examples")
        means = cluster_models(table.column("buffers"), weights, labels)
        return [m | self._block.arrays(mean) for m, mean in zip(models, means, strict=True)]
