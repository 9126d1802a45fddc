"""Which node may be which client, where nodes have keys."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key, ssh_key_fingerprint
from flwr.serverapp import Grid
from numpy.typing import NDArray

from ...maths.checks import listing
from ..messages.identity import is_client_id

_FINGERPRINT = re.compile("SHA256:[A-Za-z0-9+/]{43}")
_LENGTH = len("SHA256:") + 43


def fingerprint(public_key: bytes) -> str:
    """Return the SHA256 fingerprint of a key as ``ssh-keygen -lf`` prints it; "" for no key.

    Nodes of a deployment have an elliptic-curve key, with which they sign all that they send to the
    SuperLink. Simulated ones have random bytes in its place, or nothing.
    """
    if not public_key.startswith(b"-----BEGIN PUBLIC KEY-----"):
        return ""
    digest = ssh_key_fingerprint(load_pem_public_key(public_key), SHA256())  # type: ignore[arg-type]
    return f"SHA256:{b64encode(digest).decode().rstrip('=')}"


def read_keys(arrays: Mapping[str, NDArray[Any]]) -> dict[int, str]:
    """Return what `ClientKeys.state_arrays` put into arrays; nothing where they lack it.

    Raises
    ------
    ValueError
        If these are no keys.
    """
    ids, rows = arrays.get("owned_ids", np.zeros(0)), arrays.get("owner_keys", np.zeros(0))
    keys = [row.tobytes().decode("ascii", errors="replace") for row in rows]
    if len(ids) != len(keys) or not all(map(_FINGERPRINT.fullmatch, keys)):
        raise ValueError("The saved owner_keys are no keys of owned_ids: the state is damaged.")
    return dict(zip(map(int, ids), keys, strict=True))


class ClientKeys:
    """The keys of the nodes, and to which of them the clients' ids belong.

    An id belongs to the key of the node that was this client when it became part of the run, until
    the run and all its resumptions are over, even if the client has left. Where nodes have no keys
    (in simulations, where the engine deals the ids) an id belongs to no key.

    Parameters
    ----------
    client_keys : str or mapping of int to str (default: "first")
        As in `StatefulStrategy`.

    Attributes
    ----------
    keys : dict of int to str
        By client, the fingerprint of the key that its id belongs to.

    Raises
    ------
    TypeError, ValueError
        If `client_keys` is none of these.
    """

    def __init__(self, client_keys: str | Mapping[int, str] = "first") -> None:
        _check(client_keys)
        self._anybody = client_keys == "any"
        self._given = {} if isinstance(client_keys, str) else dict(client_keys)
        self.reset({})

    def reset(self, saved: Mapping[str, NDArray[Any]]) -> None:
        """Start anew, or from what `state_arrays` returned; what the user gives comes first."""
        self.keys = read_keys(saved) | self._given
        self._key_of: dict[int, str] = {}  # by node
        self._present: dict[int, str] = {}  # by client, that of the node which it is on

    def connected(self, grid: Grid) -> set[int]:
        """Return the connected nodes; their keys are known from then on."""
        there = set(grid.get_node_ids())
        if new := there - self._key_of.keys():
            nodes = (node for node in grid.get_nodes() if node.node_id in new)
            self._key_of |= {node.node_id: fingerprint(node.public_key) for node in nodes}
        return there & self._key_of.keys()

    def has_key(self, node: int) -> bool:
        """Return whether a node has a key."""
        return bool(self._key_of.get(node))

    def refusal(self, node: int, clients: Sequence[int]) -> str:
        """Return in words why a node may not be these clients; "" if it may."""
        key = self._key_of.get(node, "")
        taken = [client for client in clients if self.keys.get(client, key) != key]
        if self._anybody or not taken:
            return ""
        more = ", ..." if len(taken) > 1 else ""
        admit = f"client_keys={{{taken[0]}: '{key}'{more}}}, or " if key else ""
        return (
            f"says that it hosts clients {listing(taken)}, whose ids belong to nodes with other "
            f"keys (client {taken[0]}: {self.keys[taken[0]]}; its own: {key or 'none'}). If you "
            f"know it, admit it with {admit}client_keys='any', which believes every node, and go "
            "on from the last checkpoint"
        )

    def hand_over(self, clients: Iterable[int], node: int) -> None:
        """Note that clients are on a node now, which may be them."""
        here = dict.fromkeys(clients, self._key_of.get(node, ""))
        self._present |= here
        if self._anybody:
            kept = {client: key for client, key in self.keys.items() if client not in here}
            moved = {c: key for c, key in here.items() if c in self.keys and key}
            self.keys = kept | moved

    def bind(self, clients: Iterable[int]) -> None:
        """Let ids of the run that have no owner belong to the nodes which their clients are on."""
        new = {c: key for c in clients if c not in self.keys and (key := self._present.get(c))}
        if new:
            self.keys = self.keys | new

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the keys of the clients' ids as arrays."""
        rows = [np.frombuffer(self.keys[client].encode(), np.uint8) for client in sorted(self.keys)]
        return {
            "owned_ids": np.array(sorted(self.keys), dtype=np.uint64),
            "owner_keys": np.array(rows, dtype=np.uint8).reshape(-1, _LENGTH),
        }


def _check(client_keys: object) -> None:
    if client_keys in ("first", "any"):
        return
    if not isinstance(client_keys, Mapping):
        raise TypeError(
            f"client_keys is {client_keys!r}, expected 'first', 'any' or a dict of client id to "
            "key fingerprint, e.g. {0: 'SHA256:...'}."
        )
    for client, key in client_keys.items():
        if not is_client_id(client):
            raise ValueError(f"client_keys has the client {client!r}, expected an integer >= 0.")
        if not (isinstance(key, str) and _FINGERPRINT.fullmatch(key)):
            raise ValueError(
                f"client_keys[{client}] is {key!r}, expected a fingerprint, 'SHA256:' and 43 "
                "characters. Take it from `ssh-keygen -lf KEY.pub`."
            )
