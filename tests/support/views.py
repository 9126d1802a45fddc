"""Where a strategy's state has what clients uploaded, for the tests of those that come and go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.toolkit.solving.factors import FactorSolver
from fl_admm_strategies.algorithms.scaffold import CONTROL
from fl_admm_strategies.maths.blocks import under
from fl_admm_strategies.maths.moreau import messages
from tests.support.ratings import ratings

Held = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class View:
    """What can be read of a state. It is nothing where a method keeps nothing of its clients.

    Attributes
    ----------
    rows : callable, optional
        ``rows(strategy)``: every client's last upload, one row each.
    total : callable, optional
        ``total(strategy)``: the sum of all clients' messages z_i as the strategy keeps it.
    message : callable, optional
        ``message(strategy, client, held)``: z_i of one client, from where its parts lie; `held` is
        what the client itself keeps.
    rounding : tuple of float
        rtol and atol between `total` and the sum of the messages.
    """

    rows: Callable[[Any], NDArray[Any]] | None = None
    total: Callable[[Any], NDArray[Any]] | None = None
    message: Callable[[Any, int, Held], NDArray[Any]] | None = None
    rounding: tuple[float, float] = (1e-4, 1e-4)


def column(name: str) -> Callable[[Any], NDArray[Any]]:
    return lambda strategy: np.asarray(strategy.state.clients.column(name))


def _consensus_message(strategy: Any, client: int, held: Held) -> NDArray[Any]:
    consensus = strategy.state.consensus
    row = consensus.clients[client]
    dual = row.pi / consensus.rho
    return np.asarray(dual if consensus.of_participants else row.u + dual)


def _rated_message(strategy: Any, client: int, held: Held) -> NDArray[Any]:
    consensus = strategy.state.consensus
    row, sent, w = consensus[client], consensus._sent, not consensus.of_participants
    message = np.zeros_like(consensus.v)
    for k, (of_w, of_dual) in row.past.items():
        message += (w * of_w + of_dual) * sent[k]
    message[row.items] = w * row.w + row.dual
    return np.asarray(message).ravel()


def _held_message(strategy: Any, client: int, held: Held) -> NDArray[Any]:
    parts = [held[f"dual/{name}"] / held.get("rho", strategy.rho) for name in strategy._block.names]
    if strategy.averaging == "all":
        parts = [p + held[f"u/{n}"] for p, n in zip(parts, strategy._block.names, strict=True)]
    return np.concatenate([part.ravel() for part in parts])


def _held_control(strategy: Any, client: int, held: Held) -> NDArray[Any]:
    return np.asarray(strategy._block.vector(under(CONTROL, held)))


def _held_gradient(strategy: Any, client: int, held: Held) -> NDArray[Any]:
    return np.asarray(-strategy._block.vector(under("gradient/", held)) / strategy.alpha)


def _held_factors(strategy: Any, client: int, held: Held) -> NDArray[Any]:
    w = held["W"] if strategy.averaging == "all" else 0
    return np.asarray(w + held["Y"] / strategy.beta).ravel()


def _equations_message(strategy: Any, client: int, held: Held) -> NDArray[Any]:
    solver = FactorSolver(ratings(client), "explicit", 1.0)
    found = solver.item_equations(held["U"])
    return np.concatenate([found.matrices.ravel(), found.vectors.ravel()])


def _moreau_message(theta: str) -> Callable[[Any, int, Held], NDArray[Any]]:
    def message(strategy: Any, client: int, held: Held) -> NDArray[Any]:
        clients = strategy.state.clients
        of_client = (clients.rows(name, [client]) for name in (theta, "local_w", "alpha"))
        theta_i, local_w, alpha = of_client
        over = getattr(strategy, "averaging", "all") == "participants"
        a = strategy.lam * alpha
        return messages(theta_i, local_w, a=a, rho=strategy.rho, of_participants=over)[0]

    return message


def _held_moreau_message(strategy: Any, client: int, held: Held) -> NDArray[Any]:
    a = strategy.lam * strategy.state.clients[client].alpha
    parts = []
    for name in strategy._block.names:
        theta, local_w = held[f"theta/{name}"], held[f"w_i/{name}"]
        dual = a / strategy.rho * (theta - local_w)
        parts.append(dual if strategy.averaging == "participants" else local_w + dual)
    return np.concatenate([part.ravel() for part in parts])


NOTHING = View()
GRADIENTS = View(rows=column("gradient"))
PAIRS = View(rows=lambda strategy: strategy.state.pairs.omega)
CONSENSUS = View(
    rows=lambda strategy: strategy.state.consensus.clients.column("u"),
    total=lambda strategy: strategy.state.consensus.mean.total,
    message=_consensus_message,
)
CONSENSUS_OF_PARTICIPANTS = View(total=CONSENSUS.total, message=_consensus_message)
CONSENSUS_ON_CLIENTS = View(total=CONSENSUS.total, message=_held_message)
GRADIENTS_ON_CLIENTS = View(
    total=lambda strategy: strategy.state.consensus.total, message=_held_gradient
)
CONTROLS = View(total=lambda strategy: strategy.state.consensus.total, message=_held_control)
FACTORS_ON_CLIENTS = View(total=CONSENSUS.total, message=_held_factors)
EQUATIONS = View(
    total=lambda strategy: np.concatenate(
        [strategy.state.totals.sums[name].ravel() for name in ("matrices", "vectors")]
    ),
    message=_equations_message,
)
RATED = View(total=lambda strategy: strategy.state.consensus.total.ravel(), message=_rated_message)
MOREAU = View(
    rows=column("theta"),
    total=lambda strategy: strategy.state.consensus.total,
    message=_moreau_message("theta"),
)
MOREAU_ON_CLIENTS = View(total=MOREAU.total, message=_held_moreau_message)
LOCAL_COPIES = View(
    rows=column("local_w"),
    total=MOREAU.total,
    message=lambda strategy, client, held: strategy.state.clients[client].local_w,
)
PROJECTIONS = View(rows=column("image"), total=MOREAU.total, message=_moreau_message("image"))
MESSAGES = View(
    total=lambda strategy: strategy.state.x * len(strategy.client_ids),
    message=lambda strategy, client, held: strategy.state.clients[client].message,
    rounding=(1e-6, 0),
)
