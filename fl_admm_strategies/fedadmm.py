"""FedADMM: one global model by inexact consensus ADMM, the ancestor of FedAPM and FLAME.

Every client moves its own copy of the model towards its data and towards an anchor that carries its
dual variable, so that the copies agree in the end without the drift of plain local training.

Zhou, Li, "Federated Learning via Inexact ADMM", TPAMI 2023, in the form of FedAPM's Algorithm 1
without personal parameters (specs FedAPM 2.9; FLAME 2.5b). The client's half is
`clients.FedADMMClient`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .blocks import (
    BATCH_NORM,
    Block,
    compile_pattern,
    optimised,
    prefixed,
    spec_of,
    under,
    weighted_average,
)
from .checks import check_choice, check_count, check_positive
from .consensus import Consensus
from .strategy import Metrics
from .weighting import WeightedStrategy
from .wire import Arrays, Order, Reply, Scalar


class FedADMM(WeightedStrategy):
    """Federated learning by inexact ADMM (FedADMM).

    Parameters
    ----------
    rho : float (default: 0.01)
        rho, the ADMM penalty parameter. It stands beside the loss scaled by alpha_i: with
        alpha_i = 1/m, `rho` and `lr` do what m rho and lr/m do for the plain loss (specs FedAPM
        2.4).
    lr : float (default: 0.1)
        eta, the clients' step size, for the scaled loss as well.
    local_epochs : int (default: 3)
        E, local epochs: full-gradient steps with GD, passes over the data with SGD.
    weights : {"uniform", "size"} (default: "uniform")
        alpha_i: 1/m, or n_i/n, which a hand-shake asks for. It scales f_i only; the server's mean
        is over all clients alike in any case, which is its exact minimiser (specs FedAPM 6.1, 5).
    duals : {"strategy", "client"} (default: "strategy")
        Where u_i and pi_i live. "strategy": the anchor w - pi_i/rho goes down, u_i comes up.
        "client", the papers' own placement: w goes down, the change of z_i = u_i + pi_i/rho comes
        up, and the server needs O(d) memory. The same trajectory up to rounding, the same bytes.
        Should a client lose its state, it goes on from u_i as the server has it with "strategy".
        With "client" the server's sum of the z_i cannot be put right, so all clients start afresh
        from u_i = w, pi_i = 0; likewise when a client has left.
    averaged : str (default: `BATCH_NORM`)
        Regular expression searched in the arrays' names: arrays without a gradient, which are
        averaged over the participants, weighted by their examples, as are all integers.
    **base
        The parameters of `StatefulStrategy`.

    Notes
    -----
    A client that connects in mid-run starts with u_i = w, pi_i = 0 and counts in the mean from its
    first accepted upload; before it, z_i = w would leave the mean as it is. When a client has left
    (`forget_after`), its z_i leaves the mean.

    Examples
    --------
    >>> strategy = FedADMM(rho=0.01, lr=0.1, fraction_train=0.3)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=100)
    """

    def __init__(
        self,
        *,
        rho: float = 0.01,
        lr: float = 0.1,
        local_epochs: int = 3,
        weights: Literal["uniform", "size"] = "uniform",
        duals: Literal["strategy", "client"] = "strategy",
        averaged: str = BATCH_NORM,
        **base: Any,
    ) -> None:
        super().__init__(weights=weights, **base)
        check_positive("rho", rho)
        check_positive("lr", lr)
        check_count("local_epochs", local_epochs, least=1)
        check_choice("duals", duals, ("strategy", "client"))
        self.rho = rho
        self.lr = lr
        self.local_epochs = local_epochs
        self.duals = duals
        self.averaged = averaged
        self._averaged = compile_pattern("averaged", averaged)
        self._block = Block({})

    def hyperparameters(self) -> dict[str, Any]:
        """Return the settings for the log."""
        return {
            "rho": self.rho,
            "Learning rate": self.lr,
            "Local epochs": self.local_epochs,
            "Weights": self.weights,
            "Duals in the": self.duals,
        }

    # ------------------------------------------------------------------------------------------
    # The algorithm
    # ------------------------------------------------------------------------------------------

    def init_state(self, arrays: Arrays) -> None:
        """Start with u_i^0 = w^0, the initial model, and pi_i^0 = 0."""
        shared = optimised(arrays, self._averaged)
        self._block = Block(spec_of(shared))
        first = self._block.vector(arrays)
        num_clients = len(self.client_ids)
        self.consensus = Consensus(first, num_clients, self.rho, on_clients=self.duals == "client")
        self.others = {name: array for name, array in arrays.items() if name not in shared}
        self.start_weights()
        self._metrics: Metrics = {}

    def train_orders(self, server_round: int, client_ids: Sequence[int]) -> dict[int, Order]:
        """Send the anchor w - pi_i/rho, or w where clients keep their duals.

        u_i is sent along where the client may not hold it: before its first upload u_i^0 = w^0.
        """
        return {client: self._order(client) for client in client_ids}

    def _order(self, client: int) -> Order:
        index = self._index[client]
        own = self.consensus
        center = own.anchor(index) if self.duals == "strategy" else own.w
        groups = {"center": self._model(center)}
        if (start := self._start(client)) is not None:
            groups["start"] = self._block.arrays(start)
        return Order(groups, self._settings(float(self.alpha[index])))

    def newcomer_orders(
        self, server_round: int, newcomers: Mapping[int, Reply]
    ) -> dict[int, Order]:
        """Let new clients start with u_i = w and pi_i = 0."""
        groups = {"center": self._model(self.consensus.w)}
        groups["start"] = self._block.arrays(self.consensus.w)
        return {
            client: Order(groups, self._settings(self.weight_of(reply)))
            for client, reply in newcomers.items()
        }

    def _start(self, client: int) -> NDArray[Any] | None:
        """Return u_i where the client may not hold it."""
        if self.duals == "strategy":
            return None if self.in_sync(client) else self.consensus.iterates[self._index[client]]
        starts = self.consensus.starts(self.accepted_in[client])
        return self.consensus.first if starts else None

    def _settings(self, alpha: float) -> dict[str, Scalar]:
        return {
            "rho": float(self.rho),
            "lr": float(self.lr),
            "local-epochs": int(self.local_epochs),
            "loss-weight": alpha,
            "duals": self.duals,
            "shared": ",".join(self._block.names),
        }

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Take in u_i, or the change of z_i, of the participants; w is the mean over everybody."""
        gaps: list[float] = []
        for client, reply in replies.items():
            vector = self._block.vector(reply.arrays)
            if self.duals == "strategy":
                gaps.append(self.consensus.update(self._index[client], vector))
            else:
                self.consensus.update_message(vector)
        self.consensus.aggregate()
        self.others = weighted_average(self.others, replies)
        self._metrics = {"gap": float(np.mean(gaps))} if gaps else {}

    def round_metrics(self) -> Metrics:
        """Return ``gap``, the mean of ||u_i - w|| over the participants, w being what they got.

        Only where the duals are in the strategy: otherwise it never sees u_i.
        """
        return self._metrics

    def start_afresh(self, server_round: int, lost: Sequence[int]) -> None:
        """Start everybody from w where clients keep their duals, see `Consensus.restart`."""
        if self.duals == "client":
            self.consensus.restart(server_round)

    def add_clients(self, newcomers: Mapping[int, Reply], places: Sequence[int]) -> None:
        """Take new clients into the mean, with u_i = w and pi_i = 0."""
        self.consensus.add(places)
        self.add_weights(newcomers, places)

    def remove_clients(self, indices: Sequence[int]) -> None:
        """Take z_i out of the mean; where nobody here knows it, everybody starts from w."""
        self.alpha = np.delete(self.alpha, indices)
        if self.duals == "strategy":
            self.consensus.remove(indices)
        else:
            self.consensus.restart(self.last_round, left=len(indices))

    # ------------------------------------------------------------------------------------------
    # Models
    # ------------------------------------------------------------------------------------------

    def evaluate_orders(self, server_round: int, client_ids: Sequence[int]) -> dict[int, Order]:
        """Send everybody the global model."""
        model = self.global_model()
        return {client: Order({"global": model}) for client in client_ids}

    def global_model(self) -> Arrays:
        """Return w."""
        return self._model(self.consensus.w.copy())

    def personal_model(self, client_id: int) -> Arrays:
        """Return u_i, the client's copy of the model as it uploaded it last."""
        if self.duals == "client":
            raise RuntimeError(
                "With duals='client' the clients' own copies of the model stay with them: read "
                "FedADMMClient(...).personal_arrays() there, or use duals='strategy'."
            )
        return self._model(self.consensus.iterates[self._index[client_id]].copy())

    def _model(self, vector: NDArray[Any]) -> Arrays:
        """Return a whole model: the block as views of a d-vector, the averaged arrays."""
        model = self._block.arrays(vector, copy=False) | self.others
        return {name: model[name] for name in self.reply_spec()}

    # ------------------------------------------------------------------------------------------
    # Checkpoints
    # ------------------------------------------------------------------------------------------

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the consensus variables, the averaged arrays and alpha_i."""
        return {
            **prefixed("consensus/", self.consensus.state_arrays()),
            **prefixed("others/", self.others),
            **self.weight_arrays(),
        }

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned."""
        self.consensus.load_state_arrays(under("consensus/", arrays))
        self.others = under("others/", arrays)
        self.load_weight_arrays(arrays)
