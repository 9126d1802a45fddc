"""What every PyTorch client here shares: its model and data, its evaluation, its randomness."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import repeat
from typing import Any, Never, Protocol

import torch
from flwr.app import Context
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.maths.checks import check_positive
from fl_admm_strategies.runtime.algorithm import FINETUNED, FineTuningEvaluation
from fl_admm_strategies.runtime.messages.records import STEP_SUM, brief, parse_groups, split_groups

from ..data import batches
from ..data.batches import Loader, SplitBatch
from ..data.draws import bits
from ..models.arrays import ModelArrays, in_full, tensors_of, to_read
from ..solving.cohort import train_together
from ..solving.features import frozen_layers_applied
from ..solving.objective import LocalObjective
from ..solving.solvers import (
    SGD,
    LocalProblem,
    LossFn,
    OptimizerFn,
    SchedulerFn,
    gradient_descent,
    sgd_of,
)
from ..solving.steps import Evaluation, Measurement, Minimisation, Scalars, Steps
from ..solving.stepsum import StepMeter, sum_of_steps
from .base import Asked, MethodClient

BUFFERS = "b/"
"""Prefix of the buffers of a client's model in its memory."""

MetricFn = Callable[[Any, Any], float | Tensor]


class RunningMetric(Protocol):
    """A metric that sees the test data batch by batch, as torchmetrics' do."""

    def update(self, outputs: Any, targets: Any) -> None:
        """Take in a batch."""

    def compute(self) -> float | Tensor:
        """Return the metric over all batches since `reset`."""

    def reset(self) -> None:
        """Begin anew."""


def is_running(metric: MetricFn | RunningMetric) -> bool:
    """Return whether a metric sees one batch after another."""
    return all(hasattr(metric, name) for name in ("update", "compute", "reset"))


