"""The algorithm interface: what a method must answer, and what it may.

A method answers four questions about its own state: how it starts (`init_state`), what a client
gets (`train_instructions`), what the replies change (`update`), which models there are (`model`).
Everything else has a default. Who is sampled, what a message looks like, which reply is believed,
what is saved and when a run stops is the business of the other files here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from ..maths.blocks import Arrays, Spec
from ..maths.clienttable import Row
from .aggregation import MetricsAggrFn
from .members.membership import Membership
from .messages.records import ClientInstruction, Metrics, Reply
from .messages.schema import Instructions
from .messages.wire import WireDtype
from .uploads import Upload


@dataclass(frozen=True)
class OnClient:
    """A model that stays with its client.

    Attributes
    ----------
    how : str
        How to get it there, as a sentence for the user.
    """

    how: str


class Algorithm(ABC):
    """What the runtime asks of a method.

    Attributes
    ----------
    method : str or None
        What the clients' replies are stamped with (`made_by`), which by custom is the name of the
        class, METHOD, and their client's is METHODClient; all other replies are refused. A class
        derived from a method has the method's clients. None: any client will do, also one that was
        written for FedAvg and knows nothing of this library.
    paper : str
        Who described the method, and where: authors, venue and year, arXiv number. It is what
        ``python -m simulations list --methods`` shows.
    kinds : dict of str to str
        The kinds of models that clients evaluate, the headline first, with a title for tables.
    remedy : str
        What to change where a run diverges, e.g. "a smaller lr".
    in_rounds : bool
        Whether a round takes in the replies of all that it asked. Flower's legacy API, and loops of
        one's own, can do nothing else.
    seed : int
        The run's.
    wire_dtype : {"float16"}, optional
        In which arrays of 32 and 64 bits travel. An algorithm never sees it: what it sends and gets
        is in full precision.
    train_metrics_aggr_fn, evaluate_metrics_aggr_fn : callable, optional
        The user's, in place of the means of what clients report.
    state : dataclass
        What `init_state` returned. The runtime saves and loads its fields.
    membership : Membership
        The clients of the run.
    model_spec : Spec
        Names, shapes and dtypes of a model's arrays as they travel: see `Layout`.
    trained : list of str
        Which of them the clients train; the others are their models' buffers. Where `method` is
        None nobody is asked: then all floating point arrays are, less a batch norm's statistics.
    """

    method: ClassVar[str | None]
    paper: ClassVar[str] = ""
    kinds: ClassVar[Mapping[str, str]]
    remedy: ClassVar[str] = "a smaller lr"
    in_rounds: ClassVar[bool] = True
    seed: int
    wire_dtype: WireDtype = None
    train_metrics_aggr_fn: MetricsAggrFn | None = None
    evaluate_metrics_aggr_fn: MetricsAggrFn | None = None
    state: Any
    membership: Membership
    model_spec: Spec
    trained: list[str]

    @property
    def upload(self) -> Upload:
        """What an upload is to the server, which decides what may happen to it on its way."""
        return Upload()

    @property
    def title(self) -> str:
        """The method's name as its paper writes it."""
        return type(self).__name__

    @property
    def form(self) -> str:
        """Which form of the method runs, and what it changes against the paper: one sentence.

        With the place in the paper. Empty where there is one form only. The log, the summary,
        results and captions show it, so that nobody takes one form for another.
        """
        return ""

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

        There is at least one reply. What depends on what a client was sent is in ``reply.asked``:
        the settings, and what follows from the clients there are, may have changed since then.
        """

    @abstractmethod
    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return a client's model of one of the `kinds`; the ``"global"`` one is everybody's."""

    # ------------------------------------------------------------------------------------------
    # Most methods leave these as they are
    # ------------------------------------------------------------------------------------------

    def clusters(self) -> NDArray[np.int64] | None:
        """Return the cluster of every client, sorted by id; None where the method has none."""
        return None

    def cluster_arrays(self) -> list[ArrayRecord]:
        """Return the model of every cluster, by its number in `clusters`; here there are none."""
        return []

    def new_client(self, client_id: int, reply: Reply | None) -> Row:
        """Return a client's row of the state's table, at the start or when it joins.

        An entry that is left out is what the column was declared with. `reply` is the client's to
        the handshake, None where there was none.
        """
        return {}

    def upload_spec(self) -> Spec:
        """Return the names, shapes and dtypes of an upload: those of the initial arrays."""
        return self.model_spec

    def upload_spec_of(self, client_id: int) -> Spec:
        """Return those of a client's upload, where shapes differ by client."""
        return self.upload_spec()

    def check_reply(self, client_id: int, reply: Reply) -> None:
        """Raise ValueError if `update` can do nothing with a reply: its client is refused by name.

        Its arrays are those of `upload_spec`, and finite; here any metrics will do.
        """

    def upload_reference(self, sent: ClientInstruction) -> Arrays:
        """Return what a client's upload is measured from where there is a `max_norm`.

        By default the arrays of the same names in the first group that it was sent: the model, or
        the anchor. What has no such array, a dual or a change, is measured from 0.
        """
        return next(iter(sent.groups.values()))

    def handshake_instructions(self, client_ids: Sequence[int]) -> Instructions:
        """Return what to ask clients before their first round; by default nothing.

        For what the server must know of clients at the start: their numbers of examples, the
        curvature of their losses. It is a training message of round 0 with ``handshake`` set, so
        that it works under both of Flower's APIs. Clients that come later are asked as well.
        """
        return {}

    def handshake_spec(self) -> Spec:
        """Return the names, shapes and dtypes of the arrays in a handshake's replies.

        A length of -1 may be any: what only the client knows, for `new_client` to look at.
        """
        return {}

    def check_handshake(self, replies: Mapping[int, Reply]) -> Mapping[int, str]:
        """Return which initial clients' answers do not go with the others', and why.

        What is wrong with an answer alone is for `new_client` to say, by a ValueError. The run
        begins without either.
        """
        return {}

    def handshake(self, replies: Mapping[int, Reply]) -> None:
        """Change the state by the replies of the initial clients, before they have their rows."""

    def add_clients(self, client_ids: Sequence[int], places: Sequence[int]) -> None:
        """Change the rest of the state when clients have joined; `update` follows.

        They are in `membership` and in the table. `places` has for each of them the row before
        which its row went, as `numpy.insert` counts.
        """

    def remove_clients(self, client_ids: Sequence[int], rows: Sequence[int]) -> None:
        """Change the rest of the state when clients leave the run.

        They are out of `membership`, and in the table for the last time; `rows` are their places.
        """

    def on_state_lost(self, server_round: int, client_ids: Sequence[int]) -> None:
        """Change the state where clients have lost what they keep themselves.

        From here on they are taken for clients without an accepted upload, and are sent what such
        clients are sent, or what the state holds of them. An algorithm whose state holds something
        of theirs that it can neither send nor take back must make both sides agree here.
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

    def round_metrics(self) -> Metrics:
        """Return what only the server can measure of the round that `update` has just taken in.

        Added to the means of the clients' training metrics: a norm of a sum over all clients is no
        mean of theirs.
        """
        return {}

    def evaluation_metrics(self, clients: Mapping[int, Metrics], means: Metrics) -> Metrics:
        """Return the aggregated metrics of an evaluation: by default the means of the clients'."""
        return means
