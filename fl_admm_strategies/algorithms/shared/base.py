"""What several methods share: weighted means of uploads, and the buffers of clients' own models."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...maths.blocks import Arrays, Block, average, spec_of
from ...maths.clienttable import ClientRow, ClientTable
from ...maths.clustering import cluster_models
from ...runtime.messages.records import Reply

Weights = Literal["uniform", "size"]
Duals = Literal["strategy", "client"]


def participants_mean(arrays: Arrays, replies: Mapping[int, Reply], weights: str) -> Arrays:
    """Return the mean of the uploads' arrays of these names, plain or weighted by examples."""
    return average(arrays, replies, mean_weights(replies, weights))


def mean_weights(replies: Mapping[int, Reply], weights: str) -> NDArray[np.float64]:
    """Return the weights of replies in their mean: n_i, or all 1."""
    sizes = np.array([reply.num_examples for reply in replies.values()])
    return sizes if weights == "size" else np.ones_like(sizes)


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
