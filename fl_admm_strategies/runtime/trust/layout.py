"""Which of a model's arrays travel: what the clients train, and their buffers, each once.

The server knows arrays by name; only the clients' model knows which of them have a gradient, which
are buffers, which are frozen, and which are one parameter under two names. So before round 1 some
clients are asked, and the answer has one number for each name of the initial arrays: a role, or the
place of the name that it is another name of. Frozen arrays and second names do not travel and are
not in the state; `Layout.complete` puts them back into the models that a user gets.

A wrapper's prefix before all names (``module.`` of `DataParallel`) does not travel either, so that
it may be on one side alone. Half precision travels and is summed up as float32; a client casts to
the dtype of its model when it loads.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO
from typing import Any, Self

import numpy as np
from flwr.app import MessageType
from flwr.common import log
from numpy.typing import NDArray

from ...maths.blocks import Arrays, Spec, spec_of
from ...maths.checks import listing
from ..messages.records import (
    ClientInstruction,
    ClientReply,
    Reply,
    to_json,
)
from ..saving.state import check_initial_arrays
from .validation import ReplyValidation

TRAINED, BUFFER, FROZEN, ABSENT = -1, -2, -3, -4
"""The roles of arrays. A number k >= 0 in place of a role: another name of the k-th array."""

ROLES, CHECKSUMS = "roles", "checksums"
NAMES = "initial-arrays"
"""The setting that has the names which a client is asked about, as JSON."""

# Of DataParallel and DistributedDataParallel, torch.compile, Opacus.
_WRAPPERS = ("module.", "_orig_mod.", "_module.")
_ASKED = 25  # of a federation of which a tenth lie, most of so many do once in ten million
_BATCH_NORM = re.compile(r"(running_mean|running_var|num_batches_tracked)$")


Asked = dict[int, ClientInstruction]
Complete = Callable[[Asked, Spec], Asked]
Exchange = Callable[[Asked, str], Iterable[ClientReply]]


def wrapper_of(names: Collection[str]) -> str:
    """Return what wrappers of a model have put before all names, such as ``module.``."""
    prefix, first = "", next(iter(names), "")
    while found := [w for w in _WRAPPERS if first.startswith(prefix + w)]:
        if not all(name.startswith(prefix + found[0]) for name in names):
            break
        prefix += found[0]
    return prefix


def travelling(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array as it travels: half precision as float32."""
    return array.astype(np.float32) if array.dtype == np.float16 else array


def checksum(array: NDArray[Any]) -> int:
    """Return a CRC-32 of an array as it would travel; never 0, which stands for an unknown one."""
    data = np.ascontiguousarray(travelling(array)).reshape(-1).view(np.uint8).data
    return zlib.crc32(data) or 1


