"""Checking replies: nothing that a client sends is used before it was checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import NamedTuple

from flwr.common import log

from ...maths.blocks import Spec, has_shape
from ...maths.checks import listing
from ..members.membership import Membership
from ..messages.records import (
    ALTERED,
    NUM_EXAMPLES,
    ClientInstruction,
    ClientReply,
    Metrics,
    RawReply,
    Reply,
    brief,
    who_lost,
)
from ..messages.stamp import check_reply_maker, client_of, is_stamp
from ..messages.wire import WIRE_DTYPE
from ..uploads import Upload
from .means import MOST, most_examples, weighted_means

LARGEST = 1e12
"""Of a reply's numbers: sums and squares over the clients of a round stay finite in float32."""
_MOST_EXAMPLES = 2**53  # beyond it a float does not tell two counts apart
_MOST_METRICS = 300  # of one reply, and the letters of a name: every one is kept for every round
_LONGEST_NAME = 100


class Accepted(NamedTuple):
    """The checked replies of a phase.

    Attributes
    ----------
    replies : dict of int to Reply
        The usable replies by client, in the order of the ids.
    lost : list of int
        Clients that say that they do not hold what the server takes them to hold.
    """

    replies: dict[int, Reply]
    lost: list[int]


@dataclass
class ReplyValidation:
    """Checks what comes back from the clients that were asked.

    Parameters
    ----------
    membership : Membership
        Says which clients had an accepted upload before.
    method : str or None
        The replies of clients of this method are accepted; None: any client's.
    upload : Upload
        What an upload is; one that was changed on its way may be refused.

    Attributes
    ----------
    sent : dict of int to ClientInstruction
        What the clients of the present phase were sent; empty between two phases.
    last_refusal : str
        Who was refused last, and why.
    all_failed_alike : bool
        Whether all clients of the last phase, several or the only one, were refused for one reason.
    """

    membership: Membership
    method: str | None = None
    upload: Upload = field(default_factory=Upload)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start a run."""
        self.sent: dict[int, ClientInstruction] = {}
        self.last_refusal = "no client was asked"
        self.all_failed_alike = False
        self._said: dict[int, str] = {}  # by client, why it was refused last
        self._has_right_clients = False
        self._capped: set[int] = set()  # who was named

    def accept(
        self,
        server_round: int,
        replies: Iterable[ClientReply],
        spec: Spec | Callable[[int], Spec] | None,
        *,
        optional: bool = False,
    ) -> Accepted:
        """Return the usable replies; one log line for every other client, unless it is `optional`.

        Two replies of one client are both refused: which one came first is chance, and the result
        of a round must not depend on chance.

        Parameters
        ----------
        server_round : int
        replies : iterable of ClientReply
            In any order.
        spec : Spec, callable or None
            The arrays that every reply must hold, or that of a client; None: those of an evaluation
            hold none.
        """
        accepted: dict[int, Reply] = {}
        refused: dict[int, str] = {}
        answered: set[int] = set()
        for client, raw in replies:
            if client is None or client not in self.sent:
                who = "an unknown sender" if client is None else f"client {client}"
                reason = brief(raw.error or "it was not asked in this round")
                self.last_refusal = f"{who}: {reason}"
                log(WARNING, "round %s: reply of %s refused: %s", server_round, who, reason)
            elif client in answered:
                accepted.pop(client, None)
                refused[client] = "it replied more than once"
            else:
                answered.add(client)
                try:
                    reply = self._checked(client, raw, spec)
                except ValueError as error:
                    refused[client] = str(error)
                else:
                    accepted[client] = reply
                    self._has_right_clients = True
        alike = not accepted and len({*refused.values()}) == 1 and answered == self.sent.keys()
        self.all_failed_alike = alike and len(answered) >= min(2, len(self.membership))
        refused |= {c: "no reply within the timeout" for c in self.sent if c not in answered}
        self.sent = {}
        is_new = self.membership.is_new  # such a client has nothing to lose
        lost = [
            c for c, why in sorted(refused.items()) if who_lost(why) is not None and not is_new(c)
        ]
        if not optional:
            self.refuse(server_round, {c: why for c, why in refused.items() if c not in lost})
        accepted = dict(sorted(accepted.items()))
        return Accepted(accepted if spec is None else self._cap(server_round, accepted), lost)

    def _cap(self, server_round: int, replies: dict[int, Reply]) -> dict[int, Reply]:
        """Return replies to a training, none with many times the others' examples."""
        members = self.membership
        members.examples = members.examples | {c: r.num_examples for c, r in replies.items()}
        most = most_examples(members.examples.values())
        over = [client for client, reply in replies.items() if reply.num_examples > most]
        if new := [client for client in over if client not in self._capped]:
            self._capped.update(new)
            log(
                WARNING,
                f"round {server_round}: clients {listing(new)} report more than {round(most)} "
                f"examples, {round(MOST)} times the median, and count for so many",
            )
        return replies | {c: replace(replies[c], num_examples=most) for c in over}

    def _checked(
        self, client: int, raw: RawReply, spec: Spec | Callable[[int], Spec] | None
    ) -> Reply:
        if raw.error is None or raw.metrics:
            check_reply_maker(raw.metrics, self.method)
        wire_dtype = self.sent[client].config.get(WIRE_DTYPE)
        wanted = spec(client) if callable(spec) else spec
        reply = check_reply(raw, wanted, wire_dtype)
        if reply.altered and not self.upload.goes_with("mods"):
            raise ValueError(
                f"its upload was changed by a mod of the client, and {self.upload.because()}"
            )
        return reply

    def is_usable(
        self, client: int, replies: Sequence[ClientReply], spec: Callable[[int], Spec]
    ) -> bool:
        """Return whether these are exactly one reply, of this client, that `accept` would take."""
        if [who for who, _ in replies] != [client]:
            return False
        try:
            self._checked(client, replies[0][1], spec)
        except ValueError:
            return False
        return True

    def means_of(self, clients: Mapping[int, Metrics]) -> Metrics:
        """Return the means of what clients reported, as in the phase that they reported it in."""
        replies = {c: Reply({}, metrics[NUM_EXAMPLES], metrics) for c, metrics in clients.items()}
        return weighted_means(replies) if replies else {}

    def refuse(self, server_round: int, reasons: Mapping[int, str]) -> None:
        """Say that clients' replies are not used, and why: a line for each reason, the first time.

        Parameters
        ----------
        server_round : int
        reasons : mapping of int to str
            By client.
        """
        alike: dict[str, list[int]] = {}
        for client, reason in sorted(reasons.items()):
            # The names of arrays and metrics are a client's words, too.
            alike.setdefault(brief(reason), []).append(client)
        for reason, clients in alike.items():
            who = f"clients {listing(clients)}" if clients[1:] else f"client {clients[0]}"
            self.last_refusal = f"{who}: {reason}"
            if any(self._said.get(client) != reason for client in clients):
                log(WARNING, "round %s: %s refused: %s", server_round, who, reason)
            self._said |= dict.fromkeys(clients, reason)

    def explain(self) -> str:
        """Return why a phase had no usable reply: the last refusal.

        As long as no reply of the run was usable, it also names the client that the method needs.
        """
        if self.method is None or self._has_right_clients:
            return self.last_refusal
        needed = client_of(self.method)
        is_named = needed in self.last_refusal
        return self.last_refusal + ("" if is_named else f" ({self.method} needs {needed}.)")


