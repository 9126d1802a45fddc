"""FedEASE: a linear model of the items, from one sum of pair counts.

Each client counts how many of its users have both of two items; the server adds up, G = X^T X with
X the users' items, and has the minimiser of |X - X B|^2 + lam |B|^2 over all B with diag(B) = 0:

    P = (G + lam I)^{-1},    B_jk = -P_jk/P_kk for j != k, B_jj = 0

A user with items x gets those with the largest x B. One round in which all take part is all that it
takes, and the result is that with all data in one place.

Steck, "Embarrassingly Shallow Autoencoders for Sparse Data", WWW 2019, arXiv:1905.03375, which has
the model (EASE) and its solution; see docs/methods/fedease.md. The client is
`clients.FedEASEClient`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from ..maths.blocks import Arrays, Spec
from ..maths.checks import Positive, check_count
from ..maths.normal import packed_size, unpacked
from ..runtime.algorithm import Phase
from ..runtime.messages.records import Metrics, Reply
from ..runtime.messages.schema import Instruction
from ..runtime.uploads import Upload
from .shared.completion import pooled
from .shared.totals import Totals, TotalsStrategy


def initial_item_weights(num_items: int) -> ArrayRecord:
    """Return B^0 = 0 for ``start``: one array, "item-weights", of shape (n, n), float32.

    Parameters
    ----------
    num_items : int
        n.
    """
    check_count("num_items", num_items, least=2)
    return ArrayRecord({"item-weights": Array(np.zeros((num_items, num_items), np.float32))})


def ease_weights(pairs: NDArray[Any], lam: float) -> NDArray[np.float64]:
    """Return B of a matrix of pair counts, shape (n, n)."""
    inverse = np.linalg.inv(pairs + lam * np.eye(len(pairs)))
    weights: NDArray[np.float64] = inverse / -np.diag(inverse)
    np.fill_diagonal(weights, 0)
    return weights


@dataclass
class FedEASEState:
    """B, shape (n, n), and the sum of the clients' pair counts."""

    weights: NDArray[Any]
    totals: Totals


@dataclass(frozen=True)
class FedEASEInstruction(Instruction):
    """What a client gets: nothing but how to count, and that it need not where it is counted."""

    nothing: Arrays
    num_items: int
    upload: list[str]


@dataclass(frozen=True)
class FedEASEEvaluation(Instruction):
    """B, for an evaluation."""

    weights: Arrays


class FedEASE(TotalsStrategy):
    """Recommending by item weights from one sum of pair counts (FedEASE).

    The initial arrays are B^0 = 0 alone, of shape (n, n): see `initial_item_weights`.

    Parameters
    ----------
    lam : float (default: 400.0)
        The ridge. Larger for more users and for noise; choose it on validation.
    **base
        The parameters of `StatefulStrategy`.

    Notes
    -----
    It counts that a rating is listed, not its value. A client is counted once, in the first round
    in which it takes part. When a client has left, all are counted again, since no part can be
    taken out of the sum. n (n + 1)/2 numbers go up, in single precision, which is exact for
    counts to 16 million, and evaluation sends n^2 down: a method for some thousand items.

    ``privacy=ClientDP(...)`` adds noise to the sum of the counts: its `clip` is for the upload of a
    client, all of its users together. Where each client is one user, that bounds a user.

    Evaluation reports ``hr``, ``precision``, ``recall`` and ``ndcg`` of clients with test ratings,
    and ``loss``, the mean of |x - x B|^2 over their training ratings.

    Examples
    --------
    >>> strategy = FedEASE(lam=400.0)
    >>> result = strategy.start(grid, initial_item_weights(1682), num_rounds=1)
    >>> ndcg = result.evaluate_metrics_clientapp[1]["ndcg"]
    """

    method: ClassVar = "FedEASE"
    paper: ClassVar = "Steck, WWW 2019, arXiv:1905.03375"
    kinds: ClassVar = {"global": "items' weights"}
    message_type: ClassVar = FedEASEInstruction
    upload = Upload("mean")

    lam: Positive = 400.0

    def init_state(self, arrays: Arrays) -> FedEASEState:
        """Start with B^0, and an empty sum.

        Raises
        ------
        ValueError
            If the initial arrays are not one square matrix of floating point numbers.
        """
        found = {name: array.shape for name, array in arrays.items()}
        first = next(iter(arrays.values()))
        square = first.ndim == 2 and first.shape[0] == first.shape[1]
        if len(arrays) != 1 or not square or first.dtype.kind != "f":
            raise ValueError(
                f"The initial arrays are {found}, expected one array of floating point numbers, "
                "of shape (items, items): initial_item_weights(items)."
            )
        (self._name,) = arrays
        size = packed_size(len(first))
        self._pairs: Spec = {"pairs": ((size,), np.dtype(np.float32))}
        return FedEASEState(first, Totals.start(self._pairs))

    def upload_spec(self) -> Spec:
        """Return the shape of the counts."""
        return self._pairs

    def shared_fields(self, server_round: int) -> dict[str, Any]:
        """Return how to count."""
        return {"nothing": {}, "num_items": len(self.state.weights)}

    def client_fields(self, client_id: int) -> dict[str, Any]:
        """Ask for the counts of a client that is not in the sum."""
        return {"upload": [*self._pairs] if self.is_fresh(client_id) else []}

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Add up the counts, and solve for B where there are new ones."""
        parts = [reply.arrays for reply in replies.values() if reply.arrays]
        if not parts:
            return
        state = self.state
        state.totals.add(parts)
        pairs = unpacked(state.totals.sums["pairs"], len(state.weights))
        state.weights = ease_weights(pairs, self.lam).astype(state.weights.dtype)

    def model(self, kind: str, client_id: int) -> Arrays:
        """Return B."""
        return {self._name: np.array(self.state.weights)}

    def evaluate_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, FedEASEEvaluation]:
        """Send B."""
        asked = FedEASEEvaluation({self._name: self.state.weights})
        return dict.fromkeys(client_ids, asked)

    def metrics(self, phase: Phase, clients: Mapping[int, Metrics], means: Metrics) -> Metrics:
        """Return the mean loss, and how well items are ranked for all users together."""
        return pooled(clients, means) if phase == "evaluate" else means