@dataclass
class Layout:
    """How the initial arrays travel.

    Attributes
    ----------
    initial : Arrays
        As they travel, in their order.
    prefix : str
        Before the names on the server.
    trained : list of str
        What has a gradient on the clients.
    frozen : list of str
        What has none, and stays where it is.
    tied : dict of str to str
        Second names, and which array they are another name of.
    given : Spec
        The initial arrays as the user gave them.
    """

    initial: Arrays = field(default_factory=dict)
    prefix: str = ""
    trained: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    given: Spec = field(default_factory=dict)
    _checksums: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, arrays: Arrays) -> Self:
        """Return the layout of initial arrays as long as no client was asked.

        All floating point arrays count as trained, except those that are named like a batch norm's
        statistics.

        Raises
        ------
        ValueError
            If the arrays are not a usable model.
        """
        check_initial_arrays(arrays)
        prefix = wrapper_of(arrays)
        first = {name.removeprefix(prefix): array for name, array in arrays.items()}
        trained = [n for n, a in first.items() if a.dtype.kind == "f" and not _BATCH_NORM.search(n)]
        return cls(
            initial={name: travelling(array) for name, array in first.items()},
            prefix=prefix,
            trained=trained,
            given=spec_of(arrays),
        )

    def ask(
        self,
        complete: Complete,
        exchange: Exchange,
        intake: ReplyValidation,
        clients: Sequence[int],
    ) -> None:
        """Ask some clients what they train.

        If there is only one array, it is trained and no client is asked.

        Parameters
        ----------
        complete, exchange, intake
            Make messages of instructions, send them, and check the replies.
        clients : sequence of int
            All clients of the run, in an order of chance.

        Raises
        ------
        ValueError
            As `learn`.
        """
        names, entry = list(self.initial), ((len(self.initial),), np.dtype(np.int64))
        if len(names) == 1:
            return
        question = ClientInstruction({"nothing": {}}, {NAMES: to_json(names)})
        spec: Spec = {ROLES: entry, CHECKSUMS: entry}
        asked = complete(dict.fromkeys(clients[:_ASKED], question), spec)
        replies = intake.accept(0, exchange(asked, MessageType.TRAIN), spec, optional=True).replies
        for client, reply in [*replies.items()]:
            try:
                self.check(reply.arrays[ROLES])
            except ValueError as error:
                del replies[client]
                intake.refuse(0, {client: str(error)})
        if not replies:
            log(INFO, "No client says what it trains: floats are, less a batch norm's statistics")
            return
        intake.refuse(0, self.learn(replies))

    def check(self, roles: NDArray[np.int64]) -> None:
        """Raise ValueError unless an answer can be true of these arrays."""
        names = list(self.initial)
        for name, role in zip(names, roles.tolist(), strict=True):
            initial = self.initial[name]
            if role < ABSENT or role >= len(names):
                raise ValueError(f"it says {role} of '{name}', which is no role")
            if role == TRAINED and initial.dtype.kind != "f":
                raise ValueError(f"it says that it trains '{name}', an array of {initial.dtype}")
            if role >= 0 and (roles[role] >= 0 or self.initial[names[role]].shape != initial.shape):
                raise ValueError(f"it says that '{name}' is another name of '{names[role]}'")

    def learn(self, answers: Mapping[int, Reply]) -> dict[int, str]:
        """Take the most frequent answer; return the clients with a refused one, and why.

        Of two that are as frequent, the one is taken that is nearer to the look of the arrays.

        Raises
        ------
        ValueError
            If the frozen arrays of most clients are not the server's.
        """
        foreign = {c: names for c, reply in answers.items() if (names := self._foreign(reply))}
        if 2 * len(foreign) > len(answers):
            client, names = next(iter(foreign.items()))
            raise ValueError(
                f"The frozen arrays {listing(names)} of client {client} are not those of the "
                f"initial arrays ({len(foreign)} of {len(answers)} clients say so), and frozen "
                "arrays do not travel. Load the same weights on both sides; or, where they are "
                "meant to differ (a quantised copy), leave them out of the initial arrays."
            )
        votes = Counter(
            tuple(reply.arrays[ROLES].tolist())
            for client, reply in answers.items()
            if client not in foreign
        )
        expected = [TRAINED if name in self.trained else BUFFER for name in self.initial]

        def support(roles: tuple[int, ...]) -> tuple[int, int]:
            same = sum(role == look for role, look in zip(roles, expected, strict=True))
            return votes[roles], same

        roles = max(sorted(votes), key=support)
        names = list(self.initial)
        self.trained = [n for n, role in zip(names, roles, strict=True) if role == TRAINED]
        self.frozen = [n for n, role in zip(names, roles, strict=True) if role == FROZEN]
        self.tied = {n: names[r] for n, r in zip(names, roles, strict=True) if r >= 0}
        return {
            client: f"its frozen arrays {listing(names)} are not those of the initial arrays"
            for client, names in foreign.items()
        }

    def _foreign(self, answer: Reply) -> list[str]:
        """Return the frozen arrays of a client that are known not to be the server's."""
        said = zip(self.initial, answer.arrays[ROLES], answer.arrays[CHECKSUMS], strict=True)
        return [
            name
            for name, role, theirs in said
            if role == FROZEN and theirs and theirs != self._checksum(name)
        ]

    def _checksum(self, name: str) -> int:
        if name not in self._checksums:
            self._checksums[name] = checksum(self.initial[name])
        return self._checksums[name]

    def to_send(self) -> Arrays:
        """Return the initial arrays that travel."""
        kept = {*self.frozen, *self.tied}
        return {name: array for name, array in self.initial.items() if name not in kept}

    def complete(self, model: Arrays) -> Arrays:
        """Return a model for its user: names, order and dtypes of the initial arrays, and all.

        Of a model that has a part of them only, as many as that gives.
        """
        whole = {name: self.initial[name] for name in self.frozen} | model
        whole |= {name: whole[first] for name, first in self.tied.items() if first in whole}
        order = [name for name in self.initial if name in whole]
        order += [name for name in whole if name not in self.initial]
        return {
            full: whole[name].astype(self.given[full][1]) if full in self.given else whole[name]
            for full, name in ((self.prefix + name, name) for name in order)
        }

    def travelling_part(self, whole: Arrays) -> Arrays:
        """Return what travels of a model that `complete` returned: that undone, but for dtypes."""
        kept = {*self.frozen, *self.tied}
        named = {name.removeprefix(self.prefix): array for name, array in whole.items()}
        return {name: array for name, array in named.items() if name not in kept}


def answer(names: Sequence[str], roles: Mapping[str, int], sums: Mapping[str, int]) -> Arrays:
    """Return a client's answer about names, of which it does not have all."""
    return {
        ROLES: np.array([roles.get(name, ABSENT) for name in names], dtype=np.int64),
        CHECKSUMS: np.array([sums.get(name, 0) for name in names], dtype=np.int64),
    }
