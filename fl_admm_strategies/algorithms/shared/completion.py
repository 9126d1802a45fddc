"""What the methods of matrix completion share: M = U V, of which U stays with the clients.

Each client holds the ratings M_i of its own users, and these users' factors U_i; the factors V of
the items are shared. The objective is that of FedMC-ADMM's paper (arXiv:2503.12733):

    Phi(U, V) = (1/p) sum_i [1/2 |P_i(M_i - U_i V)|_F^2 + R_i(U_i)] + R(V)                    (17)

where P_i keeps the observed ratings. The clients' half is `clients.toolkit.round.completion`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import DTypeLike, NDArray

from ...maths.blocks import Arrays
from ...maths.checks import Positive, check_count, check_positive
from ...maths.regularizers import Regularizer, check_regularizer
from ...maths.seeds import seed_of, short
from ...runtime.algorithm import OnClient, Phase
from ...runtime.messages.records import Metrics
from ...runtime.messages.schema import Instruction
from ...runtime.trust.means import REPORTED
from .models import OneMessageStrategy

RATIOS = {
    "mse": ("squared-error", "test-ratings"),
    "nnz-users": ("user-nonzeros", "user-entries"),
    "hr": ("hits", "ranked-users"),
    "precision": ("precisions", "ranked-users"),
    "recall": ("recalls", "ranked-users"),
    "ndcg": ("ndcgs", "ranked-users"),
}
"""Metrics of an evaluation, and the two metrics of the clients of which each is the ratio of sums.
"""
_SUMS = {name for sums in RATIOS.values() for name in sums}


def initial_item_factors(
    rank: int,
    num_items: int,
    *,
    seed: int = 0,
    scale: float = 1.0,
    dtype: DTypeLike = np.float64,
) -> ArrayRecord:
    """Return V^0 with independent entries, uniform on [0, scale], for ``start``.

    Parameters
    ----------
    rank : int
        r.
    num_items : int
        n.
    seed : int (default: 0)
        The run's.
    scale : float (default: 1.0)
        The same as the strategy's `init_scale`.
    dtype : dtype (default: float64)
        In which the whole run computes.

    Returns
    -------
    ArrayRecord
        One array, "item-factors", of shape (r, n).
    """
    check_count("rank", rank, least=1)
    check_count("num_items", num_items, least=1)
    check_count("seed", seed, least=0)
    check_positive("scale", scale)
    factors = np.random.default_rng(seed).uniform(0, scale, (rank, num_items)).astype(dtype)
    return ArrayRecord({"item-factors": Array(factors)})


@dataclass(frozen=True)
class FedMCFactors(Instruction):
    """V for an evaluation or a handshake, and what a client needs to draw its U_i^0.

    Where `feedback` is there, U_i is the minimiser at V, and nothing is drawn.
    """

    factors: Arrays
    factor_seed: int
    factor_scale: float
    feedback: str | None = None
    confidence: float | None = None


class CompletionStrategy(OneMessageStrategy):
    """Base of the methods of matrix completion; the initial arrays are V^0 alone, (r, n).

    Parameters
    ----------
    regularizer : Regularizer
        R, on the items' factors. The clients have one for their users' factors.
    init_scale : float (default: 1.0)
        Entries of U_i^0 are uniform on [0, init_scale].
    **base
        The parameters of `StatefulStrategy`.

    Notes
    -----
    Evaluation reports ``loss``, the objective Phi (17) at (U, V), and ``rmse``, the root of the
    mean squared error over the test ratings of all clients together, in stars. ``nnz-users`` and
    ``nnz-items`` are the shares of entries of U and V that are not zero. Clients with `rank_at`
    also bring ``hr``, ``precision``, ``recall`` and ``ndcg``, means over users. All are of the
    clients that evaluated.
    """

    kinds: ClassVar = {"personal": "users' and items' factors", "global": "items' factors"}

    regularizer: Annotated[Regularizer, check_regularizer] = field(kw_only=False)
    init_scale: Positive = 1.0

    @property
    def is_summed(self) -> bool:
        """Whether the objective is a sum over the clients; here it is their mean, (17)."""
        return False

    @property
    def item_factors(self) -> NDArray[Any]:
        """V, shape (r, n): the state's `items`, where a method keeps it in no other form."""
        items: NDArray[Any] = self.state.items
        return items

    def first_factors(self, arrays: Arrays) -> NDArray[Any]:
        """Return V^0, the one initial array.

        Raises
        ------
        ValueError
            If there are others, or it is no matrix of floating point numbers.
        """
        found = {name: array.shape for name, array in arrays.items()}
        first = next(iter(arrays.values()))
        if len(arrays) != 1 or first.ndim != 2 or first.dtype.kind != "f":
            raise ValueError(
                f"The initial arrays are {found}, expected one array of floating point numbers, "
                "the items' factors V of shape (rank, items): initial_item_factors(rank, items)."
            )
        ((self._name, self._shape),) = found.items()
        return first

    def shared_fields(self, server_round: int) -> dict[str, Any]:
        """Return V."""
        return {"factors": self.global_model()}

    def client_fields(self, client_id: int) -> dict[str, Any]:
        """Return what draws the client's U_i^0."""
        return self.first_users(client_id)

    def first_users(self, client: int) -> dict[str, Any]:
        """Return what a client must know to draw its U_i^0."""
        return {
            "factor_seed": seed_of(short(self.seed), client),
            "factor_scale": self.init_scale,
        }

    @property
    def solver_settings(self) -> dict[str, Any]:
        """The settings of clients that solve for their factors; empty for those that take steps."""
        return {}

    def evaluate_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, FedMCFactors]:
        """Send V; the users' factors are on the client."""
        shared = {"factors": self.global_model(), **self.solver_settings}
        return {client: FedMCFactors(**shared, **self.first_users(client)) for client in client_ids}

    def metrics(self, phase: Phase, clients: Mapping[int, Metrics], means: Metrics) -> Metrics:
        """Return of an evaluation Phi (17), the RMSE over all test ratings and the nonzeros.

        The mean of the clients' errors would weigh a client, not a rating.
        """
        if phase == "train":
            return means
        found, items = pooled(clients, means), self.item_factors
        if terms := _reports(clients, "loss"):
            of_items = self.regularizer.value(items) / (len(terms) if self.is_summed else 1)
            found["loss"] = sum(term for (term,) in terms) / len(terms) + of_items
        return found | {"nnz-items": float(np.count_nonzero(items) / items.size)}

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return V; the users' factors are private to their client."""
        if kind == "personal":
            return OnClient(
                f"{self.method}Client(...).personal_arrays() returns the users' factors there; "
                "predict and recommend use them."
            )
        return {self._name: np.array(self.item_factors, order="C")}


