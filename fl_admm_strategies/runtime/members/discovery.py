"""Finding clients: which node hosts which, who is connected, who has come back."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Sequence
from logging import INFO, WARNING
from statistics import multimode

from flwr.common import log
from flwr.serverapp import Grid

from ...maths.checks import listing
from ..messages.identity import Identity, ask, read_identity, runs_on_ray
from .client_keys import ClientKeys

# Seconds that a phase waits for new nodes to say who they are; a later answer counts for the next.
QUERY_TIMEOUT = 10.0

# Seconds after which a user who waits for clients is told again how many there are.
_REPORT_EVERY = 10.0
_STARTING = 5  # times the timeout, in which simulated nodes may start

# Nodes that must say that their app does not answer queries until the others are not asked.
_AGREE = 2


class Discovery:
    """Which node hosts which clients, and who is connected.

    A node whose word cannot be right is left out, with a warning that names it, and does not hold
    up the others: one that hosts a client that another connected node hosts already, or whose id is
    another's (`ClientKeys`), or too many.

    Parameters
    ----------
    client_keys : ClientKeys
        The keys of the nodes that the clients' ids belong to.
    most_per_node : int, optional
        Clients that a node may host.
    """

    def __init__(self, client_keys: ClientKeys, most_per_node: int | None = None) -> None:
        self._client_keys = client_keys
        self._most_per_node = most_per_node
        self._identities: dict[int, Identity] = {}  # what every node said of itself
        self._connected: set[int] = set()
        self._silent: set[int] = set()  # nodes that did not answer at the last look
        self._left_out: dict[int, str] = {}  # why a node is not used, so as to say it once
        self._queries: dict[str, int] = {}  # the node of every unanswered query, by message id
        self._without_query_handler: set[int] = set()
        self._ask_all_at = math.inf
        self.node_of: dict[int, int] = {}
        """The node of every client."""

    @property
    def client_ids(self) -> list[int]:
        """All clients, sorted."""
        return sorted(self.node_of)

    @property
    def connected(self) -> list[int]:
        """The clients whose node was connected when it was last looked, sorted."""
        return [client for client in self.client_ids if self.is_connected(client)]

    @property
    def announced(self) -> int:
        """The size of the federation as most nodes say it; 0 where they do not, silent ones too."""
        silent = self._connected - self._identities.keys()
        said = [identity.num_clients for identity in self._identities.values()]
        return min(multimode(said + [0] * len(silent)), default=0)

    def is_connected(self, client: int) -> bool:
        """Return whether a client's node was connected when it was last looked."""
        return self.node_of.get(client) in self._connected

    def num_hosted(self, node: int) -> int:
        """Return how many clients a node said that it hosts, in use or not."""
        return len(self._identities[node].clients) if node in self._identities else 0

    @property
    def is_packed(self) -> bool:
        """Whether a node said that it hosts several clients."""
        return any(len(identity.clients) > 1 for identity in self._identities.values())

    def clients_on(self, node: int) -> list[int]:
        """Return the clients of the run that a node hosts."""
        clients = self._identities[node].clients if node in self._identities else []
        return [client for client in clients if self.node_of.get(client) == node]

    def forget(self, clients: Iterable[int]) -> None:
        """Strike clients off; should they come back, they are new ones."""
        for client in clients:
            self.node_of.pop(client, None)

    def find(
        self,
        grid: Grid,
        *,
        at_least: int,
        timeout: float,
        wanted: Collection[int] = (),
        allow_missing: bool = False,
    ) -> None:
        """Ask every node which clients it hosts, until all that are needed are known.

        Nodes that know the size of their federation are waited for in full, unless it is said who
        is wanted. A size that most nodes do not know is not believed. After the timeout those that
        are there will do, if they are enough.

        Parameters
        ----------
        grid : Grid
            Where to look.
        at_least : int
            Clients that are needed.
        timeout : float
            Seconds to wait for them.
        wanted : collection of int
            Clients to wait for: those of a run that is resumed.
        allow_missing : bool
            Whether to do without some of those in the end.

        Raises
        ------
        TimeoutError
            If they are fewer than `at_least` by then, or not those wanted; the message says what to
            do.
        RuntimeError
            If no node has an app that could take part: it cannot be loaded, or is one of the legacy
            API.
        """
        wait = Wait(timeout)
        self._ask_all_at = time.monotonic() + min(QUERY_TIMEOUT, timeout / 4)
        while True:
            self._look(grid)
            self._check_apps()
            found = len(self.connected)
            missing = sorted(set(wanted).difference(self.connected))
            silent = sorted(self._connected - self._identities.keys())
            needed = max(at_least, len(wanted) or self.announced)
            if found >= needed and not missing and not silent:
                return
            # Simulated nodes answer as soon as their processes have imported all they need.
            unanswered = bool(silent) and not self._identities
            times = _STARTING if unanswered and runs_on_ray() else 1
            if wait.is_over(times):
                if found >= at_least and (allow_missing or not missing):
                    self._warn_of_missing(found, 0 if wanted else needed, silent)
                    return
                if unanswered:
                    raise TimeoutError(
                        f"Waited {times * timeout:g} s: none of {len(silent)} connected nodes has "
                        "said which clients it hosts. Where their processes are still starting, "
                        "raise node_timeout; else look into the nodes' own logs."
                    )
                absent = unheard = ""
                if missing:
                    absent = f" The saved run's clients {listing(missing)} are missing."
                if silent:
                    unheard = f" Nodes {listing(silent)} did not say which clients they host."
                raise TimeoutError(
                    f"Waited {timeout:g} s: {found} clients on {len(self._connected)} nodes "
                    f"connected, the strategy needs {needed}.{absent} In a "
                    "simulation, ask for more nodes: flwr run . --federation-config "
                    f"'num-supernodes={needed}' (the default is 2). In a deployment, start more "
                    "SuperNodes, or lower min_available_nodes, or raise node_timeout."
                    f"{unheard}{self._trouble}"
                )
            wait.go_on(found, needed, starting=unanswered)

    def _warn_of_missing(self, found: int, needed: int, silent: Sequence[int]) -> None:
        """Say without whom a run begins, of so many that most nodes say there are."""
        if silent:
            log(
                WARNING,
                f"nodes {listing(silent)} do not say which clients they host: the run begins "
                "without them",
            )
        if found < needed:
            log(
                WARNING,
                f"most nodes say that there are {needed} clients, {found} are connected: the run "
                "begins without the others, which may join",
            )

    def refresh(self, grid: Grid, *, at_least: int = 0, timeout: float = 0.0) -> list[int]:
        """Find out before a phase who is connected, who has come back, and who is new.

        A SuperNode that was restarted may have another node id than before. So nodes that were not
        there are asked which clients they host. A node takes them over if its key may have their
        ids (`ClientKeys`) and none of them has a node that is still connected: two live nodes with
        the same partition-id are a mistake, and the first keeps its clients.

        Parameters
        ----------
        grid : Grid
            Where to look.
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
        # Who could not say which clients it hosts is asked again, once a phase.
        self._identities = {
            node: identity
            for node, identity in self._identities.items()
            if identity.broken or not identity.trouble
        }
        moved: list[int] = []
        wait = Wait(timeout)
        while True:
            known = set(self.node_of)
            before = self._connected
            taken_over = self._look(grid, QUERY_TIMEOUT)
            for node, clients in taken_over.items():
                for who, what in ((set(clients) - known, "new"), (known & set(clients), "back")):
                    if who:
                        log(INFO, "clients %s are %s, on node %s", listing(sorted(who)), what, node)
                moved += clients
            # A node that Flower knows by its key keeps its id when it is restarted.
            back = (self._connected - before) - taken_over.keys()
            moved += [client for client, node in self.node_of.items() if node in back]
            found = len(self.connected)
            if found >= at_least:
                return moved
            if wait.is_over():
                raise TimeoutError(
                    f"Waited {timeout:g} s: {found} of the run's {len(self.node_of)} clients are "
                    f"connected, the strategy needs {at_least}. Start the missing SuperNodes, or "
                    "lower min_available_nodes, or raise node_timeout, and run again."
                    f"{self._trouble}"
                )
            wait.go_on(found, at_least)

    def _look(self, grid: Grid, patience: float = 0.0) -> dict[int, list[int]]:
        """See who is connected, and ask who is new; return the clients that nodes took over."""
        self._connected = self._client_keys.connected(grid)
        deadline = time.monotonic() + patience
        while silent := self._connected - self._identities.keys():
            if answers := self._identify(grid, silent):
                self._identities |= answers
            elif silent <= self._silent or time.monotonic() >= deadline:
                break  # a node is waited for once
            else:
                time.sleep(0.2)
        self._silent = silent
        return self._take_over()

    def _identify(self, grid: Grid, nodes: Collection[int]) -> dict[int, Identity]:
        """Ask those of these nodes that were not asked yet; return the answers that have come.

        One node first, then another: all run the same app, and where it has no query handler Flower
        logs a traceback for every node that is asked. Such an app has one client, whose id is the
        node's. A single node may be wrong, and a silent one must not hold up the rest.
        """
        self._queries = {query: node for query, node in self._queries.items() if node in nodes}
        if len(self._without_query_handler) >= _AGREE:
            return {node: Identity([node]) for node in nodes}
        first = time.monotonic() < self._ask_all_at
        new = sorted(set(nodes).difference(self._queries.values()))
        if not (first and self._queries):
            self._queries |= ask(grid, new[:1] if first else new)
        found: dict[int, Identity] = {}
        for reply in grid.pull_messages(list(self._queries)) if self._queries else []:
            node = self._queries.pop(reply.metadata.reply_to_message_id, None)
            if node is None:
                continue
            if (identity := read_identity(node, reply)) is None:
                self._without_query_handler.add(node)
                identity = Identity([node])
            else:
                self._ask_all_at = -math.inf
            found[node] = identity
        return found

    def _take_over(self) -> dict[int, list[int]]:
        """Give clients to the nodes that say they host them, where possible; return those given."""
        taken_over: dict[int, list[int]] = {}
        for node in sorted(self._connected & self._identities.keys()):
            clients = self._identities[node].clients
            has_all = all(self.node_of.get(client) == node for client in clients)
            if has_all and not self._identities[node].trouble:
                continue
            if trouble := self._trouble_with(node):
                if self._left_out.get(node) != trouble:
                    self._left_out[node] = trouble
                    log(WARNING, "node %s is left out: it %s", node, trouble)
                continue
            self._left_out.pop(node, None)
            self.node_of |= dict.fromkeys(clients, node)
            self._client_keys.hand_over(clients, node)
            taken_over[node] = clients
        return taken_over

    def _trouble_with(self, node: int) -> str:
        """Return in words why a node cannot be used; "" if it can."""
        identity = self._identities[node]
        clients, most = identity.clients, self._most_per_node
        if identity.trouble:
            return identity.trouble
        if most is None and self._client_keys.has_key(node):
            most = 1
        if most is not None and len(clients) > most:
            return (
                f"says that it hosts {len(clients)} clients, expected at most {most}. If they are "
                "its own, give a larger max_clients_per_node, which is 1 for nodes with keys"
            )
        if refusal := self._client_keys.refusal(node, clients):
            return refusal
        others = self._connected - {node}
        if not (taken := [c for c in clients if self.node_of.get(c) in others]):
            return ""
        holders = sorted({self.node_of[client] for client in taken})
        return (
            f"says that it hosts clients {listing(taken)}, as does node {listing(holders)}, which "
            "is connected (Flower says so for up to a minute after a node died). Give every node "
            'its own partition-id (flower-supernode --node-config "partition-id=N '
            'num-partitions=M")'
        )

    def _check_apps(self) -> None:
        """Raise RuntimeError where no connected node's app could take part."""
        known = self._identities
        broken = [node for node in self._connected if node in known and known[node].broken]
        if broken and len(broken) == len(self._connected):
            node = min(broken)
            raise RuntimeError(
                f"No node can take part. Node {node} {self._identities[node].trouble}"
            )

    @property
    def _trouble(self) -> str:
        """Why connected nodes are not used, for an error."""
        reasons = {n: why for n, why in self._left_out.items() if n in self._connected}
        return "".join(f" Node {node} is left out: it {why}." for node, why in reasons.items())


class Wait:
    """Some seconds in which a user hears now and then what is being waited for."""

    def __init__(self, timeout: float) -> None:
        self._timeout, self._began = timeout, time.monotonic()
        self._next_report = self._began + _REPORT_EVERY

    def is_over(self, times: int = 1) -> bool:
        """Return whether so many times the seconds have passed."""
        return time.monotonic() >= self._began + times * self._timeout

    def go_on(self, found: int, needed: int, *, starting: bool = False) -> None:
        """Sleep a little; now and then say how many clients there are."""
        if time.monotonic() >= self._next_report:
            self._next_report += _REPORT_EVERY
            why = ": the nodes have not answered yet" if starting else ""
            log(INFO, "waiting for clients: %s of %s connected%s", found, needed, why)
        time.sleep(min(0.1, self._timeout))
