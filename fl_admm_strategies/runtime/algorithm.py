"""The algorithm interface: what a method must answer, and what it may.

A method answers four questions about its own state: how it starts (`init_state`), what a client
gets (`train_instructions`), what the replies change (`update`), which models there are (`model`).
Everything else has a default. Who is sampled, what a message looks like, which reply is believed,
what is saved and when a run stops is the business of the other files here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar

from ..maths.blocks import Arrays, Spec
from ..maths.clienttable import Row
from .messages.records import ClientInstruction, Metrics, Reply
from .messages.schema import Instruction, Instructions
from .uploads import Upload

Phase = Literal["train", "evaluate"]
FINETUNED = "finetuned"
"""The kind of model that a client makes of the global one, to be evaluated and used there."""
Question = TypeVar("Question", bound=Instruction | ClientInstruction)


@dataclass(frozen=True)
class OnClient:
    """A model that stays with its client.

    Attributes
    ----------
    how : str
        How to get it there, as a sentence for the user.
    """

    how: str


@dataclass(frozen=True)
class FineTuningEvaluation(Instruction):
    """The global model to evaluate, as it is and after local epochs on the client's loss."""

    global_: Arrays
    lr: float
    finetune_epochs: int


def _no_complaints(replies: Mapping[int, Reply]) -> Mapping[int, str]:
    return {}


@dataclass(frozen=True)
class Handshake(Generic[Question]):
    """What a method must know of clients before their first round.

    It is a training message of round 0 with ``handshake`` set. Clients that come later are asked as
    well. What is wrong with an answer alone is for `Algorithm.new_client` to say, by a ValueError.

    Attributes
    ----------
    instructions : mapping of int to Instruction
        The messages, by client.
    spec : Spec
        Names, shapes and dtypes of the arrays in the replies. A length of -1 may be any.
    check : callable
        Returns which initial clients' answers do not go with the others', and why. The run begins
        without these clients.
    """

    instructions: Mapping[int, Question]
    spec: Spec = field(default_factory=dict)
    check: Callable[[Mapping[int, Reply]], Mapping[int, str]] = _no_complaints


@dataclass(frozen=True, kw_only=True)
class MembersChange:
    """Clients that have joined or left the run, or have lost what they keep: one of the three.

    Attributes
    ----------
    server_round : int
    joined, left, lost : sequence of int
        The clients. Who joined is in the state's table, and `Algorithm.update` follows; who left is
        there for the last time. Who lost what it keeps counts as a client without an accepted
        upload from here on, and is sent what such clients are sent.
    rows : sequence of int
        The places of clients that left; for each that joined the row before which its row went, as
        `numpy.insert` counts.
    """

    server_round: int
    joined: Sequence[int] = ()
    left: Sequence[int] = ()
    lost: Sequence[int] = ()
    rows: Sequence[int] = ()


class Algorithm(ABC):
    """What the runtime asks of a method.

    Attributes
    ----------
    method : str or None
        What the clients' replies are stamped with (`made_by`), which by custom is the name of the
        class, METHOD, and their client's is METHODClient; all other replies are refused. A class
        derived from a method has the method's clients. None: any client will do, also one that was
        written for FedAvg and knows nothing of this library.
    kinds : dict of str to str
        The kinds of models that clients evaluate, the main one first, with a title for tables.
    state : dataclass
        What `init_state` returned. The runtime saves and loads its fields.
    run : Run
        The run: `membership`, `model_spec` (names, shapes and dtypes of a model's arrays as they
        travel) and `trained` (those that have a gradient; the others are buffers).
    """

    method: ClassVar[str | None]
    kinds: ClassVar[Mapping[str, str]]
    state: Any
    run: Any

    @property
    def upload(self) -> Upload:
        """What an upload is to the server, which decides what may happen to it on its way."""
        return Upload()

    # ------------------------------------------------------------------------------------------
    # Every method answers these
    # ------------------------------------------------------------------------------------------

    @abstractmethod
    def init_state(self, arrays: Arrays) -> Any:
        """Return the state that the run starts from, a dataclass.

        What it keeps for every client goes into a `ClientTable`, which is empty here: the runtime
        adds a row for each client (see `new_client`).

        Raises
        ------
        ValueError
            If the arrays do not fit the algorithm's settings; the message says how.
        """

    @abstractmethod
    def train_instructions(self, server_round: int, client_ids: Sequence[int]) -> Instructions:
        """Return what each of the sampled clients gets for training.

        Clients of ``membership.joining`` are among them. They have a row in the table of the state
        while they are asked, and belong to the run once a reply of theirs was accepted.
        """

    @abstractmethod
    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Change the state by the checked replies of a round, given in the order of client ids.

        There is at least one reply. What depends on what a client was sent is in ``reply.sent``:
        the settings, and what follows from the clients there are, may have changed since then.
        """

    @abstractmethod
    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return a client's model of one of the `kinds`; the ``"global"`` one is for all alike."""

    # ------------------------------------------------------------------------------------------
    # Most methods leave these as they are
    # ------------------------------------------------------------------------------------------

    def new_client(self, client_id: int, reply: Reply | None) -> Row:
        """Return a client's row of the state's table, at the start or when it joins.

        An entry that is left out is what the column was declared with. `reply` is the client's to
        the handshake, None where there was none.
        """
        return {}

    def members_changed(self, change: MembersChange) -> None:
        """Change the rest of the state when clients have joined, left or lost what they keep."""

    def handshake(self, client_ids: Sequence[int]) -> Handshake[Any] | None:
        """Return what to ask clients before their first round; by default nothing."""
        return None

    def upload_spec(self) -> Spec:
        """Return the names, shapes and dtypes of an upload: those of a model.

        A client whose message names the arrays to ``upload`` sends only these. A length of -1 may
        be any, for `check_reply` to look at.
        """
        spec: Spec = self.run.model_spec
        return spec

    def upload_reference(self, sent: ClientInstruction) -> Arrays:
        """Return what a client's upload is measured from where uploads are bounded.

        By default the arrays of the same names in the first group that it was sent: the model, or
        the anchor. What has no such array, a dual or a change, is measured from 0.
        """
        return next(iter(sent.groups.values()))

    def check_reply(self, client_id: int, reply: Reply) -> None:
        """Raise ValueError if `update` can do nothing with a reply: its client is refused by name.

        Its arrays are those of `upload_spec`, and finite; here any metrics will do.
        """

    def evaluate_instructions(self, server_round: int, client_ids: Sequence[int]) -> Instructions:
        """Return the models to evaluate on each client: every kind that the server has."""
        shared = {"global": self.model("global", client_ids[0])} if "global" in self.kinds else {}
        instructions = {}
        for client in client_ids:
            models = {
                kind: shared[kind] if kind in shared else self.model(kind, client)
                for kind in self.kinds
            }
            groups = {k: arrays for k, arrays in models.items() if not isinstance(arrays, OnClient)}
            instructions[client] = ClientInstruction(groups or {"personal": {}})
        return instructions

    def metrics(self, phase: Phase, clients: Mapping[int, Metrics], means: Metrics) -> Metrics:
        """Return the aggregated metrics of a phase: by default the means of the clients'.

        Only the server can measure a norm of a sum over all clients, which is no mean of theirs.
        """
        return means
