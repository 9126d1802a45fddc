"""FedMC-ADMM: federated matrix completion, for recommenders.

Each client holds the ratings M_i of its own users; all rate the same items. The factors U_i of the
users stay with their client, the factors V of the items are shared:

    minimise  (1/p) sum_i [1/2 |P_i(M_i - U_i V)|_F^2 + R_i(U_i)] + R(V)              (1), (2)

where P_i keeps the observed ratings. Every client has a copy W_i of V, and W_i = V is kept by ADMM.

Hytla, Nghia, Phan, Rice, "A Linearized Alternating Direction Multiplier Method for Federated Matrix
Completion Problems", arXiv:2503.12733: Algorithm 1. Here are (13) and (16); (14) and (15) are the
client's half, `clients.FedMCADMMClient`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import DTypeLike, NDArray

from .blocks import Block, Spec, prefixed, spec_of, under
from .checks import check_choice, check_count, check_positive
from .consensus import Consensus
from .regularizers import Regularizer, check_regularizer
from .strategy import Metrics, StatefulStrategy
from .wire import Arrays, ClientReply, Order, Reply, Scalar


def initial_item_factors(
    rank: int,
    num_items: int,
    *,
    seed: int = 0,
    scale: float = 1.0,
    dtype: DTypeLike = np.float64,
) -> ArrayRecord:
    """Return V^0 with independent entries, uniform on [0, scale], for `FedMCADMM.start`.

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


