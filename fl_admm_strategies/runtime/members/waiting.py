"""Waiting for clients: who is there, who is missing, and a word about it now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from logging import INFO
from typing import NamedTuple

from flwr.common import log

from ...maths.checks import listing

# Seconds until a user who waits for clients hears so, and how many there are, once more.
_SILENCE = 10.0


class ConnectionStatus(NamedTuple):
    """Who is there.

    Attributes
    ----------
    clients : sequence of int
        Who is connected, on so many `nodes`.
    nodes : int
    announced : int
        The size of the federation, 0 where it is not known.
    silent : sequence of int
        Nodes that are connected and have not said yet which clients they host.
    trouble : str
        What else there is to say.
    """

    clients: Sequence[int]
    nodes: int
    announced: int
    silent: Sequence[int] = ()
    trouble: str = ""


def wait_for_clients(
    look: Callable[[], ConnectionStatus],
    *,
    at_least: int,
    timeout: float,
    wanted: Collection[int],
    allow_missing: bool,
) -> ConnectionStatus:
    """Look who is there until all that are needed are; say every ten seconds who is not.

    Parameters
    ----------
    look, at_least, timeout, wanted, allow_missing
        Who is there now; the others as in `ClientDirectory.find`.

    Returns
    -------
    ConnectionStatus
        The last.

    Raises
    ------
    TimeoutError
        If they are too few by then, or not those; the message says what to do.
    """
    wait = Wait(timeout)
    while True:
        status = look()
        clients, nodes, announced, silent, trouble = status
        found, missing = len(clients), sorted(set(wanted).difference(clients))
        needed = max(at_least, len(wanted) if wanted else announced)
        late = wait.remaining <= 0
        enough = found >= needed and not missing
        if (enough and (late or not silent)) or (late and allow_missing and found >= at_least):
            return status
        if late:
            if silent:
                trouble = f" Nodes {listing(silent)} did not say which clients they host.{trouble}"
            absent = f" The saved run's clients {listing(missing)} are missing." if missing else ""
            raise TimeoutError(
                f"Waited {timeout:g} s: {found} clients on {nodes} nodes connected, the strategy "
                f"needs {needed}.{absent} In a simulation, ask for more nodes: flwr run . "
                f"--federation-config 'num-supernodes={needed}' (the default is 2). In a "
                "deployment, start more SuperNodes, or lower min_available_nodes, or raise "
                f"node_timeout.{trouble}"
            )
        wait.go_on(found, needed, missing, silent)


class Wait:
    """Some seconds in which a user hears now and then what is being waited for."""

    def __init__(self, timeout: float) -> None:
        self._end = time.monotonic() + timeout
        self._next_word = time.monotonic() + _SILENCE

    @property
    def remaining(self) -> float:
        """Seconds that are left."""
        return self._end - time.monotonic()

    def go_on(
        self, found: int, needed: int, missing: Sequence[int] = (), silent: Sequence[int] = ()
    ) -> None:
        """Sleep a little; now and then say how many clients there are and who is missing."""
        if time.monotonic() >= self._next_word:
            self._next_word += _SILENCE
            whom = f", {listing(missing)} not yet" if missing else ""
            whom += f"; nodes {listing(silent)} have not said which they host" if silent else ""
            log(INFO, "waiting for clients: %s of %s connected%s", found, needed, whom)
        time.sleep(min(0.1, max(self.remaining, 0.0)))
