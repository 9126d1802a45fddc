"""The client of FPFC; the strategy and the paper are in `fl_admm_strategies.FPFC`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_admm_strategies import FPFC
from fl_admm_strategies.algorithms.fpfc.path import VALIDATION
from fl_admm_strategies.algorithms.fpfc.types import (
    ERROR,
    GRADIENT_NORM,
    HELD_OUT_LOSS,
    NO_VOTE,
    OPTIMISM,
    TRAINING_LOSS,
    FPFCEvaluation,
    FPFCInstruction,
    FPFCQuestion,
)
from fl_admm_strategies.maths.blocks import Arrays, prefixed, under

from ..toolkit.data.batches import Loader
from ..toolkit.data.holdout import TooFewSamplesError, folds, hold_out, in_parts
from ..toolkit.round.torch_client import TorchClient, read_only, to_numpy
from ..toolkit.solving.objective import LocalObjective, ProximalTerm
from ..toolkit.solving.solvers import Drawn, LocalProblem
from ..toolkit.solving.steps import Evaluation, MethodSteps, Minimisation, Reply, Scalars, Steps

PARTS = 20
"""Of the data that groups are compared on: their losses say how sure the mean loss is."""


class FPFCClient(TorchClient[FPFCInstruction]):
    """Client of `FPFC`: T_i epochs of (5) from its own last iterate.

    The clustered block omega_i is pulled towards the server's zeta_i; arrays that are not clustered
    start from the server's and are trained without a proximal term (section 6.1). Without a pull
    it starts at the anchor: a group's model, say.

    Parameters
    ----------
    *args, **kwargs
        Those of `TorchClient`.
    validation_loader : iterable of batches, optional
        Where the strategy finds lambda: data that is never trained on, by which the groups, or
        lambda, are chosen. By default a share of the training data is held out as long as the
        search lasts, or the path (see `hold_out`), by a seed of the run and the client.

    Examples
    --------
    >>> def client_fn(context: Context):
    ...     train, test = load_data(context.node_config["partition-id"])
    ...     return FPFCClient(context, Net(), train, nn.CrossEntropyLoss(),
    ...                       test_loader=test, metrics={"accuracy": accuracy}).to_client()
    """

    strategy = FPFC
    instruction = FPFCInstruction

    def __init__(self, *args: Any, validation_loader: Loader | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.validation_loader = validation_loader

    def steps(self, asked: FPFCInstruction, config: Scalars) -> MethodSteps:
        """Run (5): omega <- omega - alpha [grad f_i(omega) + rho (omega - zeta_i)], T_i epochs."""
        if asked.candidates is not None:
            return (yield from self._search(asked))
        self.load(asked.anchor)
        names = self._clustered(asked.clustered)
        anchor = {name: asked.anchor[name] for name in names}
        term = ProximalTerm(asked.rho, read_only(anchor, self.device))
        start = asked.start or (self.memory.require(config) if asked.rho else anchor)
        self.load_block(start)
        moving = names if asked.others_fixed else None
        kept, held_out = self._split_in_search(asked)
        objective = LocalObjective([term], moving=moving)
        metrics = yield Minimisation(objective, asked.lr, asked.local_epochs, kept)
        self.memory.keep(config, to_numpy(self.block(names)))
        upload = self.arrays()
        if asked.more is not None and held_out is not None:  # a new client's choice of a group
            metrics = {**metrics, HELD_OUT_LOSS: self._loss(held_out)}
            for label in dict.fromkeys(name.partition("/")[0] for name in asked.more):
                self.load_block(under(f"{label}/", asked.more))
                metrics[f"{HELD_OUT_LOSS}-{label}"] = self._loss(held_out)
        if asked.monitor is not None and held_out is not None:
            measured = self.measure(self._on(held_out))
            metrics = {**metrics, f"{VALIDATION}-{asked.monitor}": measured[asked.monitor]}
        return upload, metrics

    def answer_handshake(self, parameters: list[NDArray[Any]], config: Scalars) -> Reply:
        """See to it that there are samples to validate on, and that the metric is known.

        A client that is new after the run returns its loss under the model of every group.

        Raises
        ------
        ValueError
            If not.
        """
        if "num-groups" in config:
            asked, losses = FPFCQuestion.decode(parameters, config), Scalars()
            for k in range(asked.num_groups):
                self.load(under(f"{k}/", asked.models))
                losses[f"{TRAINING_LOSS}-{k}"] = self._loss()
            return [], self.train_size(), losses
        _, held_out = self._split(float(config["held_out"]), int(config["held_out_seed"]))
        if self._on(held_out).num_examples() == 0:
            raise ValueError(
                "The client's validation_loader is empty, expected samples to choose lambda by. "
                "Give it some, or leave it out, and a share of the training data is held out."
            )
        known = ["loss", *self.metrics]
        if config["monitor"] not in known:
            raise ValueError(
                f"monitor is {config['monitor']!r}, expected one of what the client measures: "
                f"{', '.join(known)}. Give the client this metric, or LambdaPath another monitor."
            )
        return [], self.train_size(), {}

    def _search(self, asked: FPFCInstruction) -> MethodSteps:
        """Train the clustered block of every candidate, the rest fixed; or measure each."""
        names = self._clustered(asked.clustered)
        kept, held_out = self._split_in_search(asked)
        if not asked.local_epochs:
            return {}, (yield from self._scores(asked, names, kept, held_out))
        upload: Arrays = {}
        metrics: Scalars = {}
        for k in range(asked.candidates or 0):
            self._load_candidate(asked, k)
            objective = LocalObjective(moving=names)
            found = yield Minimisation(objective, asked.lr, asked.local_epochs, kept)
            metrics = metrics or found
            upload |= prefixed(f"{k}/", to_numpy(self.block(names)))
        if asked.folds is not None and held_out is None:
            metrics = {**metrics, **(yield from self._optimism(asked, names))}
        return upload, metrics

    def _load_candidate(self, asked: FPFCInstruction, k: int) -> None:
        self.load(asked.anchor)  # buffers too, which the last one changed
        if k:
            self.load_block(under(f"{k}/", asked.more or {}))

    def _scores(
        self, asked: FPFCInstruction, names: list[str], kept: Loader, held_out: Loader | None
    ) -> Steps[Scalars]:
        """Return the candidates' losses, how sure their differences are, and gradient norms."""
        data = {TRAINING_LOSS: self.train_problem.loader if asked.in_full else kept}
        if held_out is not None:
            data[HELD_OUT_LOSS] = held_out
        split, metrics = self.train_problem.split_batch, Scalars()
        parts = {name: in_parts(loader, split, PARTS) for name, loader in data.items()}
        of_parts: dict[str, list[NDArray[np.float64]]] = {name: [] for name in data}
        for k in range(asked.candidates or 0):
            self._load_candidate(asked, k)
            for name, before in of_parts.items():
                losses, sizes = self._losses(parts[name])
                metrics[f"{name}-{k}"] = float(np.average(losses, weights=sizes))
                for j, others in enumerate(before):
                    if len(losses) > 1 and (asked.in_full or name == HELD_OUT_LOSS):
                        error = error_of_mean(losses - others, sizes)
                        metrics[f"{name}-{ERROR}-{j}-{k}"] = error
                before.append(losses)
            if not asked.in_full:  # a re-check sets no lambda, and with a loop it is an epoch
                metrics[f"{GRADIENT_NORM}-{k}"] = yield from self._gradient_norm(asked, names)
        return metrics

    def _gradient_norm(self, asked: FPFCInstruction, names: list[str]) -> Steps[float]:
        """Return ||grad f_i|| over the clustered block, where the model is.

        Where only a loop of one's own knows f: how far an epoch of it moves the block, over lr and
        the number of its steps, which for SGD is the norm of its mean gradient.
        """
        if self.knows_loss:
            return _norm(self._gradient(names))
        before, objective = self.block(names), LocalObjective(moving=names)
        yield Minimisation(objective, asked.lr, 1)
        moved = _flat({name: t - before[name] for name, t in self.block(names).items()})
        return _norm(moved) / (asked.lr * max(objective.steps, 1))

    def _optimism(self, asked: FPFCInstruction, names: list[str]) -> Steps[Scalars]:
        """Return how much too low the training loss is where the client has just trained to.

        That is the mean loss by cross-validation, each fold by a model that went the same way
        without it, less the training loss.
        """
        problem = self.train_problem
        try:
            parts = folds(
                problem.loader, problem.split_batch, asked.folds or 0, asked.held_out_seed or 0
            )
        except TooFewSamplesError:
            return {NO_VOTE: 1}
        optimism = -self._loss()
        total = problem.num_examples()
        for kept, fold in parts:
            self.load(asked.anchor)
            objective = LocalObjective(moving=names)
            yield Minimisation(objective, asked.lr, asked.local_epochs, kept)
            share = self._on(fold).num_examples() / total
            optimism += share * self._loss(fold)
        return {OPTIMISM: optimism}

    def _loss(self, loader: Loader | None = None) -> float:
        """Return the model's mean loss, by default on all training data."""
        problem = self.train_problem if loader is None else self._on(loader)
        return float(self.measure(problem)["loss"])

    def _on(self, loader: Loader) -> LocalProblem:
        """Return the client's problem on other data of its own."""
        return replace(self.train_problem, loader=loader)

    def _losses(self, parts: list[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the model's mean loss on every part of some data, and how many samples it has."""
        problem, found = self.train_problem, []
        self.model.eval()
        with torch.no_grad():
            for part in parts:
                size = self._on([part]).num_examples()
                one = self._on(Drawn([part], size))
                if self.has_own_measure:
                    found.append((self.measure(one)["loss"], size))
                else:
                    (batch,) = one.batches()
                    found.append((float(problem.loss(batch)), size))
        losses, sizes = np.array(found, np.float64).T
        return losses, sizes

    def _split_in_search(self, asked: FPFCInstruction) -> tuple[Loader, Loader | None]:
        """Return what `_split` does; a client with too few samples, or no share, trains on all."""
        try:
            return self._split(asked.held_out, asked.held_out_seed)
        except TooFewSamplesError:
            if asked.monitor is not None:  # on a path, which has asked before round 1
                raise
            return self.train_problem.loader, None

    def _split(self, share: float | None, seed: int | None) -> tuple[Loader, Loader]:
        """Return the data to train on and those that are held out; without a share all, none."""
        problem = self.train_problem
        if share is None:
            return problem.loader, []
        if not self.knows_loss and not self.has_own_measure:
            raise ValueError(
                f"{type(self).__name__} has a minimise() of its own and neither a loss_fn nor a "
                "measure(), so it cannot say which groups suit it. Give it one of them, or the "
                "strategy a penalty."
            )
        if self.validation_loader is not None:
            return problem.loader, self.validation_loader
        return hold_out(problem.loader, problem.split_batch, share, seed or 0)

    def test(self, parameters: list[NDArray[Any]], config: Scalars) -> Steps[Evaluation]:
        """Evaluate the personal, cluster and global model; add the diagnostics the server asks for.

        Returns
        -------
        loss, num_examples, metrics
            As `TorchClient.test`. Where the message carries (1/m) sum_j v_ij: also
            ``stationarity``, ||grad f_i(omega_i) + (1/m) sum_j v_ij|| (KKT, (11)), and
            ``cluster-gradient-norm``, ||grad f_i(alpha_l)||, both over the clustered block and the
            training data.
        """
        asked = FPFCEvaluation.decode(parameters, config)
        models = {"personal": asked.personal, "cluster": asked.cluster, "global": asked.global_}
        _, num_examples, metrics = yield from self.evaluate_models(models)
        loss = float(metrics[f"{asked.headline or 'personal'}-loss"])
        if asked.mean_dual is not None and self.knows_loss:
            names = self._clustered(asked.clustered or [])
            dual = _flat(read_only(asked.mean_dual, self.device))
            self.load(asked.personal)
            metrics["stationarity"] = _norm(self._gradient(names) + dual)
            self.load(asked.cluster)
            metrics["cluster-gradient-norm"] = _norm(self._gradient(names))
        return loss, num_examples, metrics

    def _clustered(self, names: list[str]) -> list[str]:
        """Return the names of the clustered block; it must be made of trainable parameters."""
        return self.trainable(names, setting="FPFC(clustered=...)")

    def _gradient(self, names: list[str]) -> Tensor:
        """Return grad f_i over the clustered block, flat, where the model is."""
        self.model.eval()
        self.train_problem.set_gradient()
        gradient = _flat(self.model_arrays.gradients(names))
        self.model.zero_grad()
        return gradient


def _flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))


def error_of_mean(values: NDArray[np.float64], sizes: NDArray[np.float64]) -> float:
    """Return the standard error of the mean of values, each itself a mean over so many samples."""
    weights = sizes / sizes.sum()
    rest = values - weights @ values
    return float(np.linalg.norm(weights * rest) * np.sqrt(len(values) / (len(values) - 1)))
