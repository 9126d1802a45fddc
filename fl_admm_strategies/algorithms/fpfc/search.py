"""How `FPFC` without a lambda finds its groups, and with them lambda.

Not in FPFC's paper. The stages, each a few rounds of the same run:

consensus
    One model for all: every anchor is the mean of the omega_i, there are no pairs yet.
probe
    Every client goes from the mean on its own, for `PROBE_FACTOR` times its usual local epochs.
    The directions in which they go give groupings that are worth a trial (`candidate_groups`).
trial
    The groups' models of all these groupings are trained, each by its own clients.
join
    In every grouping each client joins the group whose model, as the others made it, has the least
    loss on the samples that it trains on.
refit
    The groups' models are trained, from the probes again.
score
    Every client measures them on data that it has held out so far, or on its training data, with a
    correction (`corrected`), and the grouping with the fewest groups that is not clearly worse than
    the best is taken (`compare`).
fusion
    FPFC's own rounds, from the groups' models.

See docs/methods/fpfc.md, "Without a lambda", for the reasons and the evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from typing import Any, ClassVar

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from ...maths.blocks import Arrays, Block, Spec, prefixed, under
from ...maths.candidates import Candidates
from ...maths.checks import listing
from ...maths.clienttable import ByClient, Row
from ...maths.grouping import (
    candidate_groups,
    compare,
    corrected,
    holding_lambda,
    numbered,
    smallest_distance,
)
from ...maths.penalties import SmoothedSCAD
from ...runtime.messages.records import Reply

CONSENSUS, PROBE, TRIAL, JOIN, REFIT, SCORE, FUSION = range(7)

PROBE_FACTOR = 5
PROBE_ROUNDS = 3  # at most: who did not reply is asked again
REFIT_ROUNDS = 5
FOLDS = 4
CUTS = 3
STANDARD_ERRORS = 1.5
RENEWAL = 20  # rounds from one lambda to the next

NO_FUSION = SmoothedSCAD(0.0)

HELD_OUT_LOSS, TRAINING_LOSS, GRADIENT_NORM = "held-out-loss", "training-loss", "gradient-norm"
"""What clients report in the stage of the scores, each followed by ``-K`` for candidate K."""

OPTIMISM, NO_VOTE = "optimism", "held-out-none"
"""What a client that holds nothing out reports with its probe: how much too low its training loss
is; or, having one sample, that it cannot say, and so has no say in the choice."""


@dataclass(frozen=True)
class FoundGroups:
    """What the search of `FPFC` without a lambda found.

    Attributes
    ----------
    last_round : int
        The last round of the search.
    labels : dict of int to int
        The group of every client that took part in the search.
    num_groups : ndarray of shape (K,)
        Of every grouping that was tried.
    losses : ndarray of shape (K,)
        Mean loss on the held-out data, or the corrected training loss.
    differences, errors : ndarray of shape (K,)
        Mean difference to the best, and its standard error over the clients.
    chosen : int
    smallest_distance : float
        b, between the models of two groups as they came out of the search; NaN for one group.
    lam_needed : float
        The least lambda that can hold these groups together (docs/methods/fpfc.md, P4).
    """

    last_round: int
    labels: dict[int, int]
    num_groups: NDArray[np.int64]
    losses: NDArray[np.float64]
    differences: NDArray[np.float64]
    errors: NDArray[np.float64]
    chosen: int
    smallest_distance: float
    lam_needed: float


class GroupSearch(ByClient):
    """The variables of the search.

    Parameters
    ----------
    consensus_rounds : int
        C.
    block : Block
        omega_i.

    Attributes
    ----------
    stage : int
        `CONSENSUS`, ..., `FUSION`.
    rounds : int
        Rounds in this stage: with a usable reply, or, of the probes, begun.
    last_round : int
        The last round of the search, once it is over.
    lam : float
        lambda, from then on.
    center : ndarray of shape (d,)
        The mean that all clients set out from; empty in the consensus.
    probes : dict of int to ndarray of shape (d,)
        Where they came to; kept until the groups are found.
    optimism : dict of int to ndarray of shape (1,)
        What clients without held-out data said of their training losses.
    candidates : Candidates
        The groupings that are tried, with their groups' models.
    unplaced : set of int
        Clients that took no part in the search and have not trained since.
    """

    self_checked: ClassVar[bool] = True

    def __init__(self, consensus_rounds: int, block: Block) -> None:
        self.consensus_rounds = consensus_rounds
        self._block = block
        self.stage = CONSENSUS
        self.rounds = 0
        self.last_round = 0
        self.lam = 0.0
        self.center = np.zeros(0, block.dtype)
        self.probes: dict[int, NDArray[Any]] = {}
        self.optimism: dict[int, NDArray[np.float64]] = {}
        self.candidates = Candidates()
        self.unplaced: set[int] = set()
        self._scores: dict[int, NDArray[np.float64]] = {}  # losses, then gradient norms: (2, K)
        # What `found` returns: num_groups, losses, differences and errors, shape (4, K); and
        # chosen, b, lam_needed.
        self._table, self._result = np.zeros((4, 0)), np.zeros(3)

    # ------------------------------------------------------------------------------------------
    # What clients are asked
    # ------------------------------------------------------------------------------------------

    def begin_round(self, here: Sequence[int], omega: NDArray[Any]) -> None:
        """Before a round: form groups once all probes are in, or were asked for often enough.

        Not when replies come: of the last ones that are missing none may ever.

        Parameters
        ----------
        here : sequence of int
            The clients of the run that are connected.
        omega : ndarray of shape (m, d)
        """
        if self.everybody and self.stage != PROBE and not self.candidates.labels:  # all have left
            self.center = omega.mean(axis=0)
            self._enter(PROBE)
        if self.stage != PROBE:
            return
        missing = [client for client in here if client not in self.probes]
        if self.probes and (not missing or self.rounds >= PROBE_ROUNDS):
            self._form_groups(missing)
        else:
            self.rounds += 1

    @property
    def everybody(self) -> bool:
        """Whether all clients are asked in this stage, whoever was sampled."""
        return self.stage not in (CONSENSUS, FUSION)

    def asked(self, clients: Sequence[int]) -> list[int]:
        """Return which of these clients are asked: who is missing, or who has a place."""
        if self.stage == PROBE:
            return [client for client in clients if client not in self.probes]
        return [client for client in clients if client in self.candidates.labels]

    @property
    def num_candidates(self) -> int:
        """K, the models that each client trains in this stage."""
        return 1 if self.stage == PROBE else len(self.candidates)

    def vectors(self, client: int) -> list[NDArray[Any]]:
        """Return the models that a client is sent: one for each candidate, or its options."""
        if self.stage == PROBE:
            return [self.center]
        if self.stage == JOIN:
            return self.candidates.models_without(client)
        return self.candidates.models_of(client)

    def epochs(self, usual: int) -> int:
        """Return the local epochs of this stage, by the usual number."""
        return {PROBE: PROBE_FACTOR * usual, JOIN: 0, SCORE: 0}.get(self.stage, usual)

    def upload_spec(self) -> Spec:
        """Return the names, shapes and dtypes of an upload in the stages that ask everybody."""
        if self.stage in (JOIN, SCORE):
            return {}
        return {
            f"{k}/{name}": spec
            for k in range(self.num_candidates)
            for name, spec in self._block.spec.items()
        }

    # ------------------------------------------------------------------------------------------
    # What replies change
    # ------------------------------------------------------------------------------------------

    def end_consensus_round(self, omega: NDArray[Any]) -> None:
        """Count a round of the consensus; after the last, `omega`'s mean is where all set out."""
        self.rounds += 1
        if self.rounds >= self.consensus_rounds:
            self.center = omega.mean(axis=0)
            self._enter(PROBE)

    def take_probes(self, replies: Mapping[int, Reply]) -> None:
        """Keep where clients came to."""
        for client, reply in replies.items():
            self.probes[client] = self._vectors(reply)[0]
            if OPTIMISM in reply.metrics:
                self.optimism[client] = np.array([reply.metrics[OPTIMISM]], np.float64)
        if all(NO_VOTE in reply.metrics for reply in replies.values()):
            raise RuntimeError(
                "No client has two training samples, so nobody can say which groups suit it. Give "
                "the clients more samples or a validation_loader, or FPFC a penalty instead of "
                "'auto'."
            )

    def _form_groups(self, missing: Sequence[int]) -> None:
        if missing:
            log(
                WARNING,
                "clients %s did not reply in %s rounds; they take no part in the search for "
                "groups, and join afterwards as new clients do",
                listing(missing),
                PROBE_ROUNDS,
            )
        clients = sorted(self.probes)
        probes = np.stack([self.probes[client] for client in clients])
        groupings = candidate_groups(probes - self.center, CUTS)
        self.candidates = Candidates(clients, groupings, probes)
        self._enter(TRIAL if self.candidates.open_to_change else REFIT)
        log(
            INFO,
            "%s groupings of the clients are tried, of %s groups",
            len(groupings),
            ", ".join(str(max(labels) + 1) for labels in groupings),
        )

    def take_refits(self, replies: Mapping[int, Reply]) -> None:
        """Take in what clients made of their groups' models."""
        candidates = self.candidates
        trained = {
            client: np.stack(self._vectors(reply))
            for client, reply in replies.items()
            if client in candidates.labels
        }
        candidates.refit(trained)
        self.rounds += 1
        if self.stage == TRIAL:
            candidates.uploads = trained
            self._enter(JOIN)
        elif self.rounds >= REFIT_ROUNDS:
            self._enter(SCORE)

    def take_choices(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Let every client join the group whose model has the least loss; begin the refit."""
        candidates = self.candidates
        moved = candidates.join(
            {
                client: _reported(reply, TRAINING_LOSS, len(candidates.options(client)))
                for client, reply in replies.items()
                if client in candidates.labels
            },
            self.probes,
        )
        self._enter(REFIT)
        log(
            INFO,
            "round %s: %s client%s joined another group in one grouping or more",
            server_round,
            moved,
            "" if moved == 1 else "s",
        )

    def take_scores(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Choose among the candidates by those who replied, and set lambda."""
        candidates = self.candidates
        count = len(candidates)
        everybody = np.stack(list(candidates.labels.values()))
        sizes = np.stack([np.bincount(column)[column] for column in everybody.T], axis=1)
        for place, client in enumerate(candidates.labels):
            if client in replies:
                reply = replies[client]
                held_out, training, norms = (
                    _reported(reply, name, count)
                    for name in (HELD_OUT_LOSS, TRAINING_LOSS, GRADIENT_NORM)
                )
                if client in self.optimism:
                    optimism = float(self.optimism[client][0])
                    held_out = corrected(training, optimism, sizes[place], reply.num_examples)
                self._scores[client] = np.stack([held_out, norms])
        num_groups = np.array([len(np.unique(column)) for column in everybody.T])
        unknown = np.full((2, count), np.nan)
        scores = np.stack([self._scores.get(client, unknown) for client in candidates.labels])
        measured = ~np.isnan(scores[:, 0]).all(axis=1)
        found = compare(scores[measured, 0], num_groups, STANDARD_ERRORS)
        chosen, norms = found.chosen, scores[:, 1, found.chosen]
        groups = numbered(everybody[:, chosen])
        needed = holding_lambda(groups, norms)
        b = smallest_distance(candidates.models[chosen][np.unique(everybody[:, chosen])])
        self._table = np.stack([num_groups, found.means, found.differences, found.errors])
        self._result = np.array([chosen, b, needed])
        self.probes, self.last_round = {}, server_round
        self.lam = lambda_between(b, needed)
        self._enter(FUSION)
        log(
            INFO,
            "round %s: %s group%s found; lambda is %.4g",
            server_round,
            num_groups[chosen],
            "" if num_groups[chosen] == 1 else "s",
            self.lam,
        )
        if self.lam < needed:
            log(
                INFO,
                "At these models, which are not at their best yet, it would take a lambda of %.4g "
                "to hold every group at one model; models of a group may stay apart",
                needed,
            )

    def start_of(self, clients: Sequence[int]) -> NDArray[Any]:
        """Return the omega_i that FPFC starts from: alpha_l, or the mean of the consensus."""
        candidates, chosen = self.candidates, int(self._result[0])
        self.unplaced = {client for client in clients if client not in candidates.labels}
        return np.stack(
            [
                self.center if c in self.unplaced else candidates.models_of(c)[chosen]
                for c in clients
            ]
        )

    def renew(self, models: NDArray[Any]) -> None:
        """Set lambda by the models of the present clusters; with one cluster it stays.

        Where a group has split, its parts are near each other; a smaller lambda would split more.
        """
        b = smallest_distance(models)
        has_split = len(models) > self._table[0, int(self._result[0])]
        if np.isfinite(b) and b > 0 and (b / NO_FUSION.a > self.lam or not has_split):
            self.lam = b / NO_FUSION.a

    def is_due(self, server_round: int) -> bool:
        """Return whether lambda is to be renewed after a round."""
        return (server_round - self.last_round) % RENEWAL == 0

    def found(self) -> FoundGroups | None:
        """Return what was found; None before."""
        if self.stage != FUSION:
            return None
        chosen, b, needed = self._result
        labels = self.candidates.labels
        groups = numbered([own[int(chosen)] for own in labels.values()])
        counts, losses, differences, errors = self._table
        return FoundGroups(
            self.last_round,
            dict(zip(labels, groups, strict=True)),
            counts.astype(np.int64),
            losses,
            differences,
            errors,
            int(chosen),
            float(b),
            float(needed),
        )

    def _enter(self, stage: int) -> None:
        self.stage, self.rounds = stage, 0

    def _vectors(self, reply: Reply) -> list[NDArray[Any]]:
        return [
            self._block.vector(under(f"{k}/", reply.arrays)) for k in range(self.num_candidates)
        ]

    # ------------------------------------------------------------------------------------------
    # Clients that come and go; saving
    # ------------------------------------------------------------------------------------------

    def insert(self, rows: Mapping[int, Row]) -> None:
        """Nothing: a new client has no place in the search."""

    def add_pending(self, rows: Mapping[int, Row]) -> None:
        """Nothing, likewise."""

    def remove(self, clients: Iterable[int], server_round: int = 0) -> None:
        """Forget clients; a group that loses its last one is out of every count."""
        for client in clients:
            for own in (self.probes, self.optimism, self._scores):
                own.pop(client, None)
            self.candidates.remove(client)
            self.unplaced.discard(client)

    def remember(self, clients: Iterable[int]) -> Callable[[], None]:
        """Return what puts everything back."""
        saved = {name: array.copy() for name, array in self.state_arrays().items()}
        return lambda: self.load_state_arrays(saved)

    def is_finite(self, clients: Iterable[int]) -> bool:
        """Return whether all models are finite."""
        own = self.candidates
        parts = [self.center, *self.probes.values(), *own.models, *own.uploads.values()]
        return all(bool(np.isfinite(part).all()) for part in parts)

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the variables as plain arrays."""
        tried, d = self.candidates, self._block.size
        count = len(tried)
        return {
            "stage": np.array([self.stage, self.rounds, self.last_round]),
            "lam": np.array([self.lam]),
            "center": self.center,
            "probes": _stacked(self.probes, (d,), self._block.dtype),
            "probe_ids": _ids(self.probes),
            "optimism": _stacked(self.optimism, (1,), np.dtype(np.float64)),
            "optimism_ids": _ids(self.optimism),
            "labels": _stacked(tried.labels, (count,), np.dtype(np.int64)),
            "label_ids": _ids(tried.labels),
            "uploads": _stacked(tried.uploads, (count, d), self._block.dtype),
            "upload_ids": _ids(tried.uploads),
            "scores": _stacked(self._scores, (2, count), np.dtype(np.float64)),
            "score_ids": _ids(self._scores),
            "unplaced": _ids(sorted(self.unplaced)),
            "table": self._table,
            "result": self._result,
            **{f"models.{k}": models for k, models in enumerate(tried.models)},
        }

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned.

        Raises
        ------
        ValueError
            If an array is missing, or they do not fit together.
        """
        expected = GroupSearch(self.consensus_rounds, self._block).state_arrays()
        if missing := sorted(expected.keys() - arrays.keys()):
            raise ValueError(
                f"The saved search for groups lacks {missing}. It was saved by a run with a "
                "penalty of its own, or cut short."
            )
        models = [arrays[f"models.{k}"] for k in range(len(arrays) - len(expected))]
        tables = ("probes", "optimism", "labels", "uploads", "scores")
        sizes = {name: f"{name.rstrip('s')}_ids" for name in tables}
        if (
            any(part.ndim != 2 or part.shape[1] != self._block.size for part in models)
            or arrays["center"].shape not in ((0,), (self._block.size,))
            or any(len(arrays[name]) != len(arrays[ids]) for name, ids in sizes.items())
            or arrays["labels"].shape[1:] != (len(models),)
            or arrays["uploads"].shape[1:] != (len(models), self._block.size)
            or arrays["stage"].shape != (3,)
        ):
            raise ValueError(
                "The saved search for groups does not fit this model. Continue with the model and "
                "the settings of the saved run."
            )
        self.stage, self.rounds, self.last_round = map(int, arrays["stage"])
        self.lam = float(arrays["lam"][0])
        self.center = np.array(arrays["center"])
        self.candidates = Candidates()
        tried = self.candidates
        self.probes, self.optimism, tried.labels, tried.uploads, self._scores = (
            {int(c): np.array(own) for c, own in zip(arrays[ids], arrays[name], strict=True)}
            for name, ids in sizes.items()
        )
        self.unplaced = {int(client) for client in arrays["unplaced"]}
        self._table, self._result = np.array(arrays["table"]), np.array(arrays["result"])
        tried.models = [np.array(part) for part in models]


def lambda_between(b: float, needed: float) -> float:
    """Return lambda for groups whose models are b or more apart.

    b/a: SCAD is flat beyond a lambda, so that no two groups pull on each other, and the groups are
    held together as firmly as that allows. With one group (b is NaN) twice what holding it takes.
    """
    return b / NO_FUSION.a if np.isfinite(b) else 2 * needed


def scad(lam: float) -> SmoothedSCAD:
    """Return the penalty of a lambda; the paper's a and xi, or less where xi is not below."""
    return replace(NO_FUSION, lam=lam, xi=min(NO_FUSION.xi, lam / 10) if lam else NO_FUSION.xi)


def candidate_arrays(vectors: Sequence[NDArray[Any]], block: Block) -> Arrays | None:
    """Return the further candidates' arrays as they travel: the first is in the anchor."""
    arrays: Arrays = {}
    for k, vector in enumerate(vectors[1:], start=1):
        arrays |= prefixed(f"{k}/", block.arrays(vector))
    return arrays or None


def _reported(reply: Reply, name: str, count: int) -> NDArray[np.float64]:
    """Return what a client says of every model; NaN where it says nothing, or nothing finite."""
    own = np.array([reply.metrics.get(f"{name}-{k}", np.nan) for k in range(count)])
    return np.where(np.isfinite(own), own, np.nan)


def _ids(clients: Iterable[int]) -> NDArray[np.uint64]:
    return np.array(list(clients), dtype=np.uint64)


def _stacked(
    rows: Mapping[int, NDArray[Any]], shape: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    return np.array(list(rows.values()), dtype=dtype).reshape(len(rows), *shape)
