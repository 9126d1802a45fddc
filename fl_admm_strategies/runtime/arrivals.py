"""How a run reaches its clients where it takes in every reply as it comes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from flwr.app import Message, MessageType, Metadata
from flwr.serverapp import Grid

from .link import GridLink
from .messages.records import NOT_CONNECTED, ClientInstruction, ClientReply
from .run import Run
from .saving.pending import Sent

Delay = Callable[[int, int], float]
"""``delay(server_round, client)``: simulated seconds from an instruction to its reply."""

_SHORTEST, _LONGEST = 0.01, 1.0  # seconds between two looks for replies


@dataclass(frozen=True)
class _Question:
    """The message of an instruction to its client's node; None where it could not be sent."""

    of: Sent
    metadata: Metadata | None
    sent_at: float


@dataclass
class ArrivalLink(GridLink):
    """A link whose rounds end with the first usable reply, while other clients go on.

    In each round the clients that are free are asked, and the run takes in the next reply. One that
    cannot be used does not end the round: its client is asked again in the next. With a simulated
    clock the order of the replies is that of the clock, whenever they really come, so that a run
    has the same bits on every engine.

    Parameters
    ----------
    run : Run
        Whose pending replies it keeps.
    delay : callable, optional
        The simulated clock; without it replies are taken in as they really come.
    together : callable
        Whether the coming round waits for all of its replies.
    *link
        The parameters of `GridLink`.
    """

    run: Run
    delay: Delay | None
    together: Callable[[], bool]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._questions: dict[int, _Question] = {}
        self._replies: dict[int, list[ClientReply]] = {}  # those not taken in yet, as they came
        self._began = 0.0

    def connect(self, grid: Grid, wanted: Collection[int], *, allow_missing: bool) -> None:
        """Wait for the clients that the run needs; nothing is on its way to them yet."""
        self._questions, self._replies, self._began = {}, {}, math.nan
        super().connect(grid, wanted, allow_missing=allow_missing)

    def train(
        self,
        grid: Grid,
        timeout: float,
        server_round: int,
        messages: dict[int, ClientInstruction],
    ) -> Iterable[ClientReply]:
        """Send messages to their clients; return the replies up to the next usable one."""
        pending, validation = self.run.pending, self.run.validation
        if math.isnan(self._began):
            self._began = time.monotonic() - pending.clock
        if self.together():
            replies = list(self.exchange(grid, timeout, messages, MessageType.TRAIN))
            delays = [self._seconds(server_round, client) for client in messages]
            self._advance(pending.clock + max(delays, default=0.0))
            pending.staleness = 0
            return replies
        for client, message in messages.items():
            arrival = pending.clock + self._seconds(server_round, client)
            pending.add(client, message, server_round, arrival)
        self._send(grid)
        replies, validation.sent = [], {}
        while pending.sent:
            client = self._next(grid, timeout)
            sent, found = pending.sent.pop(client), self._replies.pop(client)
            validation.sent[client] = sent.instruction
            replies += found
            if validation.is_usable(client, found, self.run.upload_spec_of):
                pending.staleness = server_round - sent.server_round
                break
        return replies

    def pause(self, grid: Grid, timeout: float, *, last: bool) -> None:
        """Before an evaluation, wait for replies where only the simulated clock is to tell times.

        Otherwise clients that are still training are not disturbed, until the last round is over.
        """
        pending = self.run.pending
        if self.delay is not None:
            self._await(grid, timeout, pending.sent.keys(), every=True)
        self._collect(grid)
        pending.training = set() if last else pending.sent.keys() - self._replies.keys()

    # ------------------------------------------------------------------------------------------
    # The clock
    # ------------------------------------------------------------------------------------------

    def _seconds(self, server_round: int, client: int) -> float:
        if self.delay is None:
            return math.nan
        seconds = float(self.delay(server_round, client))
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(
                f"delay({server_round}, {client}) is {seconds}, expected a finite number of "
                "seconds, 0 or more."
            )
        return seconds

    def _advance(self, arrival: float) -> None:
        """Set the clock to an arrival, or to the real time where none is simulated."""
        pending = self.run.pending
        now = time.monotonic() - self._began if self.delay is None else arrival
        pending.clock = max(pending.clock, now)

    def _next(self, grid: Grid, timeout: float) -> int:
        """Wait for the next reply, or until there will be none; return whose it is."""
        pending = self.run.pending
        if self.delay is None:
            oldest = sorted(pending.sent, key=lambda c: (pending.sent[c].server_round, c))
            client, arrival = self._await(grid, timeout, oldest), math.nan
        else:
            due = {client: sent.arrival for client, sent in pending.sent.items()}
            # What a run in real time had under way, which goes on with a simulated clock.
            due |= {c: pending.clock for c, arrival in due.items() if math.isnan(arrival)}
            client = min(due, key=lambda client: (due[client], client))
            self._await(grid, timeout, [client])
            arrival = due[client]
        self._advance(arrival)
        return client

    # ------------------------------------------------------------------------------------------
    # Messages
    # ------------------------------------------------------------------------------------------

    def _send(self, grid: Grid) -> None:
        """Send what is under way and was not sent yet, each client a message of its own."""
        sent = self.run.pending.sent
        for client, question in list(self._questions.items()):
            if sent.get(client) is not question.of:
                del self._questions[client]
                self._replies.pop(client, None)
        for client in sorted(sent.keys() - self._questions.keys()):
            instruction = sent[client].instruction
            config = {**instruction.config, **self.run.outgoing.of_run(client)}
            complete = {client: ClientInstruction(instruction.groups, config)}
            messages = self.messages(complete, MessageType.TRAIN)
            pushed = bool(messages) and any(grid.push_messages(messages))
            metadata = messages[0].metadata if pushed else None
            self._questions[client] = _Question(sent[client], metadata, time.monotonic())
            if metadata is None:
                self._replies[client] = [(client, NOT_CONNECTED)]

    def _await(
        self, grid: Grid, timeout: float, clients: Collection[int], *, every: bool = False
    ) -> int:
        """Wait until one of some clients, or every one, has replied; return who came first.

        Who does not reply within the timeout has an empty list of replies.
        """
        clients, pause = list(clients), _SHORTEST
        while True:
            self._collect(grid)
            late = time.monotonic() - timeout
            for client in clients:
                if self._questions[client].sent_at <= late:
                    self._replies.setdefault(client, [])
            found = [client for client in self._replies if client in clients]
            if len(found) == len(clients) or (found and not every):
                return found[0] if found else -1
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _collect(self, grid: Grid) -> None:
        """Take the replies that have come, those of one look in the order of the clients."""
        waiting = {
            question.metadata.message_id: client
            for client, question in self._questions.items()
            if question.metadata is not None and client not in self._replies
        }
        found: dict[int, Message] = {}
        for message in grid.pull_messages(list(waiting)) if waiting else []:
            if (client := waiting.get(message.metadata.reply_to_message_id)) is not None:
                found[client] = message
        for client, message in sorted(found.items()):
            question = self._questions[client].metadata
            assert question is not None
            self._replies[client] = self.read([message], [client], [question])
