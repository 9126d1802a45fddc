"""The client of FedMC-ADMM; the strategy and the paper are in `fl_admm_strategies.FedMCADMM`.

Here are (14) and (15) of Algorithm 1 of arXiv:2503.12733. The exact minimisers that take their
place by default are in `clients.toolkit.solving.factors`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_admm_strategies import FedMCADMM
from fl_admm_strategies.algorithms.shared.completion import CURVATURE
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.maths.regularizers import L1Norm, Regularizer, SquaredL2
from fl_admm_strategies.messages import FedMCFactors, FedMCInstruction
from fl_admm_strategies.runtime.common.interrupts import Interrupted

from ..toolkit.data.ratings import Ratings
from ..toolkit.round.completion import (
    LEAST_LIPSCHITZ,
    ExactClient,
    Residual,
    descend_items,
    descend_users,
    half_square,
    kept_of,
)
from ..toolkit.solving.factors import FactorSolver
from ..toolkit.solving.steps import (
    Choice,
    Job,
    MethodSteps,
    Reply,
    Scalars,
    Session,
    Steps,
    in_stacks,
    run_together,
)

Curvature = float | NDArray[Any]

LARGEST = 30_000
"""Numbers in a client's ratings and factors up to which a stack is faster (docs/scaling.md)."""
STACK = 100_000
"""Numbers in a stack: 0.8 MB of float64, which the cache of a core holds."""


@dataclass(frozen=True)
class FactorSteps:
    """The N steps on both blocks that a client asks for; factors as in `item_steps`."""

    residual: Residual
    users: NDArray[Any]
    items: NDArray[Any]
    anchor: NDArray[Any]
    curvature: float
    regularizer: Regularizer
    weight: float
    steps: int

    @property
    def size(self) -> int:
        """The numbers that it works on."""
        return int((len(self.residual) + len(self.items)) * self.items.shape[1])

    @property
    def kind(self) -> Hashable:
        """What steps in one stack have in common; None for steps that must be taken alone."""
        if type(self.regularizer) not in (SquaredL2, L1Norm):  # another prox may mix the rows
            return None
        rank, dtype = self.items.shape[1], self.items.dtype
        return self.regularizer, self.weight, self.steps, rank, dtype


def solve_together(parts: Sequence[FactorSteps]) -> list[Scalars]:
    """Do the steps of several clients of one `kind` in one stack: a matrix of their blocks."""
    first, residual = parts[0], Residual.joined([part.residual for part in parts])
    lengths = [(len(part.users), len(part.items), len(part.residual)) for part in parts]
    of_users, of_items, of_ratings = np.cumsum(lengths, axis=0)[:-1].T
    items = np.concatenate([part.items for part in parts])
    users = user_steps(
        residual,
        np.concatenate([part.users for part in parts]),
        items,
        first.regularizer,
        first.steps,
        _in_rows([part.curvature for part in parts], [part.users for part in parts]),
    )
    each = np.split(users, of_users)
    items, errors = item_steps(
        residual,
        users,
        items,
        np.concatenate([part.anchor for part in parts]),
        first.weight,
        first.steps,
        _in_rows([_lipschitz(block) for block in each], [part.items for part in parts]),
    )
    results = zip(each, np.split(items, of_items), np.split(errors, of_ratings), strict=True)
    return [dict(zip(("users", "items", "errors"), result, strict=True)) for result in results]


def _in_rows(values: list[float], blocks: list[NDArray[Any]]) -> NDArray[Any]:
    """Return each value once for every row of its block, shape (rows, 1)."""
    pairs = zip(values, blocks, strict=True)
    return np.concatenate([np.full((len(block), 1), v, block.dtype) for v, block in pairs])