class FedMCADMM(StatefulStrategy):
    """Federated matrix completion by linearised ADMM (FedMC-ADMM).

    The initial arrays are V^0 alone, of shape (r, n): see `initial_item_factors`.

    Parameters
    ----------
    regularizer : Regularizer
        R, on the items' factors: `SquaredL2(gamma)`, `L1Norm(gamma)`, or an object of your own with
        a proximal operator. The clients have one for their users' factors.
    beta : float (default: 1.0)
        beta, the ADMM penalty parameter; the paper does not say which it used (see Notes).
    inner_steps : int (default: 10)
        N, proximal gradient steps of a client on each of its two blocks in a round.
    init_scale : float (default: 1.0)
        Entries of U_i^0 are uniform on [0, init_scale].
    y0 : {"zero", "handshake"} (default: "zero")
        How the duals start. "zero": Y_i^0 = 0, as in the authors' code. "handshake": the paper's
        Y_i^0 = -(1/p) grad_V f_i(U_i^0, V^0), which all clients must send before round 1, since
        (16) adds up those of all: they share a gradient of their raw data, and V^1 can be far off
        where beta is small.
    duals : {"strategy", "client"} (default: "strategy")
        Where Y_i and the last W_i are kept. "strategy": V - Y_i/beta goes down, W_i comes up, and
        the strategy updates Y_i; its memory is O(p r n). "client": V goes down, the change of
        Z_i = W_i + Y_i/beta comes up, which is all that (16) needs; the strategy's memory is
        O(r n), and it sees neither W_i nor Y_i but their sum alone. The trajectory is the same.
    **base
        The parameters of `StatefulStrategy`.

    Notes
    -----
    Evaluation reports ``loss``, the objective Phi of (17) at (U, V), and ``rmse``, the root of the
    mean squared error over the test ratings of all clients together, in stars; where the clients'
    ratings are standardised, ``scaled-rmse`` is in their unit. They are the paper's with
    ``fraction_evaluate=1``, else those of the clients that were asked.

    Two settings of what the paper leaves open (specs 6.1) work: ``beta=1`` and ``init_scale=1`` on
    ratings as they are, and that of the authors' code, ``beta=1e4`` and ``init_scale=2e-4`` on
    standardised ratings. A beta well above |U^T U|_F / p freezes V, one far below is unstable. The
    bound on beta of Theorems 4.7 and 4.8 (a max where the paper prints min) is some five orders
    above what works best, so it is not checked.

    U_i never leaves its client. One that lost it starts again at U_i^0, which is drawn from a seed
    in the message, with W_i as the strategy has it; with ``duals="client"`` the strategy has its
    Z_i in a sum only, which cannot be put right, so all clients go on with W_i = V, Y_i = 0.

    A client that connects in mid-run starts with W_i = V, Y_i = 0 and counts in the mean from its
    first accepted upload. When a client has left (`forget_after`), its Z_i leaves the mean; with
    ``duals="client"`` all others go on with W_i = V, Y_i = 0. p stays what it was at the start, in
    the clients' steps and in that of R's proximal operator: with p' clients this is Algorithm 1 for
    p'/p times (2), so that the minimiser is that of the p' clients and no Y_i changes its scale.

    That U_i stays is no promise of privacy: by Lemma 4.5 Y_i is a gradient with a proximal term,
    from which something can be inferred about the ratings (specs 6.3). With ``duals="client"`` the
    server needs no more than a sum over the clients, which secure aggregation can give it.

    Examples
    --------
    >>> strategy = FedMCADMM(SquaredL2(1e-6), beta=1.0, fraction_train=0.1, seed=0)
    >>> result = strategy.start(grid, initial_item_factors(5, 3706, seed=0), num_rounds=100)
    >>> result.evaluate_metrics_clientapp[100]["rmse"]
    """

    def __init__(
        self,
        regularizer: Regularizer,
        *,
        beta: float = 1.0,
        inner_steps: int = 10,
        init_scale: float = 1.0,
        y0: Literal["zero", "handshake"] = "zero",
        duals: Literal["strategy", "client"] = "strategy",
        **base: Any,
    ) -> None:
        super().__init__(**base)
        check_regularizer("regularizer", regularizer)
        check_positive("beta", beta)
        check_count("inner_steps", inner_steps, least=1)
        check_positive("init_scale", init_scale)
        check_choice("y0", y0, ("zero", "handshake"))
        check_choice("duals", duals, ("strategy", "client"))
        self.regularizer = regularizer
        self.beta = beta
        self.inner_steps = inner_steps
        self.init_scale = init_scale
        self.y0 = y0
        self.duals = duals

    def hyperparameters(self) -> dict[str, Any]:
        """Return the settings for the log."""
        return {
            "Regulariser of the items' factors": self.regularizer,
            "beta": self.beta,
            "Inner steps": self.inner_steps,
            "Scale of the first factors": self.init_scale,
            "First duals": self.y0,
            "Duals kept by": self.duals,
        }

    # ------------------------------------------------------------------------------------------
    # The algorithm
    # ------------------------------------------------------------------------------------------

    def init_state(self, arrays: Arrays) -> None:
        """Start with W_i = V = V^0 and Y_i = 0 for every client."""
        found = {name: array.shape for name, array in arrays.items()}
        first = next(iter(arrays.values()))
        if len(arrays) != 1 or first.ndim != 2 or first.dtype.kind != "f":
            raise ValueError(
                f"The initial arrays are {found}, expected one array of floating point numbers, "
                "the items' factors V of shape (rank, items): initial_item_factors(rank, items)."
            )
        self._block = Block(spec_of(arrays))
        self._shape = first.shape
        self.consensus = Consensus(
            self._block.vector(arrays),
            len(self.client_ids),
            self.beta,
            prox=self._prox,
            on_clients=self.duals == "client",
        )

    def _prox(self, mean: NDArray[Any]) -> NDArray[Any]:
        """Return prox_{R/(p beta)}: (68) for the squared l2 norm, (73) for the l1 norm."""
        step = 1 / (self.num_founders * self.beta)
        return self.regularizer.prox(mean.reshape(self._shape), step).ravel()

    def _config(self, client: int) -> dict[str, Scalar]:
        """Return what a client must know to do, or to have done, its first step."""
        sequence = np.random.SeedSequence([self.seed, client])
        return {
            "factor-seed": int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1)),
            "factor-scale": float(self.init_scale),
            "num-clients": self.num_founders,
        }

    def handshake_orders(self, client_ids: Sequence[int]) -> dict[int, Order]:
        """Ask every client for its Y_i^0 before round 1, with y0="handshake"."""
        if self.y0 == "zero":
            return {}
        first = self._block.arrays(self.consensus.first)
        return {
            client: Order({"start": first}, self._config(client))
            for client in client_ids
            if client in self._index  # those that come later start with 0
        }

    def handshake_spec(self) -> Spec:
        """Return the shape of Y_i^0, which is that of V."""
        return self._block.spec

    def handshake(self, replies: Mapping[int, Reply]) -> None:
        """Take in Y_i^0 of all clients. They enter V with the first V step; V^0 stays."""
        for client, reply in replies.items():
            dual = self._block.vector(reply.arrays)
            if self.duals == "client":
                self.consensus.update_message(dual / self.consensus.w.dtype.type(self.beta))
            else:
                self.consensus.set_dual(self._index[client], dual)

    def train_orders(self, server_round: int, client_ids: Sequence[int]) -> dict[int, Order]:
        """Send V - Y_i/beta, or V where the client has Y_i; W_i to those that start with it."""
        orders = {}
        y0 = "zero" if self.consensus.began_in else self.y0
        for client in client_ids:
            if self.duals == "client":
                down, start = self.consensus.w, self.consensus.first
            else:
                index = self._index[client]
                down, start = self.consensus.anchor(index), self.consensus.iterates[index]
            groups = {"center": self._block.arrays(down)}
            if self.consensus.starts(self.accepted_in[client]):
                groups["start"] = self._block.arrays(start)
            orders[client] = Order(groups, self._training_config(client, y0))
        return orders

    def newcomer_orders(
        self, server_round: int, newcomers: Mapping[int, Reply]
    ) -> dict[int, Order]:
        """Let new clients start with W_i = V and Y_i = 0, whatever `y0` is."""
        factors = self._block.arrays(self.consensus.w)
        groups = {"center": factors, "start": factors}
        return {
            client: Order(groups, self._training_config(client, "zero")) for client in newcomers
        }

    def _training_config(self, client: int, y0: str) -> dict[str, Scalar]:
        return self._config(client) | {
            "beta": float(self.beta),
            "inner-steps": int(self.inner_steps),
            "y0": y0,
            "duals": self.duals,
        }

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Take in W_i, update Y_i by the old V (13); then V over all clients (16)."""
        for client, reply in replies.items():
            uploaded = self._block.vector(reply.arrays)
            if self.duals == "client":
                self.consensus.update_message(uploaded)
            else:
                self.consensus.update(self._index[client], uploaded)
        self.consensus.aggregate()

    def start_afresh(self, server_round: int, lost: Sequence[int]) -> None:
        """Start everybody from W_i = V where clients keep Y_i, see `Consensus.restart`."""
        if self.duals == "client":
            self.consensus.restart(server_round)

    def add_clients(self, newcomers: Mapping[int, Reply], places: Sequence[int]) -> None:
        """Take new clients into the mean, with W_i = V and Y_i = 0."""
        self.consensus.add(places)

    def remove_clients(self, indices: Sequence[int]) -> None:
        """Take Z_i out of the mean; where nobody here knows it, everybody starts from V."""
        if self.duals == "strategy":
            self.consensus.remove(indices)
        else:
            self.consensus.restart(self.last_round, left=len(indices))

    # ------------------------------------------------------------------------------------------
    # Models
    # ------------------------------------------------------------------------------------------

    def evaluate_orders(self, server_round: int, client_ids: Sequence[int]) -> dict[int, Order]:
        """Send V; the users' factors are on the client."""
        factors = self.global_model()
        return {client: Order({"global": factors}, self._config(client)) for client in client_ids}

    def absorb_evaluate(self, server_round: int, replies: Iterable[ClientReply]) -> Metrics:
        """Return Phi (17) and the RMSE over all test ratings, from the clients' sums.

        The mean of the clients' errors would weigh a client, not a rating, and a client without
        test ratings has part in Phi all the same.
        """
        means = super().absorb_evaluate(server_round, replies)
        reports = self.evaluate_metrics[server_round].values() if means else ()
        if "test-ratings" not in means or "squared-error" not in means:
            return means  # of clients that are not ours
        factors = self.consensus.w.reshape(self._shape)
        terms = _total(report["loss"] for report in reports) / len(reports)
        means["loss"] = terms + self.regularizer.value(factors)
        count = _total(report["test-ratings"] for report in reports)
        for error, name in (("squared-error", "rmse"), ("scaled-squared-error", "scaled-rmse")):
            if error in means:
                total = _total(report[error] for report in reports)
                means.pop(error)
                means.pop(name, None)
                if count > 0 and not total < 0:
                    means[name] = math.sqrt(total / count)
        del means["test-ratings"]
        return means

    def global_model(self) -> Arrays:
        """Return V."""
        return self._block.arrays(self.consensus.w)

    def personal_model(self, client_id: int) -> Arrays:
        """Raise: the users' factors are private to their client."""
        raise RuntimeError(
            f"The users' factors of client {client_id} never leave it. On the client, "
            "FedMCADMMClient(...).personal_arrays() returns them; predict and top_items use them."
        )

    # ------------------------------------------------------------------------------------------
    # Checkpoints
    # ------------------------------------------------------------------------------------------

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the variables of the consensus, V among them."""
        return prefixed("consensus/", self.consensus.state_arrays())

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned."""
        self.consensus.load_state_arrays(under("consensus/", arrays))


def _total(values: Iterable[float]) -> float:
    """Return the exact sum, NaN where a value is not finite: these are numbers of clients."""
    numbers = list(values)
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else math.nan
