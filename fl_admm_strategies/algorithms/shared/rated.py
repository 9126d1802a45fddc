"""Consensus on the items' factors, with memory and messages for what each client rated only.

By default a client starts at V and takes the exact minimiser, so the factors of an item that it did
not rate are the anchor V - Y_i/beta. Y_i = 0 there at the start, so Y_i stays 0 for these items and
the client's copy of them is V (docs/methods/fedmc-admm-notes.md, P13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...maths.blocks import Arrays, Spec
from ...maths.rated import RATED, RatedTable
from ...runtime.algorithm import Handshake
from ...runtime.messages.records import ClientInstruction, Reply
from ...runtime.uploads import Upload
from .consensus import ConsensusMethod, ConsensusState
from .rule import Row


class RatedRows(ConsensusMethod):
    """Base of a method of consensus on V, (r, n), of which each client rated some columns.

    Parameters
    ----------
    rows : {"all", "rated"} (default: "all")
        What is kept and sent of a client's copy of V and its dual. "rated": only the items that it
        rated. The same trajectory to rounding, with memory and bytes by the number of ratings in
        place of clients times items: for many clients with few ratings each. Before round 1 every
        client says which items it rated.
    **base
        The parameters of `ConsensusMethod`.
    """

    rows: Literal["all", "rated"] = "all"

    def init_state(self, arrays: Arrays) -> ConsensusState:
        """Start all clients at V^0, with duals of 0."""
        state = super().init_state(arrays)
        ((self._name, (self._shape, dtype)),) = self._block.spec.items()
        if self.rows == "rated":
            state.clients = RatedTable(self._shape[0], dtype, alpha=0.0, turns=0)
        return state

    def _columns(self, w: NDArray[Any], averaged: Arrays) -> dict[str, Any]:
        return super()._columns(w, averaged) if self.rows == "all" else {}

    def handshake(self, client_ids: Sequence[int]) -> Handshake[ClientInstruction] | None:
        """Ask every client which items it rated, where rows are by that."""
        if self.rows == "all":
            return super().handshake(client_ids)
        questions = dict.fromkeys(client_ids, ClientInstruction({"nothing": {}}))
        return Handshake(questions, {RATED: (self._shape[1:], np.dtype(np.bool_))})

    def new_client(self, client_id: int, reply: Reply | None) -> dict[str, Any]:
        """Start with the items that it rated."""
        rated = reply.arrays if self.rows == "rated" and reply is not None else {}
        return super().new_client(client_id, reply) | rated

    def client_fields(self, client_id: int) -> dict[str, Any]:
        """Return a client's rule, its row where it may not hold it, and V of the rated items."""
        own = super().client_fields(client_id)
        if self.rows == "all":
            return own
        items = self.state.clients.rated(client_id).items
        model = {self._name: np.ascontiguousarray(self._v[:, items])}
        return own | {"model": model, "rated_only": True}

    def upload_spec(self) -> Spec:
        """Return the shape of a client's copy of V, or of the columns that it rated."""
        if self.rows == "all":
            return super().upload_spec()
        return {self._name: ((self._shape[0], -1), self._block.dtype)}

    def check_reply(self, client_id: int, reply: Reply) -> None:
        """Raise ValueError if an upload is not of the items that the client rated."""
        if self.rows == "rated":
            count = len(self.state.clients.rated(client_id).items)
            if (found := reply.arrays[self._name].shape[1]) != count:
                raise ValueError(f"it uploaded {found} items, expected {count}")

    @property
    def upload(self) -> Upload:
        """What an upload is: which items it has tells which are rated."""
        return Upload("statistic") if self.rows == "rated" else super().upload

    @property
    def _v(self) -> NDArray[Any]:
        return np.asarray(self.state.w.reshape(self._shape))

    def _row(self, client: int) -> Any:
        if self.rows == "all":
            return super()._row(client)
        return Row(dual=self.state.clients.rated(client).dual.T.ravel())

    def _moved(self, replies: Mapping[int, Reply]) -> NDArray[np.float64]:
        if self.rows == "all":
            return super()._moved(replies)
        total, gaps = self.state.total.reshape(self._shape), np.zeros(self._shape)
        for client, reply in replies.items():
            row = self.state.clients.rated(client)
            gap = reply.arrays[self._name] - self._v[:, row.items]
            row.dual = row.dual + gap.T
            total[:, row.items] += gap
            gaps[:, row.items] += gap
        mean = self._v + gaps / len(replies) + total / len(self.membership)
        return np.asarray(mean.ravel())

    def _rebuild(self) -> None:
        if self.rows == "all":
            super()._rebuild()
            return
        total = np.zeros(self._shape)
        for client in self.client_ids:
            row = self.state.clients.rated(client)
            total[:, row.items] += row.dual.T
        self.state.total = total.ravel()