def check_reply(raw: RawReply, spec: Spec | None, wire_dtype: object = None) -> Reply:
    """Return one client's reply, checked; what travelled as `wire_dtype` is in full precision.

    Raises
    ------
    ValueError
        If it cannot be used; the message says why, for a line in the log.
    """
    if raw.error is not None:
        raise ValueError(f"it failed: {raw.error}")
    metrics: dict[str, float] = {}
    for key, value in raw.metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if is_stamp(key) or key == ALTERED:  # the message's own
            continue
        if len(key) > _LONGEST_NAME:
            raise ValueError(
                f"the name of the metric {brief(repr(key))} has {len(key):,} letters, expected at "
                f"most {_LONGEST_NAME}"
            )
        # 64 bits is what Flower's own messages hold
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"the metric {brief(repr(key))} has more than 64 bits")
        metrics[key] = value
    if len(metrics) > _MOST_METRICS:
        raise ValueError(f"it has {len(metrics):,} metrics, expected at most {_MOST_METRICS:,}")
    num_examples = metrics.get(NUM_EXAMPLES)
    if num_examples is None:
        raise ValueError(f"its metrics lack the number '{NUM_EXAMPLES}'")
    if spec is None and num_examples == 0:
        return Reply({}, 0.0, {})
    if not 0 < num_examples <= _MOST_EXAMPLES:
        raise ValueError(
            f"'{NUM_EXAMPLES}' is {num_examples}, expected more than 0 and at most 2^53"
        )
    counted = float(num_examples)
    if spec is None:
        return Reply({}, counted, metrics)
    arrays = raw.arrays or {}
    if strange := [name for name in arrays if name not in spec]:
        raise ValueError(f"its arrays have {listing(strange)}, which was not asked for")
    if missing := [name for name in spec if name not in arrays]:
        raise ValueError(f"its arrays lack {listing(missing)}")
    nbytes, checked = 0, {}
    for name, (shape, dtype) in spec.items():
        array = arrays[name]
        if not has_shape(array, shape):
            raise ValueError(f"'{name}' has shape {array.shape}, expected {shape}")
        if array.dtype != dtype and not (array.dtype.name == wire_dtype and dtype.kind == "f"):
            raise ValueError(f"'{name}' has dtype {array.dtype}, expected {dtype}")
        size = max(float(array.max()), -float(array.min())) if array.size else 0.0
        if not size <= (LARGEST if dtype.kind == "f" else math.inf):
            found = f"{size:.2g}" if math.isfinite(size) else "NaN or infinity"
            raise ValueError(
                f"'{name}' holds {found}, expected finite numbers up to {LARGEST:g}: where its "
                "training diverges, smaller steps (lr) help"
            )
        nbytes += array.nbytes
        checked[name] = array if array.dtype == dtype else array.astype(dtype)
    return Reply(checked, counted, metrics, nbytes, altered=raw.metrics.get(ALTERED) == 1)