def user_steps(
    residual: Residual,
    users: NDArray[Any],
    items: NDArray[Any],
    regularizer: Regularizer,
    steps: int,
    curvature: Curvature | None = None,
) -> NDArray[Any]:
    """Return U_i after N proximal gradient steps (14), from U_i^k at W_i^k.

    Parameters
    ----------
    residual : Residual
    users : ndarray of shape (m_i, r)
        U_i^k.
    items : ndarray of shape (n, r)
        W_i^k, transposed.
    regularizer : Regularizer
        R_i.
    steps : int
        N.
    curvature : float or ndarray of shape (m_i, 1), optional
        ||W_i^k W_i^k^T||_F, where `items` are not all, or of more than one client.

    Returns
    -------
    ndarray of shape (m_i, r)
        U_i^{k+1}.
    """
    lipschitz = _lipschitz(items) if curvature is None else curvature

    def step(users: NDArray[Any], gradient: NDArray[Any]) -> NDArray[Any]:
        # A step by row is for those regularizers only that take it: see `FactorSteps.kind`.
        length: Any = 1 / lipschitz
        return regularizer.prox(users - gradient / lipschitz, length)  # (66), (71)

    return descend_users(residual, users, items, steps, step)


def item_steps(
    residual: Residual,
    users: NDArray[Any],
    items: NDArray[Any],
    anchor: NDArray[Any],
    weight: float,
    steps: int,
    curvature: Curvature | None = None,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return W_i after N proximal gradient steps (15), from W_i^k at U_i^{k+1}.

    Parameters
    ----------
    residual : Residual
    users : ndarray of shape (m_i, r)
        U_i^{k+1}.
    items, anchor : ndarray of shape (n, r)
        W_i^k and V^k - Y_i^k/beta, transposed.
    weight : float
        p beta.
    steps : int
        N.
    curvature : ndarray of shape (n, 1), optional
        ||U_i^{k+1}^T U_i^{k+1}||_F, where `users` are of more than one client.

    Returns
    -------
    items : ndarray of shape (n, r)
        W_i^{k+1}, transposed.
    errors : ndarray of shape (k,)
        E at U_i^{k+1} before the last step.
    """
    lipschitz = _lipschitz(users) if curvature is None else curvature
    pull = weight * anchor

    def step(items: NDArray[Any], gradient: NDArray[Any]) -> NDArray[Any]:
        items = lipschitz * items  # (67) times p, with beta V - Y in one: beta times the anchor
        items += pull
        items -= gradient
        items /= lipschitz + weight
        return items

    return descend_items(residual, users, items, steps, step)


def _lipschitz(factors: NDArray[Any]) -> float:
    """Return |F^T F|_F, which bounds the curvature of f_i in the other block (Remark 4.1)."""
    return max(float(np.linalg.norm(factors.T @ factors)), LEAST_LIPSCHITZ)


def fit_together(jobs: Sequence[Job], choice: Choice) -> list[Reply | BaseException]:
    """Do for several clients what their `fit` does, with their steps in stacks.

    A client's result has the same bits as alone, whoever is in its stack, where all are in double
    precision; else they are those to rounding.

    Parameters
    ----------
    jobs : sequence of (FedMCADMMClient, parameters, config)
        The work.
    choice : {"auto", True}
        Whether only clients that gain by it are put in stacks.

    Returns
    -------
    list of (arrays, num_examples, metrics) or BaseException
        What `fit` returned or raised, in the order of the jobs.
    """
    return run_together([Session(*job) for job in jobs], partial(_advance, choice))


def _advance(choice: Choice, waiting: Sequence[Session]) -> None:
    """Take the steps of all that wait, in stacks of one kind."""

    def key(session: Session) -> Hashable:
        alone = session.asked.kind is None or (choice == "auto" and session.asked.size > LARGEST)
        return session if alone else session.asked.kind

    for stack in in_stacks([(one, key(one), one.asked.size) for one in waiting], STACK):
        done: list[Scalars] = []
        if len(stack) > 1:
            try:
                done = solve_together([session.asked for session in stack])
            except Interrupted:
                raise
            except Exception:  # the client's own steps raise it again
                done = []
        for place, session in enumerate(stack):
            if done:
                session.advance(partial(dict, done[place]))
            else:
                session.advance_alone()


class FedMCADMMClient(ExactClient[FedMCInstruction]):
    """Client of `FedMCADMM`: the ratings of its users, and their factors, which stay here.

    Parameters
    ----------
    context : Context
        The client's context, as `client_fn(context)` receives it.
    train : Ratings
        M_i to train on; `num_items` is n, the same for all clients.
    regularizer : Regularizer
        R_i, on the users' factors: `SquaredL2(lam)`; with ``solve="linear"`` also `L1Norm(lam)`, or
        one of your own.
    test : Ratings, optional
        Ratings of the same users to evaluate on. A client without has no part in the RMSE.
    mean, std : float (default: 0 and 1)
        Of the stars, where `train` and `test` hold (stars - mean) / std: predictions and the RMSE
        are in stars then. The same for all clients, e.g. of all their training ratings.
    rank_at : int, optional
        k: an evaluation also ranks all items for every user, and brings HR, precision, recall and
        NDCG at k of the test ratings; see `clients.rank`. It computes a score for every user and
        item.
    relevant : float (default: -infinity)
        The least test rating, in stars, that counts as relevant there.
    state_dir : str or path, optional
        Folder for U_i and W_i (with ``duals="client"`` Y_i as well), so that they outlive the run:
        see `Memory`. By default they are in ``context.state``.

    Examples
    --------
    >>> def client_fn(context: Context):
    ...     train, test = load_ratings(context.node_config["partition-id"])
    ...     return FedMCADMMClient(context, train, SquaredL2(8.0), test=test).to_client()

    After the run, with the context that the client had in it:

    >>> train, _ = load_ratings(context.node_config["partition-id"])
    >>> best = FedMCADMMClient(context, train, SquaredL2(8.0)).recommend(user=3, n=10)
    """

    strategy = FedMCADMM
    instruction = FedMCInstruction
    cohort = staticmethod(fit_together)

    def answer_handshake(self, parameters: list[NDArray[Any]], config: Scalars) -> Reply:
        """Return Y_i^0 = -(1/p) grad_V f_i(U_i^0, V^0), or which items are rated here."""
        asked = FedMCFactors.decode(parameters, config)
        factors = self.checked(asked.factors)
        if asked.rated_only:
            rated = np.zeros(self.train_ratings.num_items, np.bool_)
            rated[self.train_ratings.items] = True
            return [rated], self.train_size(), {}
        users = self.first_users(factors, asked)
        return [self._first_dual(users, factors, asked)], self.train_size(), {}

    def perform(self, asked: FactorSteps) -> Scalars:
        """Do the steps of a round alone."""
        residual, regularizer, steps = asked.residual, asked.regularizer, asked.steps
        users = user_steps(residual, asked.users, asked.items, regularizer, steps, asked.curvature)
        items, errors = item_steps(residual, users, asked.items, asked.anchor, asked.weight, steps)
        return {"users": users, "items": items, "errors": errors}

    def steps(self, asked: FedMCInstruction, config: Scalars) -> MethodSteps:
        """Run the client's part of a round: N steps on U_i, then N on W_i, or both minimisers.

        Uploads W_i^{k+1}, of shape (r, n); with ``duals="client"`` Z_i^{k+1} - Z_i^k, where
        Z_i = W_i + Y_i/beta, or W_i^{k+1} - V^k where V is of the participants' W_i. Metrics:
        ``loss``, f_i for each training rating before the last step on W_i.
        """
        if asked.item_curvature is not None:
            return (yield from self._rated_steps(asked, config))
        received = self.checked(asked.anchor)  # V^k, where the dual is here; else the anchor
        # A U_i that the server knows of is not drawn anew in silence.
        known = self.memory.recall if asked.dual is None else self.memory.require_known
        held = known(config)
        if held is None or asked.begins:
            held = self._first_variables(held, asked, config)
        anchor = received - held["Y"] / asked.beta if "Y" in held else received
        start = received if asked.start_at == "global" else held["W"]
        kept, items, loss = yield from self._moved(
            self.train_ratings, held["U"], start, anchor, asked
        )
        new = kept | {"W": items}
        upload = dict.fromkeys(asked.anchor, new["W"])
        change = new["W"] - received
        if asked.duals == "client":
            of_all = asked.averaging == "all"
            if of_all:
                change += new["W"] - held["W"]  # of Z_i: the first is (Y_new - Y_old)/beta
            whole, share = self.clipped(dict.fromkeys(asked.anchor, change), {}, config)
            if share < 1:
                new["W"] = items - (1 - share) / (2 if of_all else 1) * change
            upload, held_back = self.whole_change(whole, config, first=asked.begins)
            new |= held_back
        if "Y" in held:
            new["Y"] = held["Y"] + asked.beta * (new["W"] - received)  # (13)
        self.keep(config, new)
        return upload, {"loss": loss}

    def _moved(
        self,
        ratings: Ratings,
        users: NDArray[Any] | None,
        items: NDArray[Any],
        anchor: NDArray[Any],
        asked: FedMCInstruction,
    ) -> Steps[tuple[Arrays, NDArray[Any], float]]:
        """Return U_i as it is kept, W_i, and the loss by rating; all items are (r, n).

        Both minimisers, or the steps from U_i and W_i.
        """
        if asked.solve == "exact":
            solver = FactorSolver(ratings, asked.feedback, asked.confidence)
            users = solver.users(items.T, self.lam)
            found = solver.items(users, asked.beta, anchor.T)
            items = np.ascontiguousarray(found.T.astype(anchor.dtype))
            return kept_of(solver, users), items, solver.loss(users, found) / self.train_size()
        assert users is not None  # which the minimisers do without
        weight, target = asked.num_clients * asked.beta, np.ascontiguousarray(anchor.T)
        residual, before = Residual(ratings, anchor.dtype), np.ascontiguousarray(items.T)
        # Where the items are not all, the server knows ||W_i^k W_i^k^T||_F.
        known = asked.item_curvature
        curvature = _lipschitz(before) if known is None else max(known, LEAST_LIPSCHITZ)
        done = yield FactorSteps(
            *(residual, users, before, target, curvature),
            *(self.regularizer, weight, asked.inner_steps),
        )
        if not np.isfinite(done["items"]).all():
            raise ValueError(
                f"The steps diverged: W_i is not finite at beta={asked.beta}. Try a larger beta or "
                "a smaller init_scale."
            )
        loss = half_square(done["errors"]) / self.train_size()
        return {"U": done["users"]}, np.ascontiguousarray(done["items"].T), loss

    def _rated_steps(self, asked: FedMCInstruction, config: Scalars) -> MethodSteps:
        """Run the same steps on the items that are rated here; keep U_i alone."""
        assert asked.start is not None
        ((name, anchor),), (first,) = asked.anchor.items(), asked.start.values()
        rated = self.train_ratings.of_rated_items()
        if not anchor.shape == first.shape == (len(anchor), rated.num_items):
            raise ValueError(
                f"The server sent factors of shape {anchor.shape}, expected {rated.num_items} "
                "columns: one for each item rated here. client_fn must give the same ratings in "
                "every round."
            )
        exact = asked.solve == "exact"
        users = None if exact else self.users_at(first, asked, config)
        kept, items, loss = yield from self._moved(rated, users, first, anchor, asked)
        self.keep(config, kept)
        return {name: items}, {"loss": loss, CURVATURE: 0.0 if exact else _lipschitz(kept["U"])}

    def _first_variables(
        self, held: Arrays | None, asked: FedMCInstruction, config: Scalars
    ) -> Arrays:
        """Return U_i^0, unless it holds a U_i, the server's W_i and Y_i, to start from."""
        if not asked.begins:
            raise self.memory.lost(config)
        first = self.checked(asked.anchor if asked.start is None else asked.start)
        users = self.first_users(first, asked) if held is None else held["U"]
        begun = {"U": users, "W": first}
        if asked.dual:
            begun["Y"] = self.checked(asked.dual)
        elif asked.duals == "client" and asked.y0 == "handshake":
            begun["Y"] = self._first_dual(users, first, asked)
        elif asked.duals == "client" or asked.dual is not None:
            begun["Y"] = np.zeros_like(first)
        return begun

    def _first_dual(
        self, users: NDArray[Any], first: NDArray[Any], asked: FedMCFactors | FedMCInstruction
    ) -> NDArray[Any]:
        """Return Y_i^0 = -(1/p) U_i^T P(U_i V^0 - M_i), shape (r, n)."""
        residual = Residual(self.train_ratings, first.dtype)
        errors = residual.at(users, first.T)
        return np.asarray(-np.ascontiguousarray((errors.T @ users).T) / asked.num_clients)
