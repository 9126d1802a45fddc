"""The client of FPFC; the strategy and the paper are in `fl_admm_strategies.FPFC`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_admm_strategies import FPFC
from fl_admm_strategies.algorithms.fpfc import messages
from fl_admm_strategies.algorithms.fpfc.messages import FPFCInstruction, FPFCMessage
from fl_admm_strategies.maths.blocks import Arrays, prefixed, under
from fl_admm_strategies.runtime.messages.records import split_groups

from ..toolkit.data.batches import Loader
from ..toolkit.data.holdout import TooFewSamplesError, folds, hold_out, in_parts
from ..toolkit.round.torch_client import TorchClient, read_only, to_numpy
from ..toolkit.solving.objective import LocalObjective, ProximalTerm
from ..toolkit.solving.solvers import Drawn, LocalProblem
from ..toolkit.solving.steps import Evaluation, MethodSteps, Minimisation, Reply, Scalars, Steps

PARTS = 20
"""Of the data that groups are compared on: their losses say how sure the mean loss is."""


class FPFCClient(TorchClient[FPFCMessage]):
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

    def steps(self, message: FPFCMessage, config: Scalars) -> MethodSteps:
        """Do what a message asks for: a round of FPFC, or a stage of the search for groups."""
        if isinstance(message, messages.ScoreInstruction):
            return {}, (yield from self._scores(message))
        if isinstance(message, messages.TrialInstruction):
            return (yield from self._trials(message))
        assert isinstance(message, FPFCInstruction)
        return (yield from self._round(message, config))

    def _round(self, message: FPFCInstruction, config: Scalars) -> MethodSteps:
        """Run (5): omega <- omega - alpha [grad f_i(omega) + rho (omega - zeta_i)], T_i epochs."""
        self.load(message.anchor)
        names = self._clustered(message.clustered)
        anchor = {name: message.anchor[name] for name in names}
        term = ProximalTerm(message.rho, read_only(anchor, self.device))
        start = message.start or (self.memory.require(config) if message.rho else anchor)
        self.load_block(start)
        moving = names if isinstance(message, messages.NewcomerInstruction) else None
        kept, held_out = self._split(message)
        objective = LocalObjective([term], moving=moving)
        metrics = yield Minimisation(objective, message.lr, message.local_epochs, kept)
        self.memory.keep(config, to_numpy(self.block(names)))
        upload = self.arrays()
        if held_out is None:
            return upload, metrics
        if isinstance(message, messages.PathInstruction):
            measured = self.measure(self._on(held_out))[message.monitor]
            return upload, {**metrics, f"{messages.VALIDATION}-{message.monitor}": measured}
        if isinstance(message, messages.LateInstruction) and message.groups is not None:
            metrics = {**metrics, messages.HELD_OUT_LOSS: self._loss(held_out)}
            for label in dict.fromkeys(name.partition("/")[0] for name in message.groups):
                self.load_block(under(f"{label}/", message.groups))
                metrics[f"{messages.HELD_OUT_LOSS}-{label}"] = self._loss(held_out)
        return upload, metrics

    def answer_handshake(self, parameters: list[NDArray[Any]], config: Scalars) -> Reply:
        """Return the loss under every group's model; before a path, check what is to be measured.

        Raises
        ------
        ValueError
            If there is nothing to measure on, or the metric is unknown.
        """
        if "num-groups" in config:
            question, losses = messages.FPFCQuestion.decode(parameters, config), Scalars()
            for k in range(question.num_groups):
                self.load(under(f"{k}/", question.models))
                losses[f"{messages.TRAINING_LOSS}-{k}"] = self._loss()
            return [], self.train_size(), losses
        asked = messages.PathQuestion.decode(parameters, config)
        _, held_out = self._split(asked)
        if held_out is None or self._on(held_out).num_examples() == 0:
            raise ValueError(
                "The client's validation_loader is empty, expected samples to choose lambda by. "
                "Give it some, or leave it out, and a share of the training data is held out."
            )
        known = ["loss", *self.metrics]
        if asked.monitor not in known:
            raise ValueError(
                f"monitor is {asked.monitor!r}, expected one of what the client measures: "
                f"{', '.join(known)}. Give the client this metric, or LambdaPath another monitor."
            )
        return [], self.train_size(), {}

    def _trials(self, message: messages.TrialInstruction) -> MethodSteps:
        """Train the clustered block of every model, the rest fixed."""
        names = self._clustered(message.clustered)
        kept, held_out = self._split(message)
        upload: Arrays = {}
        metrics: Scalars = {}
        for k in range(message.num_models):
            self._load_model(message, k)
            objective = LocalObjective(moving=names)
            found = yield Minimisation(objective, message.lr, message.local_epochs, kept)
            metrics = metrics or found
            upload |= prefixed(f"{k}/", to_numpy(self.block(names)))
        if isinstance(message, messages.ProbeInstruction) and held_out is None:
            metrics = {**metrics, **(yield from self._optimism(message, names))}
        return upload, metrics

    def _load_model(self, message: messages.TrialInstruction, k: int) -> None:
        self.load(message.anchor)  # buffers too, which the last one changed
        if k:
            self.load_block(under(f"{k}/", message.more or {}))

    def _scores(self, message: messages.ScoreInstruction) -> Steps[Scalars]:
        """Return the models' losses, how sure their differences are, and gradient norms."""
        names = self._clustered(message.clustered)
        kept, held_out = self._split(message)
        is_recheck = isinstance(message, messages.RecheckInstruction)
        data = {messages.TRAINING_LOSS: self.train_problem.loader if is_recheck else kept}
        if held_out is not None:
            data[messages.HELD_OUT_LOSS] = held_out
        split, metrics = self.train_problem.split_batch, Scalars()
        parts = {name: in_parts(loader, split, PARTS) for name, loader in data.items()}
        of_parts: dict[str, list[NDArray[np.float64]]] = {name: [] for name in data}
        for k in range(message.num_models):
            self._load_model(message, k)
            for name, before in of_parts.items():
                losses, sizes = self._losses(parts[name])
                metrics[f"{name}-{k}"] = float(np.average(losses, weights=sizes))
                for j, others in enumerate(before):
                    if len(losses) > 1 and (is_recheck or name == messages.HELD_OUT_LOSS):
                        error = error_of_mean(losses - others, sizes)
                        metrics[f"{name}-{messages.ERROR}-{j}-{k}"] = error
                before.append(losses)
            if not is_recheck:  # a re-check sets no lambda, and with a loop it is an epoch
                norm = yield from self._gradient_norm(message.lr, names)
                metrics[f"{messages.GRADIENT_NORM}-{k}"] = norm
        return metrics

    def _gradient_norm(self, lr: float, names: list[str]) -> Steps[float]:
        """Return ||grad f_i|| over the clustered block, where the model is.

        Where only a loop of one's own knows f: how far an epoch of it moves the block, over lr and
        the number of its steps, which for SGD is the norm of its mean gradient.
        """
        if self.knows_loss:
            return _norm(self._gradient(names))
        before, objective = self.block(names), LocalObjective(moving=names)
        yield Minimisation(objective, lr, 1)
        moved = _flat({name: t - before[name] for name, t in self.block(names).items()})
        return _norm(moved) / (lr * max(objective.steps, 1))

    def _optimism(self, message: messages.ProbeInstruction, names: list[str]) -> Steps[Scalars]:
        """Return how much too low the training loss is where the client has just trained to.

        That is the mean loss by cross-validation, each fold by a model that went the same way
        without it, less the training loss.
        """
        problem = self.train_problem
        seed = message.held_out_seed
        try:
            parts = folds(problem.loader, problem.split_batch, message.folds, seed)
        except TooFewSamplesError:
            return {messages.NO_VOTE: 1}
        optimism = -self._loss()
        total = problem.num_examples()
        for kept, fold in parts:
            self.load(message.anchor)
            objective = LocalObjective(moving=names)
            yield Minimisation(objective, message.lr, message.local_epochs, kept)
            share = self._on(fold).num_examples() / total
            optimism += share * self._loss(fold)
        return {messages.OPTIMISM: optimism}

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

    def _split(self, message: FPFCMessage | messages.PathQuestion) -> tuple[Loader, Loader | None]:
        """Return the data to train on, and those that are held out; None: all are trained on."""
        problem = self.train_problem
        if not isinstance(
            message, messages.HoldOutInstruction | messages.TrialInstruction | messages.PathQuestion
        ):
            return problem.loader, None
        if not self.knows_loss and not self.has_own_measure:
            raise ValueError(
                f"{type(self).__name__} has a minimise() of its own and neither a loss_fn nor a "
                "measure(), so it cannot say which groups suit it. Give it one of them, or the "
                "strategy a penalty."
            )
        if self.validation_loader is not None:
            return problem.loader, self.validation_loader
        share, seed = message.held_out, message.held_out_seed
        try:
            return hold_out(problem.loader, problem.split_batch, share, seed)
        except TooFewSamplesError:
            if isinstance(message, messages.PathInstruction | messages.PathQuestion):
                raise
            return problem.loader, None

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
        groups = split_groups(parameters, config)
        dual = groups.pop(messages.MEAN_DUAL, None)
        loss, num_examples, metrics = yield from self.evaluate_models(groups)
        if dual is not None and self.knows_loss:
            names = self._clustered(list(dual))
            self.load(groups["personal"])
            sum_of_duals = _flat(read_only(dual, self.device))
            metrics[messages.STATIONARITY] = _norm(self._gradient(names) + sum_of_duals)
            self.load(groups["cluster"])
            metrics[messages.CLUSTER_GRADIENT] = _norm(self._gradient(names))
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
