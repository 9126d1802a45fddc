"""The client of FedALS; the strategy and the papers are in `fl_admm_strategies.FedALS`."""

from __future__ import annotations

import numpy as np

from fl_admm_strategies import FedALS
from fl_admm_strategies.maths.blocks import Arrays, under
from fl_admm_strategies.messages import FedALSInstruction
from fl_admm_strategies.runtime.messages.wire import WIRE_DTYPE

from ..toolkit.round.completion import CompletionClient
from ..toolkit.solving.factors import USERS, FactorSolver
from ..toolkit.solving.steps import Scalars

SUMMED = "summed/"
"""Before the names of the client's part in the server's sums, in its memory."""


class FedALSClient(CompletionClient[FedALSInstruction]):
    """Client of `FedALS`: the ratings of its users, and their factors, which stay here.

    Parameters
    ----------
    context, train, test, mean, std, state_dir, rank_at, relevant
        As those of `FedMCADMMClient`.
    regularizer : SquaredL2
        R_i = lam/2 (|U_i|^2 + |b_i|^2), on the users' factors and biases.

    Examples
    --------
    >>> def client_fn(context: Context):
    ...     train, test = load_ratings(context.node_config["partition-id"])
    ...     return FedALSClient(context, train, SquaredL2(8.0), test=test).to_client()
    """

    strategy = FedALS
    instruction = FedALSInstruction

    def train(self, asked: FedALSInstruction, config: Scalars) -> tuple[Arrays, Scalars]:
        """Solve for U_i at V; upload what it brings to the items' equations, less what it brought.

        Metrics: ``loss``, f_i at U_i and V for each training rating.
        """
        items = self.checked(asked.factors).T
        solver = FactorSolver(self.train_ratings, asked.feedback, asked.confidence)
        users = solver.users(items, self.lam)
        new = solver.item_equations(users)._asdict()
        summed: Arrays = {}
        if not asked.begins:
            held = self.memory.require(config)
            summed = under(SUMMED, held) or solver.item_equations(held[USERS])._asdict()
        change = {
            name: np.asarray(new[name] - summed.get(name, 0.0), items.dtype)
            for name in asked.upload
        }
        upload, kept = self.changed(change, {}, config), solver.kept(users)
        if WIRE_DTYPE in config:  # what is in the server's sums is not what the users' factors give
            kept |= {
                SUMMED + name: array.astype(np.float64) + summed.get(name, 0.0)
                for name, array in upload.items()
            }
        self.memory.keep(config, kept)
        return upload, {"loss": solver.loss(users, items) / self.train_size()}
