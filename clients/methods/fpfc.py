"""The client of FPFC; the strategy and the paper are in `fl_admm_strategies.FPFC`."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_admm_strategies import FPFC
from fl_admm_strategies.algorithms.fpfc import messages
from fl_admm_strategies.maths.blocks import Arrays, prefixed, under
from fl_admm_strategies.runtime.messages.records import split_groups

from ..toolkit.data.batches import Loader
from ..toolkit.data.holdout import TooFewSamplesError, hold_out, in_parts
from ..toolkit.round.mirror import Turn
from ..toolkit.round.proximal import ProximalClient
from ..toolkit.round.torch_client import read_only, to_numpy
from ..toolkit.solving.objective import LocalObjective
from ..toolkit.solving.solvers import Drawn, LocalProblem
from ..toolkit.solving.steps import Evaluation, MethodSteps, Minimisation, Reply, Scalars, Steps

PARTS = 20
"""Of the data that groups are compared on: their losses say how sure the mean loss is."""


class FPFCClient(ProximalClient):
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
    instruction = messages.FPFCMessage
    block_setting = "clustered"
    _kept: Loader

    def __init__(self, *args: Any, validation_loader: Loader | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.validation_loader = validation_loader

    def steps(self, message: Any, config: Scalars) -> MethodSteps:
        """Do what a message asks for: a round of FPFC, or a stage of the search for groups."""
        if isinstance(message, messages.ScoreInstruction):
            return {}, (yield from self._scores(message))
        if isinstance(message, messages.TrialInstruction):
            return (yield from self._trials(message))
        return (yield from super().steps(message, config))

    # ------------------------------------------------------------------------------------------
    # A round of FPFC
    # ------------------------------------------------------------------------------------------

    def training_data(self, message: messages.FPFCInstruction) -> Loader:
        """Return the training data that are not held out in this turn."""
        return self._kept

    def moving(self, message: messages.FPFCInstruction) -> list[str]:
        """Return all trained parameters; of a client that is new after the run the block."""
        if isinstance(message, messages.NewcomerInstruction):
            return message.optimised
        return super().moving(message)

    def local_steps(self, turn: Turn) -> Steps[tuple[Scalars, Arrays, Arrays]]:
        """Run (5); then measure on held-out samples what the message asks for.

        On a path of lambdas that is the upload; after the search the groups' models as well.
        """
        message = turn.message
        self._kept, held_out = self._split(message)
        metrics, upload, kept = yield from super().local_steps(turn)
        del self._kept  # copies of the samples, which a client that is kept need not hold
        if isinstance(message, messages.PathInstruction):
            metrics[f"{messages.VALIDATION}-{message.monitor}"] = self._monitored(message, held_out)
        elif isinstance(message, messages.LateInstruction) and held_out is not None:
            metrics[messages.HELD_OUT_LOSS] = self._loss(held_out)
            groups = message.groups or {}
            for label in dict.fromkeys(name.partition("/")[0] for name in groups):
                self.load_block(under(f"{label}/", groups))
                metrics[f"{messages.HELD_OUT_LOSS}-{label}"] = self._loss(held_out)
        return metrics, upload, kept

    def _monitored(self, message: messages.PathInstruction, held_out: Any) -> float:
        """Return the metric of a path of lambdas, of the model as it is uploaded."""
        measured = self.measure(self._on(held_out))
        if message.monitor not in measured:
            raise ValueError(
                f"monitor is {message.monitor!r}, expected one of {', '.join(measured)}, which the "
                "client measures. Give the client this metric, or LambdaPath another monitor."
            )
        return float(measured[message.monitor])

    def answer_handshake(self, parameters: list[NDArray[Any]], config: Scalars) -> Reply:
        """Return the loss under the model of every group of an earlier run."""
        question, losses = messages.FPFCQuestion.decode(parameters, config), Scalars()
        for k in range(question.num_groups):
            self.load(under(f"{k}/", question.models))
            losses[f"{messages.TRAINING_LOSS}-{k}"] = self._loss(self.train_loader)
        return [], self.train_size(), losses

    # ------------------------------------------------------------------------------------------
    # The search for groups
    # ------------------------------------------------------------------------------------------

    def _trials(self, message: messages.TrialInstruction) -> MethodSteps:
        """Train the clustered block of every model, the rest fixed."""
        names = message.optimised
        kept, _ = self._split(message)
        upload: Arrays = {}
        metrics: Scalars = {}
        for k in range(message.num_models):
            self._load_model(message, k)
            objective = LocalObjective(moving=names)
            found = yield Minimisation(objective, message.lr, message.local_epochs, kept)
            metrics = metrics or found
            upload |= prefixed(f"{k}/", to_numpy(self.block(names)))
        return upload, metrics

    def _load_model(self, message: messages.TrialInstruction, k: int) -> None:
        self.load(message.model)  # buffers too, which the last one changed
        if k:
            self.load_block(under(f"{k}/", message.more or {}))

    def _scores(self, message: messages.ScoreInstruction) -> Steps[Scalars]:
        """Return the models' losses, how sure their differences are, and gradient norms."""
        is_recheck = isinstance(message, messages.RecheckInstruction)
        kept, held_out = self._split(message)
        training = self.train_loader if is_recheck else kept
        metrics = self._losses(message, messages.TRAINING_LOSS, training)
        if not is_recheck:
            for k in range(message.num_models):
                self._load_model(message, k)
                norm = yield from self._gradient_norm(message)
                metrics[f"{messages.GRADIENT_NORM}-{k}"] = norm
        if held_out is not None:
            metrics |= self._losses(message, messages.HELD_OUT_LOSS, held_out)
        return metrics

    def _losses(self, message: messages.ScoreInstruction, name: str, loader: Loader) -> Scalars:
        """Return the models' mean losses on some data, and the errors of their differences."""
        parts = in_parts(loader, self.train_problem.split_batch, PARTS)
        sizes = np.array([self._on([part]).num_examples() for part in parts])
        losses = np.empty((message.num_models, len(parts)))
        for k, row in enumerate(losses):
            self._load_model(message, k)
            row[:] = [self._loss_of(part, size) for part, size in zip(parts, sizes, strict=True)]
        found: Scalars = {
            f"{name}-{k}": float(np.average(row, weights=sizes)) for k, row in enumerate(losses)
        }
        if len(parts) > 1:
            for j, k in combinations(range(len(losses)), 2):
                error = error_of_mean(losses[k] - losses[j], sizes)
                found[f"{name}-{messages.ERROR}-{j}-{k}"] = error
        return found

    def _loss_of(self, batch: Any, size: int) -> float:
        """Return the model's mean loss on one batch, without the metrics of a test."""
        problem = self._on(Drawn([batch], size))
        if self.has_own_measure:
            return self._loss(problem.loader)
        self.model.eval()
        with torch.no_grad():
            return float(problem.loss(next(problem.batches())))

    def _gradient_norm(self, message: messages.ScoreInstruction) -> Steps[float]:
        """Return ||grad f_i|| over the clustered block, where the model is.

        Where only a loop of one's own knows f: how far an epoch of it moves the block, over lr and
        the number of its steps, which for SGD is the norm of its mean gradient.
        """
        names = message.optimised
        if self.knows_loss:
            return _norm(self._gradient(names))
        before, objective = self.block(names), LocalObjective(moving=names)
        yield Minimisation(objective, message.lr, 1)
        moved = _flat({name: t - before[name] for name, t in self.block(names).items()})
        return _norm(moved) / (message.lr * max(objective.steps, 1))

    def _loss(self, loader: Loader) -> float:
        """Return the model's mean loss on some data of the client."""
        return float(self.measure(self._on(loader))["loss"])

    def _on(self, loader: Loader) -> LocalProblem:
        """Return the client's problem on other data of its own."""
        return replace(self.train_problem, loader=loader)

    def _split(self, message: messages.AnyMessage) -> tuple[Loader, Loader | None]:
        """Return the data to train on, and those that are held out; None: all are trained on."""
        if not isinstance(message, messages.HoldOutInstruction | messages.TrialInstruction):
            return self.train_loader, None
        if not self.knows_loss and not self.has_own_measure:
            raise ValueError(
                f"{type(self).__name__} has a minimise() of its own and neither a loss_fn nor a "
                "measure(), so it cannot say which groups suit it. Give it one of them, or the "
                "strategy a penalty."
            )
        if self.validation_loader is not None:
            return self.train_loader, self.validation_loader
        split, share, seed = self.train_problem.split_batch, message.held_out, message.held_out_seed
        try:
            return hold_out(self.train_loader, split, share, seed)
        except TooFewSamplesError:
            if isinstance(message, messages.PathInstruction):
                raise
            return self.train_loader, None

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
            names = list(dual)
            self.load(groups["personal"])
            sum_of_duals = _flat(read_only(dual, self.device))
            metrics[messages.STATIONARITY] = _norm(self._gradient(names) + sum_of_duals)
            self.load(groups["cluster"])
            metrics[messages.CLUSTER_GRADIENT] = _norm(self._gradient(names))
        return loss, num_examples, metrics

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


def error_of_mean(values: NDArray[np.float64], sizes: NDArray[Any]) -> float:
    """Return the standard error of the mean of values, each itself a mean over so many samples."""
    weights = sizes / sizes.sum()
    rest = values - weights @ values
    return float(np.linalg.norm(weights * rest) * np.sqrt(len(values) / (len(values) - 1)))