class ExactCompletion(CompletionStrategy):
    """Base of the methods with clients that solve for their users' factors.

    Parameters
    ----------
    feedback : {"explicit", "implicit"} (default: "explicit")
        What the clients' ratings are. "explicit": predicted by a mean, two biases and factors; the
        items' biases are the last row of V and start at 0. "implicit": interactions, all numbers
        above 0; what is not listed counts as a 0.
    confidence : float (default: 1.0)
        With "implicit" an interaction r is a 1 of weight 1 + confidence r, what is none a 0 of
        weight 1.
    **base
        The parameters of `CompletionStrategy`.
    """

    feedback: Literal["explicit", "implicit"] = "explicit"
    confidence: Positive = 1.0

    @property
    def is_summed(self) -> bool:
        """Whether the objective is a sum over the clients."""
        return True

    @property
    def solver_settings(self) -> dict[str, Any]:
        """What the clients solve for."""
        return {"feedback": self.feedback, "confidence": self.confidence}

    @property
    def has_biases(self) -> bool:
        """Whether the last row of V are biases."""
        return self.feedback == "explicit"

    def first_factors(self, arrays: Arrays) -> NDArray[Any]:
        """Return V^0, with biases of 0."""
        first = super().first_factors(arrays)
        if not self.has_biases:
            return first
        return np.vstack([first[:-1], np.zeros_like(first[-1:])])


def pooled(clients: Mapping[int, Mapping[str, float]], means: Metrics) -> Metrics:
    """Return an evaluation's metrics with the `RATIOS` in place of the means of their sums."""
    found = {n: value for n, value in means.items() if n.removesuffix(REPORTED) not in _SUMS}
    for name, of_clients in RATIOS.items():
        if reports := _reports(clients, *of_clients):
            total, count = (sum(column) for column in zip(*reports, strict=True))
            found[name] = total / count if count else math.nan
    if "mse" in found:
        found["rmse"] = math.sqrt(found.pop("mse"))
    return found


def _reports(clients: Mapping[int, Mapping[str, float]], *names: str) -> list[list[float]]:
    """Return these metrics, all sums of squares or counts, of each client with usable ones."""
    reports = [[report.get(name, math.nan) for name in names] for report in clients.values()]
    return [values for values in reports if all(0 <= value < math.inf for value in values)]
