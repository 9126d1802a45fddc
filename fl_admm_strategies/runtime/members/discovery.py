"""Which node hosts which clients, and how to reach them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from logging import INFO, WARNING

from flwr.app import Message, Metadata
from flwr.common import log
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid

from ...maths.checks import listing
from ..common.collector import collector_paused
from ..messages.identity import (
    BrokenAppError,
    NoAnswer,
    UnclearError,
    ask,
    check_actor,
    check_free,
    most_common,
    read_identity,
)
from ..messages.packing import pack_instructions, unpack_replies
from ..messages.records import ClientInstruction, ClientReply, RawReply, brief
from .owners import Owners
from .waiting import ConnectionStatus, Wait, wait_for_clients

# Seconds that a phase waits for new nodes to say who they are; a later answer counts for the next.
QUERY_TIMEOUT = 10.0

# Nodes that must say that their app does not answer queries until the others are not asked.
_AGREE = 2

# What a client has replied whose node is not there.
NOT_CONNECTED = RawReply(error="its node is not connected")


class ClientDirectory:
    """The nodes of a run and the clients they host.

    Parameters
    ----------
    hosted : mapping of int to list of int
        The ids of the clients of every node.
    answers_queries : bool (default: True)
        Whether the nodes' app answers queries. Where it does not, a client is its node.
    most_per_node : int, optional
        Clients that a node may host.
    owners : Owners, optional
        Whose ids the clients are.

    Attributes
    ----------
    announced : int
        The size of the federation as most of its nodes know it, the smaller number where they
        disagree evenly; 0 where they do not know.

    Raises
    ------
    ValueError
        If two nodes host a client of the same id.
    """

    def __init__(
        self,
        hosted: Mapping[int, list[int]],
        *,
        answers_queries: bool = True,
        most_per_node: int | None = None,
        owners: Owners | None = None,
    ) -> None:
        self._most_per_node = most_per_node
        self._owners = owners or Owners()
        self._hosted = dict(sorted(hosted.items()))  # as every node said, in use or not
        self._answers_queries = answers_queries
        self.announced = 0
        self._connected = set(self._hosted)
        self._node_of: dict[int, int] = {}
        self._sent: list[Metadata] = []  # of the messages of this phase
        self._queries: dict[str, int] = {}  # unanswered ones to new nodes, by message id
        self._left_out: dict[int, str] = {}  # why a node is not used, so as to say it once
        for node, clients in self._hosted.items():
            for client in clients:
                if (other := self._node_of.get(client)) is not None:
                    raise ValueError(
                        f"Nodes {other} and {node} both say that they are client {client}. Give "
                        "every node its own partition-id (flower-supernode --node-config "
                        '"partition-id=N num-partitions=M").'
                    )
                self._node_of[client] = node
            self._owners.hand_over(clients, node)

    @classmethod
    def find(
        cls,
        grid: Grid,
        *,
        at_least: int,
        timeout: float,
        wanted: Collection[int] = (),
        allow_missing: bool = False,
        most_per_node: int | None = None,
        owners: Owners | None = None,
    ) -> ClientDirectory:
        """Ask every node which clients it hosts, until all that are needed are known.

        A node whose app does not answer queries hosts one client, whose id is the node's. Nodes
        that know the size of their federation are waited for in full, unless it is said who is
        wanted. A node whose answer cannot be right is left out, with a warning that names it, and
        does not hold up the others: one that hosts a client that another node hosts already, or
        whose id is another's, or too many; a size of the federation that most nodes do not know is
        not believed.

        Parameters
        ----------
        grid : Grid
            Where the nodes are.
        at_least : int
            Clients that are needed.
        timeout : float
            Seconds to wait for them.
        wanted : collection of int
            Clients to wait for: those of a run that is resumed.
        allow_missing : bool
            Whether to do without some of those in the end.
        most_per_node : int, optional
            Clients that a node may host.
        owners : Owners, optional
            Whose ids the clients are.

        Raises
        ------
        TimeoutError
            If they are too few by then, or not those; the message says what to do.
        RuntimeError
            If no node has an app that could take part: it cannot be loaded, or is one of the legacy
            API.
        """
        end = time.monotonic() + timeout
        hosted: dict[int, list[int]] = {}
        totals: dict[int, int] = {}  # the size of the federation, as nodes know it
        broken: dict[int, str] = {}  # why the apps of nodes cannot take part
        mute: set[int] = set()  # nodes whose app does not answer queries
        queries: dict[str, int] = {}  # unanswered ones, by message id
        trouble, probing, answers_queries = "", True, True
        owners = owners or Owners()

        def look() -> ConnectionStatus:
            nonlocal trouble, probing, answers_queries
            # One node first, then another: all run the same app, and where it has no query handler
            # Flower logs a traceback for every node that is asked. A single one may be wrong, and a
            # silent one must not stop us.
            first = probing and end - time.monotonic() > timeout / 2
            there, known = owners.connected(grid), len(hosted)
            new = sorted(there - hosted.keys() - set(queries.values()))
            if not answers_queries:
                hosted.update({node: [node] for node in sorted(there - hosted.keys())})
                queries.clear()
            elif not (first and queries):
                queries.update(ask(grid, new[:1] if first else new))
            for reply in grid.pull_messages(list(queries)) if queries else []:
                node = queries.pop(reply.metadata.reply_to_message_id, None)
                if node is None:
                    continue
                try:
                    clients, total = read_identity(node, reply, most_per_node)
                    check_free(node, clients, hosted)
                    if refusal := owners.refusal(node, clients):
                        raise UnclearError(f"Node {node} is left out: it {refusal}")
                    hosted[node] = clients
                    if total:
                        totals[node] = total
                except NoAnswer:
                    hosted[node] = [node]
                    mute.add(node)
                    answers_queries = len(mute) < _AGREE
                except UnclearError as error:
                    hosted[node], trouble = [], f" {error}"
                    if isinstance(error, BrokenAppError):
                        broken[node] = str(error)
                    log(WARNING, "%s", error)
            if probing and len(hosted) > known:
                probing = answers_queries and hosted.keys() == mute
                return look()
            if there and there <= broken.keys():
                raise RuntimeError(f"No node can take part. {broken[min(there)]}")
            silent = sorted(there.intersection(queries.values()))
            return ConnectionStatus(
                list(chain(*hosted.values())),
                len(hosted),
                most_common(totals.values()),
                silent,
                trouble,
            )

        status = wait_for_clients(
            look, at_least=at_least, timeout=timeout, wanted=wanted, allow_missing=allow_missing
        )
        for node, total in totals.items():
            if total != status.announced:
                log(
                    WARNING,
                    "node %s says that the federation has %s clients, most nodes say %s; its word "
                    "is not taken",
                    node,
                    total,
                    status.announced,
                )
        directory = cls(
            hosted, answers_queries=answers_queries, most_per_node=most_per_node, owners=owners
        )
        directory.announced = status.announced
        return directory

    @property
    def client_ids(self) -> list[int]:
        """All clients, sorted."""
        return sorted(self._node_of)

    @property
    def connected(self) -> list[int]:
        """The clients whose node was connected when it was last looked, sorted."""
        return [client for client in self.client_ids if self._is_connected(client)]

    def _is_connected(self, client: int) -> bool:
        return self._node_of.get(client) in self._connected

    def forget(self, clients: Iterable[int]) -> None:
        """Strike clients off; should they come back, they are new ones."""
        for client in clients:
            self._node_of.pop(client, None)

    def refresh(self, grid: Grid, *, at_least: int, timeout: float) -> list[int]:
        """Find out before a phase who is connected, who has come back, and who is new.

        A SuperNode that was restarted has another node id than before. So nodes that were not there
        are asked which clients they host. One takes them over if their ids are its own (`Owners`)
        and none of them has a node that is still connected: two live nodes with the same
        partition-id are a mistake, and the first keeps its clients. Flower counts a node that died
        as connected for up to a minute.

        Parameters
        ----------
        grid : Grid
            Where the nodes are.
        at_least : int
            Clients that must be connected.
        timeout : float
            Seconds to wait for them.

        Returns
        -------
        list of int
            The clients that are new, or on another node than before, or whose node was away: what
            they kept may be gone.

        Raises
        ------
        TimeoutError
            If they are too few by then.
        """
        moved: list[int] = []
        wait = Wait(timeout)
        while True:
            before, self._connected = self._connected, self._owners.connected(grid)
            # A node that Flower knows by its key keeps its id when it is restarted.
            back = self._connected - before
            moved += [client for client, node in self._node_of.items() if node in back]
            if self._answers_queries:
                self._query_new_nodes(grid)
            else:
                self._hosted |= {node: [node] for node in self._connected - self._hosted.keys()}
            moved += self._take_over()
            found = sum(node in self._connected for node in self._node_of.values())
            if found >= at_least:
                return moved
            if wait.remaining <= 0:
                raise TimeoutError(
                    f"Waited {timeout:g} s: {found} of the run's {len(self._node_of)} clients are "
                    f"connected, the strategy needs {at_least}. Start the missing SuperNodes, or "
                    "lower min_available_nodes, or raise node_timeout, and run again."
                    f"{self._trouble}"
                )
            wait.go_on(found, at_least)

    @property
    def _trouble(self) -> str:
        """Why connected nodes are not used, for an error."""
        reasons = {n: why for n, why in self._left_out.items() if n in self._connected}
        return "".join(f" Node {node} is left out: it {why}." for node, why in reasons.items())

    def _take_over(self) -> list[int]:
        """Give clients to the nodes that say they host them, where possible; return those given."""
        moved: list[int] = []
        for node in sorted(self._connected & self._hosted.keys()):
            clients = self._hosted[node]
            if all(self._node_of.get(client) == node for client in clients):
                continue
            trouble = self._owners.refusal(node, clients) or self._taken(node, clients)
            if trouble:
                if self._left_out.get(node) != trouble:
                    self._left_out[node] = trouble
                    log(WARNING, "node %s is left out: it %s", node, trouble)
                continue
            self._left_out.pop(node, None)
            new = [client for client in clients if client not in self._node_of]
            for who, what in ((new, "new"), ([c for c in clients if c not in new], "back")):
                if who:
                    log(INFO, "clients %s are %s, on node %s", listing(who), what, node)
            self._node_of |= dict.fromkeys(clients, node)
            self._owners.hand_over(clients, node)
            moved += clients
        return moved

    def _taken(self, node: int, clients: Iterable[int]) -> str:
        """Return in words which of a node's clients another connected node hosts, if any."""
        others = self._connected - {node}
        if not (taken := [c for c in clients if self._node_of.get(c) in others]):
            return ""
        holders = sorted({self._node_of[client] for client in taken})
        return (
            f"says that it hosts clients {listing(taken)}, as does node {listing(holders)}, which "
            "is connected (Flower says so for up to a minute after a node died)"
        )

    def _query_new_nodes(self, grid: Grid) -> None:
        """Ask new nodes which clients they host; wait for the answers, but not for long."""
        waiting = {node: query for query, node in self._queries.items() if node in self._connected}
        self._queries = {query: node for node, query in waiting.items()}
        new = ask(grid, sorted(self._connected - self._hosted.keys() - waiting.keys()))
        self._queries |= new
        deadline = time.monotonic() + QUERY_TIMEOUT
        while self._queries:
            for reply in grid.pull_messages(list(self._queries)):
                node = self._queries.pop(reply.metadata.reply_to_message_id, None)
                if node is None:
                    continue
                try:
                    self._hosted[node], _ = read_identity(node, reply, self._most_per_node)
                except (ValueError, UnclearError, NoAnswer) as error:
                    self._hosted[node] = []
                    log(WARNING, "node %s is left out: %s", node, error)
            if self._queries.keys().isdisjoint(new):
                break
            if time.monotonic() >= deadline:
                break
            time.sleep(0.2)

    @collector_paused()
    def messages(
        self, instructions: Mapping[int, ClientInstruction], message_type: str
    ) -> list[Message]:
        """Return one message for every connected node that hosts one of the clients."""
        by_node: dict[int, dict[int, ClientInstruction]] = {}
        for client, instruction in instructions.items():
            if self._is_connected(client):
                by_node.setdefault(self._node_of[client], {})[client] = instruction
        messages = [
            Message(
                pack_instructions(own, hosted=len(self._hosted[node]) > 1),
                node,
                message_type,
                group_id=str(next(iter(own.values())).config["server-round"]),
            )
            for node, own in by_node.items()
        ]
        self._sent = [message.metadata for message in messages]
        return messages

    @collector_paused()
    def replies(self, messages: Iterable[Message], asked: Collection[int]) -> list[ClientReply]:
        """Return what every client replied, unchecked; None for a client that nobody knows.

        Parameters
        ----------
        messages : iterable of Message
            What came back.
        asked : collection of int
            The clients that were asked: a node that fails as a whole fails for these, and those
            whose node was not connected have failed already.
        """
        away = [(client, NOT_CONNECTED) for client in asked if not self._is_connected(client)]
        return away + self.read(messages, asked, self._sent)

    def read(
        self, messages: Iterable[Message], asked: Collection[int], sent: Collection[Metadata]
    ) -> list[ClientReply]:
        """Return what is in messages that came back; `sent` are those that they answer."""
        replies: list[ClientReply] = []
        for message in messages:
            node = _asked_node(message, sent)
            own = [c for c in self._hosted.get(node, []) if self._node_of[c] == node]
            if message.has_error():
                reason = message.error.reason or "no reason given"
                if message.error.code != ErrorCode.CLIENT_APP_RAISED_EXCEPTION:  # a client's words
                    check_actor(reason)
                error = RawReply(error=brief(reason))
                concerned = [client for client in own if client in asked]
                replies += [(client, error) for client in concerned or own] or [(None, error)]
                continue
            # A node speaks for its own clients only; a single one needs no label.
            hosts = set(own)
            alone = own[0] if len(self._hosted.get(node, [])) == 1 and own else None
            found = list(unpack_replies(message.content))
            strangers = []
            for label, reply in found:
                speaker = alone if label is None else label
                if speaker in hosts:
                    replies.append((speaker, reply))
                elif label is None and own and reply.error is not None:  # whose it is nobody knows
                    said = {client for client, _ in found}
                    replies += [(c, reply) for c in own if c in asked and c not in said]
                else:
                    strangers.append("its client" if label is None else f"client {label}")
            if strangers:
                whom = strangers[0] if len(strangers) == 1 else listing(strangers)
                reason = f"node {node} replied for {whom}, which this run does not know there"
                replies.append((None, RawReply(error=reason)))
        return replies


def _asked_node(reply: Message, sent: Iterable[Metadata]) -> int:
    """Return the node that a reply comes from, or is about.

    For a node that is gone the SuperLink itself replies, with an error.
    """
    if reply.metadata.src_node_id == SUPERLINK_NODE_ID:
        for question in sent:
            if question.message_id == reply.metadata.reply_to_message_id:
                return question.dst_node_id
    return reply.metadata.src_node_id