class TorchClient(MethodClient[Asked]):
    """Base of the clients with a PyTorch model: any `torch.nn.Module`, loaders and a loss.

    Parameters
    ----------
    context : Context
        The client's context, as `client_fn(context)` receives it.
    model : nn.Module
        Its ``state_dict()`` has the names and shapes of the strategy's initial arrays.
    train_loader : iterable of batches
        Training data: a `DataLoader`, or a list of batches.
    loss_fn : callable, optional
        ``loss_fn(outputs, targets)``: the mean over the batch. Without it the model returns its
        loss: as a number, as ``.loss``, or first in a tuple; a batch's dict is its keyword
        arguments. Where a model returns an object with ``.logits``, these are the outputs.
    test_loader : iterable of batches, optional
        Data for `evaluate`; without it the client refuses to evaluate.
    metrics : mapping of str to callable or RunningMetric, optional
        By name, e.g. accuracy: ``metric(outputs, targets)`` on all test outputs at once; or objects
        that see one batch after another (torchmetrics' do, `MeanMetric` makes one of a function).
        If all are of this kind, or the model returns its loss, outputs are not kept, and the loss
        is the mean of the batches', weighted by their samples.
    full_batch : bool (default: False)
        Gradient descent with one full-gradient step an epoch, in place of mini-batch SGD.
    optimizer_fn : callable (default: torch.optim.SGD)
        ``optimizer_fn(parameters, lr=lr)``, e.g. ``partial(SGD, momentum=0.9, weight_decay=1e-4)``.
        It is made anew for every local objective, so that momentum does not survive a round: the
        next one begins at another point with another objective.
    scheduler_fn : callable, optional
        ``scheduler_fn(optimizer)``, a schedule over the epochs of a round, e.g.
        ``partial(StepLR, step_size=2)``; it begins anew as the optimizer does.
    max_grad_norm : float, optional
        The norm to which every step's gradient, that of the whole objective, is clipped.
    split_batch : callable, optional
        Turns what a loader yields into (inputs, targets). By default pairs and dicts are understood
        (see `batches.split_batch`).
    device : str or torch.device (default: "cpu")
        Where the model is moved and trained. "auto": CUDA where this process may use it, else MPS,
        else the CPU. See docs/scaling.md.
    state_dir : str or path, optional
        Folder for what the client keeps between rounds, so that it outlives the run: see `Memory`.
        By default that is in ``context.state``.
    """

    cohort = staticmethod(train_together)
    stack_signature: Any = None
    """Its loss function and what it is compared by in a cohort, once it has been."""
    _seed: int | None = None  # of this round

    def __init__(
        self,
        context: Context,
        model: nn.Module,
        train_loader: Loader,
        loss_fn: LossFn | None = None,
        *,
        test_loader: Loader | None = None,
        metrics: Mapping[str, MetricFn | RunningMetric] | None = None,
        full_batch: bool = False,
        optimizer_fn: OptimizerFn = torch.optim.SGD,
        scheduler_fn: SchedulerFn | None = None,
        max_grad_norm: float | None = None,
        split_batch: SplitBatch | None = None,
        device: str | torch.device = "cpu",
        state_dir: str | os.PathLike[str] | None = None,
        **unknown: Never,
    ) -> None:
        super().__init__(context, state_dir=state_dir, **unknown)
        self.device = find_device(device)
        self.model = on_device(model, self.device)
        self.metrics = dict(metrics or {})
        self.full_batch = full_batch
        self.optimizer_fn = optimizer_fn
        self.scheduler_fn = scheduler_fn
        if max_grad_norm is not None:
            check_positive("max_grad_norm", max_grad_norm)
        self.max_grad_norm = max_grad_norm
        split = split_batch or batches.split_for(loss_fn)
        self.train_problem = LocalProblem(self.model, train_loader, loss_fn, split, self.device)
        self.test_problem = (
            None if test_loader is None else replace(self.train_problem, loader=test_loader)
        )

    def model_copies(self) -> list[tuple[Tensor, Tensor]]:
        """Return the tensors of its model, each with a copy of what is in it."""
        return [(tensor.detach(), tensor.detach().clone()) for tensor in tensors_of(self.model)]

    def perform(self, asked: Minimisation | Measurement) -> Any:
        """Do what a step asks for.

        Returns
        -------
        dict, or list of dict
            The metrics of a minimisation, or those of every model that was measured.

        Raises
        ------
        ValueError
            If `minimise` never asked for the terms of the objective.
        TypeError
            If it returned no dict.
        """
        self.begin_descent(asked)
        if isinstance(asked, Measurement):
            found = []
            for arrays in asked.models:
                self.load(arrays)
                found.append(self.measure(asked.problem))
            return found
        objective, name = asked.objective, f"{type(self).__name__}.minimise"
        with self.training_on(self.problem_of(asked)), objective.others_fixed(self.model) as moving:
            if objective.wants_step_sum and self.known_step(asked.lr) is None:
                objective.meter = StepMeter(moving)
            metrics = self.minimise(objective, lr=asked.lr, epochs=asked.epochs)
            reported = self.step_sum(asked, moving)
        self.note_initial_loss(objective)
        on_device(self.model, self.device)  # where a loop of one's own may have moved it from
        if asked.epochs and not objective.used:
            raise ValueError(
                f"{name} never asked the objective for its terms, so it trained on the loss alone, "
                "which is another method. Call objective.add_gradient(model) between backward() "
                "and step(), add objective.penalty(model) to the loss, or, where the optimizer "
                "makes the gradients, call objective.attach(optimizer, model) once."
            )
        if not isinstance(metrics, dict):
            raise TypeError(
                f"{name} returned {metrics!r}, expected a dict of numbers by name, e.g. "
                '{"loss": 0.5}.'
            )
        return reported | metrics

    def after_step(self, asked: Minimisation | Measurement, found: Any) -> Any:
        """Return what `perform` does, after a step in a stack that found a loss, or the metrics."""
        if isinstance(asked, Measurement):
            return found
        self.note_initial_loss(asked.objective)
        return {**self.step_sum(asked, {}), "loss": found}

    def known_step(self, lr: float) -> SGD | None:
        """Return how `minimise` steps, where the step sizes follow from that."""
        if self.own_loop or self.max_grad_norm is not None:
            return None
        return sgd_of(lr, self.optimizer_fn, self.scheduler_fn)

    def step_sum(self, asked: Minimisation, moving: Mapping[str, nn.Parameter]) -> Scalars:
        """Return the sum of a round's step sizes as a metric, where it is asked for and known."""
        objective, step = asked.objective, self.known_step(asked.lr)
        if not objective.wants_step_sum:
            return {}
        found = math.nan
        if objective.meter is not None:
            found = objective.meter.measured(moving, objective.steps)
        elif step is not None:
            found = sum_of_steps(step.lr, step.momentum, objective.steps)
        return {STEP_SUM: found} if math.isfinite(found) else {}

    def problem_of(self, asked: Minimisation | Measurement) -> LocalProblem:
        """Return the loss that a step is taken on, or that is measured."""
        if isinstance(asked, Measurement):
            found: LocalProblem = asked.problem
            return found
        loader = self.train_loader if asked.loader is None else asked.loader
        return replace(self.train_problem, loader=loader, seed=self._seed)

    @contextmanager
    def training_on(self, problem: LocalProblem) -> Iterator[None]:
        """Let the client train on another problem meanwhile."""
        before = self.train_problem
        self.train_problem = problem
        try:
            yield
        finally:
            self.train_problem = before

    def note_initial_loss(self, objective: LocalObjective) -> None:
        """Keep f before the first step of a round, from the first objective that knows it."""
        if self.initial_loss is None:
            self.initial_loss, self.constant_loss = objective.first_loss, objective.constant_loss

    def draws(self, count: int = 1) -> Iterator[Loader]:
        """Yield what steps are taken on, without end, for methods that count these and not epochs.

        So many batches after another, beginning anew when the loader ends; or always all samples,
        where the client takes full-gradient steps.
        """
        if self.full_batch:
            yield from repeat(self.train_loader)
        drawn = self.train_problem.draws(count)
        for number in itertools.count():  # other clients may have drawn since the last
            if self._seed is not None:
                self._seed_torch(bits(self._seed, number))
            yield next(drawn)

    @property
    def train_loader(self) -> Loader:
        """The training data."""
        return self.train_problem.loader

    @property
    def test_loader(self) -> Loader | None:
        """The data for `evaluate`, where it was given."""
        return None if self.test_problem is None else self.test_problem.loader

    def get_parameters(self, config: Scalars) -> list[NDArray[Any]]:
        """Return the arrays of the model's ``state_dict``."""
        return list(self.model_arrays.complete({}).values())

    def answer_about_names(self, names: list[str]) -> Arrays:
        """Return which of the server's initial arrays the model trains."""
        return self.model_arrays.answer(names)

    def untrained(self, names: list[str]) -> Arrays:
        """Return frozen arrays and second names, for a strategy that did not ask about them."""
        known = {*self.model_arrays.tied, *self.model_arrays.frozen}
        return self.model_arrays.read([name for name in names if name in known])

    @cached_property
    def model_arrays(self) -> ModelArrays:
        """What of the model travels; what is trained is settled with the first message."""
        return ModelArrays(self.model)

    def travelling(self, state: Arrays) -> Arrays:
        """Return what travels of a ``state_dict``, by name."""
        names, prefix = self.model_arrays.names, self.model_arrays.prefix
        return {name: state[prefix + name] for name in names if prefix + name in state}

    def arrays(self) -> Arrays:
        """Return what of the model travels, by name; see `ModelArrays`."""
        return self.model_arrays.read(to_send=self.only_reads)

    def buffer_names(self) -> list[str]:
        """Return their names."""
        return self.model_arrays.buffers

    def train_size(self) -> int:
        """Return n_i, the number of training examples.

        Raises
        ------
        ValueError
            If there are none.
        """
        num_examples = self.train_problem.num_examples()
        if num_examples == 0:
            raise ValueError("The client's train_loader is empty.")
        return num_examples

    def test(self, parameters: list[NDArray[Any]], config: Scalars) -> Steps[Evaluation]:
        """Evaluate every model of the message on the test data, and what fine-tuning makes of it.

        Returns
        -------
        loss : float
            Test loss of the first model; the fine-tuned one comes first.
        num_examples : int
        metrics : dict
            ``KIND-loss`` and ``KIND-METRIC`` for every kind of model.
        """
        models = self.models(parameters, config)
        if "finetune-epochs" in config:
            asked = FineTuningEvaluation.decode(parameters, config)
            self.load(asked.global_)
            self.train_size()
            yield Minimisation(LocalObjective(), asked.lr, asked.finetune_epochs)
            models = {FINETUNED: self.arrays(), **models}
        return (yield from self.evaluate_models(models))

    def models(self, parameters: list[NDArray[Any]], config: Scalars) -> dict[str, Arrays]:
        """Return the models of an evaluation's message, by kind."""
        names = self.model_arrays.names if parse_groups(config) is None else []
        return split_groups(parameters, config, names)

    def evaluate_models(self, models: Mapping[str, Arrays]) -> Steps[Evaluation]:
        """Evaluate models, given by kind, on the test data."""
        if self.test_problem is None:
            raise ValueError(
                "This client has no test_loader, so it cannot evaluate. Give it one, or switch "
                "federated evaluation off with fraction_evaluate=0."
            )
        num_examples = self.test_problem.num_examples()
        if num_examples == 0:
            raise ValueError("The client's test_loader is empty.")
        measured = yield Measurement(self.test_problem, list(models.values()))
        report = {
            f"{kind}-{name}": value
            for kind, metrics in zip(models, measured, strict=True)
            for name, value in metrics.items()
        }
        return report[f"{next(iter(models))}-loss"], num_examples, report

    def measure(self, problem: LocalProblem) -> Scalars:
        """Return loss and metrics of ``self.model`` on data: where a test of one's own goes.

        Parameters
        ----------
        problem : LocalProblem
            ``problem.loader`` is the `test_loader`, or what the method measures on.

        Returns
        -------
        dict of str to float
            ``loss``, and metrics by name.
        """
        self.model.eval()
        functions: Any = {n: m for n, m in self.metrics.items() if not is_running(m)}
        running: Any = {n: m for n, m in self.metrics.items() if is_running(m)}
        keep = bool(functions) or (problem.loss_fn is not None and not running)
        for metric in running.values():
            metric.reset()
        kept: list[tuple[Any, Any]] = []
        total, seen = 0.0, 0
        with torch.no_grad():
            for batch in problem.batches():
                loss, outputs = problem.loss_and_outputs(batch)
                total += float(loss) * batch.size
                seen += batch.size
                for metric in running.values():
                    metric.update(outputs, batch.targets)
                if keep:
                    kept.append((outputs, batch.targets))
            values = {"loss": total / seen}
            values |= {name: _number(name, metric.compute()) for name, metric in running.items()}
            if keep:
                outputs, targets = (torch.cat(parts) for parts in zip(*kept, strict=True))
                if problem.loss_fn is not None:
                    values["loss"] = float(problem.loss_fn(outputs, targets))
                values |= {
                    name: _number(name, m(outputs, targets)) for name, m in functions.items()
                }
        return {name: values[name] for name in ("loss", *self.metrics)}

    def minimise(self, objective: LocalObjective, *, lr: float, epochs: int) -> Scalars:
        """Train ``self.model``, from where it is, on the objective: where a loop of one's own goes.

        Some methods call it more than once in a round, with different objectives.

        Parameters
        ----------
        objective : LocalObjective
            The client's loss and what the method adds to it.
        lr, epochs
            The step size and the number of local epochs that the strategy was given.

        Returns
        -------
        dict of str to float
            What the client reports; here the ``loss`` that `gradient_descent` returns.
        """
        problem = frozen_layers_applied(self.train_problem) if epochs > 1 else self.train_problem
        loss = gradient_descent(
            problem,
            objective,
            lr=lr,
            epochs=epochs,
            full_batch=self.full_batch,
            optimizer_fn=self.optimizer_fn,
            scheduler_fn=self.scheduler_fn,
            max_grad_norm=self.max_grad_norm,
        )
        return {"loss": loss}

    @property
    def has_running_metrics(self) -> bool:
        """Whether a metric sees one batch after another."""
        return any(map(is_running, self.metrics.values()))

    @property
    def has_own_measure(self) -> bool:
        """Whether its class has a test of its own in place of `measure`."""
        return type(self).measure is not TorchClient.measure

    @property
    def own_loop(self) -> bool:
        """Whether its class has a loop of its own in place of `minimise`."""
        return type(self).minimise is not TorchClient.minimise

    @property
    def knows_loss(self) -> bool:
        """Whether f can be computed here, and not only in a `minimise` of one's own."""
        return self.train_problem.loss_fn is not None or not self.own_loop

    def refuse_own_steps(self, step: str, instead: str) -> None:
        """Refuse to take a method's step, which is not the client's to choose, in another way.

        Raises
        ------
        ValueError
            If the client was given an optimizer, a schedule, clipping or a loop of its own.
        """
        given = {
            "optimizer_fn": self.optimizer_fn is not torch.optim.SGD,
            "scheduler_fn": self.scheduler_fn is not None,
            "max_grad_norm": self.max_grad_norm is not None,
            "a minimise() of its own": self.own_loop,
        }
        if any(given.values()):
            names = ", ".join(name for name, is_given in given.items() if is_given)
            raise ValueError(
                f"{type(self).__name__} has {names}, but {step}. Leave it out, or {instead}."
            )

    def load(self, arrays: Arrays) -> None:
        """Load what travels of a model; see `ModelArrays.load`."""
        self.model_arrays.load(arrays)

    def trained_names(self) -> list[str]:
        """Return the names of the parameters that the model trains."""
        return self.model_arrays.trained

    def trainable(self, names: Sequence[str], *, setting: str) -> list[str]:
        """Return the names of a block that the server optimises, once they are seen to be trained.

        Raises
        ------
        ValueError
            If the model does not train one of them; `setting` says where to leave it out.
        """
        trained = set(self.model_arrays.trained)
        if untrained := [name for name in names if name not in trained]:
            raise ValueError(
                f"The server optimises {', '.join(untrained)}, which the client's model does not "
                "train (a buffer, such as a batch norm's running mean, or a frozen parameter). "
                f"Give {setting} a pattern that leaves it out."
            )
        return list(names)

    def load_block(self, block: Mapping[str, Tensor | NDArray[Any]]) -> None:
        """Overwrite some of the model's parameters."""
        parameters = self.model_arrays.parameters(block)
        with torch.no_grad():
            for name, values in block.items():
                parameters[name].copy_(values if isinstance(values, Tensor) else to_read(values))

    def block(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return copies of some of the model's parameters, those in half precision as float32."""
        return {
            name: in_full(p.detach()).clone()
            for name, p in self.model_arrays.parameters(names).items()
        }

    def seed(self, config: Scalars) -> None:
        """Make torch's randomness (batch order, dropout) that of this client in this round.

        An evaluation needs it too: a loader that shuffles changes the last bits of its sums.
        Randomness of a user's own that does not come from torch is the user's to seed, with
        ``config["seed"]``.
        """
        self._seed = int(config.get("seed", 0))
        self._seed_torch(self._seed)

    def own_randomness(self) -> AbstractContextManager[Any]:
        """Leave torch's generators outside as they were."""
        return torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])

    def begin_descent(self, asked: Minimisation | Measurement) -> None:
        """Let a descent have the batches that the first of this client's round would have.

        So methods are paired: the order follows from the run's seed, the client, the round and the
        epoch, whatever a method drew before, such as for measuring. Batches that were drawn before
        need no numbers.
        """
        drawn = isinstance(asked, Measurement) or isinstance(asked.loader, list)
        if self._seed is not None and not drawn:
            self._seed_torch(self._seed)

    def _seed_torch(self, seed: int) -> None:
        # torch.manual_seed notes down the stack for each accelerator that it does not find, which
        # costs half a millisecond, and sets the generators of those that it does find.
        on_cpu = self.device.type == "cpu"
        (torch.default_generator.manual_seed if on_cpu else torch.manual_seed)(seed)
        generator = getattr(self.train_problem.loader, "generator", None)
        if generator is not None:
            generator.manual_seed(seed)


