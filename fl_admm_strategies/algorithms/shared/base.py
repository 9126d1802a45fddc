"""What several methods share: how much a client counts, and consensus over a model's parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...maths.blocks import Arrays, Block, average, spec_of
from ...maths.clienttable import ClientRow, ClientTable
from ...maths.clustering import cluster_models
from ...maths.consensus import Consensus
from ...runtime.algorithm import MembersChange, OnClient
from ...runtime.messages.records import Reply
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

    def members_changed(self, change: MembersChange) -> None:
        """Take new clients into the mean, with w_i = w and pi_i = 0, or messages out of the sum."""
        if change.joined:
            self.state.consensus.join(len(change.joined))
        elif change.left:
            self.state.consensus.rebuild(self._messages(self.client_ids))


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

    def members_changed(self, change: MembersChange) -> None:
        """Begin again: the variables of a client that left, or lost them, are not known here."""
        if change.left or change.lost:
            self.state.consensus.restart(change.server_round, len(self.membership))

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
