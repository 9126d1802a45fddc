"""The round of a client, whatever its method and whatever it computes with."""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Collection, Generator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, ClassVar, Generic, Never, TypeVar

from flwr.app import Context
from flwr.client import NumPyClient
from numpy.typing import NDArray

from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.runtime.common.settings import refuse_unknown
from fl_admm_strategies.runtime.messages import records as wire
from fl_admm_strategies.runtime.messages.changes import NOISE, NOISED, ChangedUpload, changes_of
from fl_admm_strategies.runtime.messages.schema import Instruction
from fl_admm_strategies.runtime.messages.stamp import check_instruction_maker, made_by
from fl_admm_strategies.runtime.strategy import StatefulStrategy
from fl_admm_strategies.runtime.trust.divergence import CONSTANT_LOSS, INITIAL_LOSS
from fl_admm_strategies.runtime.trust.layout import NAMES, TRAINED, answer

from ..solving.steps import Driver, Evaluation, MethodSteps, Reply, Scalars, Steps, take_steps
from .memory import Memory

Asked = TypeVar("Asked", bound=Instruction)


class MethodClient(NumPyClient, Generic[Asked]):
    """Base of the clients: reads the typed message, keeps the memory, orders the upload.

    A round has four steps. Flower calls `fit`. `run_round` reads the message, seeds, and stamps the
    reply. `steps`, the method's, computes the upload. What it wants minimised goes to `minimise`,
    which is where a loop of one's own stands; a method that does not descend has `train` in place
    of `steps`. A method's client names its strategy and its message as well, and says in `test` how
    it evaluates. A message of another method is refused.

    Parameters
    ----------
    context : Context
        The client's context, as `client_fn(context)` receives it.
    state_dir : str or path, optional
        Folder for what the client keeps between rounds, so that it outlives the run: see `Memory`.
        By default that is in ``context.state``.

    Attributes
    ----------
    memory : Memory
        What the client keeps between rounds.
    initial_loss : float or None
        f before the first step of this round, where it is known. In the first round it is reported,
        so that the strategy sees whether the run diverges.
    constant_loss : float
        That of a constant prediction, reported beside it; NaN where it is not known.
    """

    strategy: ClassVar[type[StatefulStrategy]]
    """The server's half."""
    instruction: ClassVar[type[Instruction]]
    """What it sends for training."""
    closed_form: ClassVar[str] = ""
    """Why there is no objective for a `minimise` of one's own; empty where there is one."""
    cohort: Driver | None = None
    """What trains and evaluates several such clients together, if anything does."""
    initial_loss: float | None = None
    constant_loss: float = math.nan

    def __init__(
        self, context: Context, *, state_dir: str | os.PathLike[str] | None = None, **unknown: Never
    ) -> None:
        refuse_unknown(type(self), unknown, self.strategy)
        self.context = context
        self.memory = Memory(context, state_dir)
        if self.closed_form and _has_own_minimise(type(self)):
            raise TypeError(
                f"{type(self).__name__} has a minimise() of its own, which "
                f"{self.strategy.__name__} would never call: {self.closed_form}. Use a method "
                "with clients that descend, such as FedADMM; docs/own-client.md has the table."
            )

    def train(self, asked: Asked, config: Scalars) -> tuple[Arrays, Scalars]:
        """Do the method's part of a round: by default all its `steps`.

        What it keeps goes through ``self.memory``; its randomness is that of the message.

        Parameters
        ----------
        asked : Instruction
            The message.
        config : dict
            All settings that came with it, for the memory and the seed.

        Returns
        -------
        upload : Arrays
            At least the arrays that the server wants.
        metrics : dict
            What the client reports.
        """
        return take_steps(self.steps(asked, config), self.perform)

    def steps(self, asked: Asked, config: Scalars) -> MethodSteps:
        """Do the method's part of a round, and leave its descents to the code that takes the steps.

        A method of descent has this in place of `train`, so that its clients can train together:
        ``metrics = yield Minimisation(objective, lr, epochs)``. Parameters and result are those of
        `train`.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither train() nor steps().")

    def perform(self, asked: Any) -> Any:
        """Do what a step asks for."""
        raise NotImplementedError(f"{type(self).__name__} has no model to train.")

    def test(
        self, parameters: list[NDArray[Any]], config: Scalars
    ) -> Evaluation | Steps[Evaluation]:
        """Evaluate models; parameters, result and errors are those of `evaluate`.

        Its randomness is that of the message, as in `train`. It may yield a `Measurement`, as
        `steps` yields a `Minimisation`, so that clients are evaluated together.
        """
        raise ValueError(
            f"{type(self).__name__} cannot evaluate. Switch federated evaluation off with "
            "fraction_evaluate=0."
        )

    def models(self, parameters: list[NDArray[Any]], config: Scalars) -> dict[str, Arrays]:
        """Return the models of an evaluation's message, by kind."""
        return wire.split_groups(parameters, config)

    @abstractmethod
    def train_size(self) -> int:
        """Return n_i, the number of training examples; raise ValueError if there are none."""

    def fit(self, parameters: list[NDArray[Any]], config: Scalars) -> Reply:
        """Take part in a round: `run_round`, one step after another.

        Raises
        ------
        ValueError
            If there is nothing to train on, the message does not fit the method or the model, or
            the client does not hold the variables that the server takes for its own.
        """
        with self.own_randomness():
            return take_steps(self.run_round(parameters, config), self.perform)

    @property
    def only_reads(self) -> bool:
        """Whether it leaves the arrays of a message as they are; a class of a user's own may not.

        Then they are views of the message, and not copied, and what it uploads may be read-only.
        """
        return _is_ours(type(self))

    def model_copies(self) -> list[tuple[Any, Any]]:
        """Return the tensors of its model, if it has one, each with a copy of what is in it."""
        return []

    def driver(self, trains: bool) -> Driver | None:
        """Return what trains, or evaluates, such clients together; None where that is a user's."""
        own, ours = type(self), MethodClient
        plain = own.fit is ours.fit if trains else own.evaluate is ours.evaluate
        return self.cohort if plain else None

    def run_round(self, parameters: list[NDArray[Any]], config: Scalars) -> Steps[Reply]:
        """Answer a handshake, or train on what the message says; parameters and result of `fit`."""
        self.check_sender(config)
        if (names := config.get(NAMES)) is not None:
            answer = self.answer_about_names(wire.read_names(NAMES, names))
            return list(answer.values()), self.train_size(), self.stamp()
        if config.get("handshake"):
            arrays, num_examples, metrics = self.answer_handshake(parameters, config)
            return arrays, num_examples, metrics | self.stamp()
        num_examples = self.train_size()
        asked: Any = self.instruction.decode(parameters, config)
        self.initial_loss = None
        self.seed(config)
        if type(self).train is MethodClient.train:
            upload, metrics = yield from self.steps(asked, config)
        else:
            upload, metrics = self.train(asked, config)
        if self.initial_loss is not None and config.get("version") == 0:
            metrics = metrics | {INITIAL_LOSS: self.initial_loss}
            if math.isfinite(self.constant_loss):
                metrics = metrics | {CONSTANT_LOSS: self.constant_loss}
        if not isinstance(upload, ChangedUpload):
            (sent, *_) = wire.split_groups(parameters, config).values()
            upload = self.changed(upload, sent, config)
        if NOISE in config:
            metrics = metrics | {NOISED: 1}
        return list(upload.values()), num_examples, metrics | self.stamp()

    def evaluate(self, parameters: list[NDArray[Any]], config: Scalars) -> Evaluation:
        """Evaluate the models of a message: `test`.

        Returns
        -------
        loss : float
        num_examples : int
        metrics : dict
            Those of `test`, with the stamp.

        Raises
        ------
        ValueError
            If there is nothing to evaluate on, or the message does not fit the method or the model.
        """
        with self.own_randomness():
            return take_steps(self.run_evaluation(parameters, config), self.perform)

    def run_evaluation(self, parameters: list[NDArray[Any]], config: Scalars) -> Steps[Evaluation]:
        """Evaluate the models of a message; parameters and result are those of `evaluate`."""
        self.check_sender(config)
        self.seed(config)
        tested = self.test(parameters, config)
        if isinstance(tested, Generator):
            tested = yield from tested
        loss, num_examples, metrics = tested
        return loss, num_examples, metrics | self.stamp()

    def check_sender(self, config: Scalars) -> None:
        """Raise ValueError if a message is from another strategy than this client's."""
        check_instruction_maker(config, type(self).__name__, self.strategy)

    def stamp(self) -> Scalars:
        """Return what says in the metrics of a reply which method made it."""
        method = getattr(self.strategy, "method", None)  # None takes any client, as FedAvg does
        return {} if method is None else {**made_by(method)}

    def answer_about_names(self, names: list[str]) -> Arrays:
        """Return what the server wants to know of its initial arrays: here, that all are trained.

        See `fl_admm_strategies.runtime.trust.layout`.
        """
        return answer(names, dict.fromkeys(names, TRAINED), {})

    def untrained(self, names: list[str]) -> Arrays:
        """Return those of some arrays that the client has, though it never uploads them unasked."""
        return {}

    def answer_handshake(self, parameters: list[NDArray[Any]], config: Scalars) -> Reply:
        """Answer a handshake, which by default asks for the number of training examples only."""
        return [], self.train_size(), {}

    def changed(self, upload: Arrays, reference: Arrays, config: Scalars) -> ChangedUpload:
        """Return what the server wants of an upload, in its order and as it travels.

        A client that goes on from what it uploads does so from this.

        Parameters
        ----------
        upload : Arrays
            What the client has computed.
        reference : Arrays
            What it is measured from where it is clipped; 0 for arrays that are not in it.
        config : dict
            All settings of the message.
        """
        names = self.wanted_names(config)
        if missing := [name for name in names if name not in upload]:
            upload = upload | self.untrained(missing)
        if missing := [name for name in names if name not in upload]:
            raise ValueError(
                f"The server wants the arrays {', '.join(missing)}, which this client does not "
                "have. Use one model definition on both sides."
            )
        found = {name: upload[name] for name in names}
        for change in changes_of(config, self.buffer_names()):
            found = change(found, reference)
        return ChangedUpload(found)

    def wanted_names(self, config: Scalars) -> list[str]:
        """Return which arrays the server wants: by default those that it sent."""
        if (wanted := config.get(wire.UPLOAD)) is not None:
            return wire.read_names(wire.UPLOAD, wanted)
        return next(iter((wire.parse_groups(config) or {wire.ARRAYS: []}).values()))

    def buffer_names(self) -> Collection[str]:
        """Return which arrays are buffers, which are never rounded on their way; here none."""
        return ()

    def seed(self, config: Scalars) -> None:
        """Make the client's randomness that of this client in this round; here there is none."""

    def own_randomness(self) -> AbstractContextManager[Any]:
        """Leave the random numbers of others as they are meanwhile."""
        return nullcontext()

    def get_properties(self, config: Scalars) -> Scalars:
        """Return who the client is, for Flower's legacy API."""
        config = self.context.node_config
        if "partition-id" not in config:
            return {}
        total = config.get("num-partitions", 0)
        return {wire.CLIENT_ID: int(config["partition-id"]), wire.NUM_CLIENTS: int(total)}


@cache
def _has_own_minimise(kind: Any) -> bool:
    """Return whether a class has a `minimise` below the one that says why there can be none."""
    kinds = kind.__mro__
    named = next(place for place, one in enumerate(kinds) if "closed_form" in vars(one))
    return any("minimise" in vars(one) for one in kinds[:named])


@cache
def _is_ours(kind: Any) -> bool:
    """Return whether a client's class, and those that it is made of, are all of this package."""
    package = __name__.partition(".")[0]
    own = kind.__mro__[: kind.__mro__.index(MethodClient)]
    return all(one.__module__.partition(".")[0] == package for one in own)