def on_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a model on a device; one that is there already as it is, which takes less time."""
    there = all(tensor.device == device for tensor in tensors_of(model))
    return model if there else model.to(device)


def find_device(device: str | torch.device) -> torch.device:
    """Return a device that this process can use; "auto" is CUDA, else MPS, else the CPU.

    Raises
    ------
    ValueError
        If there is none of the name, or this process may not use it.
    """
    usable = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device == "auto":
        return torch.device(next((kind for kind, there in usable.items() if there), "cpu"))
    found = torch.device(device)
    if not usable.get(found.type, True):
        raise ValueError(
            f"device is '{found}', which PyTorch does not find in this process. Take 'auto' or "
            "'cpu'. On Ray a client sees a GPU only if it was given a share of one: num_gpus in "
            "client_resources, --gpus-per-client in the app."
        )
    return found


class MeanMetric:
    """A running metric: the mean over all samples of a function that is the mean over a batch.

    Parameters
    ----------
    metric : callable
        ``metric(outputs, targets)``, e.g. `accuracy`.

    Examples
    --------
    >>> metrics = {"accuracy": MeanMetric(accuracy)}
    """

    def __init__(self, metric: MetricFn) -> None:
        self.metric = metric
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._sum, self._seen = 0.0, 0

    def update(self, outputs: Any, targets: Any) -> None:
        """Take in a batch."""
        self._sum += float(self.metric(outputs, targets)) * len(targets)
        self._seen += len(targets)

    def compute(self) -> float:
        """Return the mean over the samples since `reset`."""
        return self._sum / self._seen


def rmse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the root of the mean squared error, in the unit of the targets."""
    return ((outputs - targets) ** 2).mean().sqrt()


def _number(name: str, value: Any) -> float:
    """Return a metric's value; raise ValueError unless it is a number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"the metric {name!r} is {brief(repr(value))}, expected a number. Let its function "
            "return one, such as the mean over the samples."
        ) from None


def to_numpy(block: Mapping[str, Tensor], prefix: str = "") -> dict[str, NDArray[Any]]:
    """Return named tensors as numpy arrays, with a prefix to their names; not copied on the CPU."""
    return {f"{prefix}{name}": in_full(t.detach()).cpu().numpy() for name, t in block.items()}


def read_only(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """Return named arrays as tensors on a device, to be read only; not copied on the CPU."""
    return {name: to_read(array).to(device) for name, array in arrays.items()}


def to_tensors(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """Return named numpy arrays as tensors on a device, copied."""
    return {n: to_read(a).to(device, copy=True) for n, a in arrays.items()}
