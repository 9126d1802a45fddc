"""A bound on what one client can do in a round: its upload stays near the model of its message."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from logging import INFO
from statistics import median_low
from typing import Any, Literal

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from ...maths.blocks import Arrays, as_dtype
from ...maths.checks import check_positive, listing
from ..messages.records import ClientInstruction, Metrics, Reply
from ..uploads import Altered

MaxNorm = float | Literal["auto"] | None

FACTOR = 1.5
"""``"auto"``: the bound is so many times the running median (docs/robustness.md says why)."""
LOOSE = 5.0
"""The same of a run that has settled, where a bound that honest uploads reach would move what the
run converges to: what is beyond this one is refused."""
FAR = 10.0
"""Without a `max_norm`: an upload beyond so many times the largest running median is refused.
Honest clients with a hundred times the samples of others stay below it (docs/robustness.md)."""
_NORMS = 50  # the last distances, of which it is the median
_PART = 2**15  # numbers that are measured at once
_FEWEST_CLIENTS, _FEWEST_NORMS = 5, 3  # without which no client is far from the others


class UploadLimit:
    """Holds uploads to a distance from what their clients were sent.

    The distance is the Euclidean norm over all floating point arrays of an upload. Integers, such
    as a batch norm's counter, would drown it and are not counted; with an upload that is clipped
    they move as well.

    Parameters
    ----------
    algorithm : Algorithm
        It says what an upload is measured from; an array that is missing there, or has another
        shape, is measured from 0.
    max_norm : float, "auto" or None
        The largest distance. "auto": `FACTOR` times the median of the last 50, those of the present
        round among them (all of these, should they be more). In it an earlier upload counts as no
        more than the bound of its round. None: an upload is refused that is beyond `FAR` times the
        largest such median of the run so far; none is before there are three, nor in a run of
        fewer than five clients. Infinity: there is no bound.
    clips : bool (default: True)
        Whether an upload beyond a `max_norm` is scaled back to it, or refused.
    is_loose : callable, optional
        Returns whether the factor is `LOOSE` now, and what is beyond it refused.
    is_free : callable, optional
        Returns of what a client was sent whether its upload is not bounded.
    """

    def __init__(
        self,
        algorithm: Any,
        max_norm: MaxNorm,
        *,
        clips: bool = True,
        is_loose: Callable[[], bool] = lambda: False,
        is_free: Callable[[ClientInstruction], bool] = lambda sent: False,
    ) -> None:
        if max_norm not in (None, "auto", math.inf):
            if isinstance(max_norm, str):
                raise ValueError(f"max_norm is {max_norm!r}, expected 'auto' or a number > 0.")
            check_positive("max_norm", max_norm)
        self._algorithm, self.max_norm = algorithm, max_norm
        self._clips = clips
        self._is_loose, self._is_free = is_loose, is_free
        self.reset()

    def reset(self) -> None:
        """Start a run."""
        self._norms: deque[float] = deque(maxlen=_NORMS)
        self._largest_median = 0.0
        self._measured: Metrics = {}

    def forget_norms(self) -> None:
        """Forget past distances, where clients are asked for something else from now on."""
        self._norms.clear()
        self._largest_median = 0.0

    def apply(self, server_round: int, replies: dict[int, Reply]) -> Altered:
        """Return what may be used of a round's replies, and why others may not."""
        # Who uploads nothing is at no distance, and would draw the median to 0.
        moved = [
            c for c, reply in replies.items() if reply.arrays and not self._is_free(reply.sent)
        ]
        if self.max_norm == math.inf or not moved:
            return Altered(replies, {})
        reference = self._algorithm.upload_reference
        starts = {client: reference(replies[client].sent) for client in moved}
        norms = {client: _distance(replies[client].arrays, starts[client]) for client in moved}
        limit = self._limit(norms, len(self._algorithm.membership))
        excess = {client: norm for client, norm in norms.items() if norm > limit}
        refuses = self.max_norm is None or not self._clips or self._is_loose()
        self._measured = {}
        if excess or self.max_norm is not None:
            name = "refused" if refuses else "clipped"
            self._measured = {name: len(excess), "norm-bound": limit}
        if refuses:
            advice = ""
            if self.max_norm is None:
                advice = f", {FAR:g} times what is usual. If you trust it, give max_norm=math.inf"
            reason = f"from what it was sent, the bound is {limit:.3g}{advice}"
            return Altered(
                {client: reply for client, reply in replies.items() if client not in excess},
                {client: f"its upload is {norm:.3g} {reason}" for client, norm in excess.items()},
            )
        if excess:
            log(
                INFO,
                f"round {server_round}: the uploads of clients {listing(list(excess))}, up to "
                f"{max(excess.values()):.3g} from what they were sent, are clipped to {limit:.3g}",
            )
        clipped = {c: _scaled(replies[c], starts[c], limit / norm) for c, norm in excess.items()}
        return Altered(replies | clipped, {})

    def _limit(self, norms: Mapping[int, float], num_clients: int) -> float:
        if self.max_norm is not None and self.max_norm != "auto":
            return float(self.max_norm)
        known = [*self._norms, *norms.values()][-max(_NORMS, len(norms)) :]
        if self.max_norm is None:
            # The largest so far: late in a run most hardly move, but for who joins it. And where a
            # whole round moves further (another step size), that is what is usual now.
            if num_clients >= _FEWEST_CLIENTS and len(known) >= _FEWEST_NORMS:
                own = median_low(norms.values()) if len(norms) > 1 else 0.0
                self._largest_median = max(self._largest_median, median_low(known), own)
            limit = FAR * self._largest_median or math.inf
        else:
            limit = (LOOSE if self._is_loose() else FACTOR) * median_low(known)
        # What is beyond the bound counts as the bound, refused or not: if honest clients come to
        # move further all at once, the bound follows in some rounds. From 0 it could not.
        self._norms.extend(min(norm, limit) if limit > 0 else norm for norm in norms.values())
        return limit

    def measured(self) -> Metrics:
        """Return ``clipped`` or ``refused``, how many the last round had, and ``norm-bound``.

        Without a `max_norm` only of a round in which there were any.
        """
        return self._measured

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return what a resumed run needs.

        The last norms, NaN where there are fewer, and the largest median.
        """
        if self.max_norm not in (None, "auto"):
            return {}
        norms = np.full(_NORMS, np.nan)
        norms[: len(self._norms)] = self._norms
        return {"norms": norms, "largest-median": np.array(self._largest_median)}

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned; a run that had no such bound starts with none."""
        saved = arrays.get("norms", np.zeros(0))
        self._norms = deque(saved[~np.isnan(saved)].tolist(), maxlen=_NORMS)
        self._largest_median = float(arrays.get("largest-median", 0.0))


def _distance(arrays: Arrays, reference: Arrays) -> float:
    """Return the Euclidean norm of the change, over the floating point arrays.

    Parts that stay in the processor's cache are summed in the precision of the array: its numbers
    are below `LARGEST`, so that no square overflows.
    """
    square = 0.0
    for name, array in arrays.items():
        if array.dtype.kind == "f":
            flat, start = array.ravel(), _start(array, reference.get(name)).ravel()
            dtype = np.result_type(array, np.float32)
            for low in range(0, flat.size, _PART):
                part = slice(low, low + _PART)
                change = np.subtract(flat[part], start[part], dtype=dtype)
                square += float(np.add.reduce(np.square(change, out=change)))
    return math.sqrt(square)


def _scaled(reply: Reply, reference: Arrays, factor: float) -> Reply:
    """Return a reply with only a part of its upload's change."""
    arrays: Arrays = {}
    for name, array in reply.arrays.items():
        start = _start(array, reference.get(name)).astype(np.float64)
        arrays[name] = as_dtype(np.asarray(start + factor * (array - start)), array.dtype)
    return replace(reply, arrays=arrays, altered=True)


def _start(array: NDArray[Any], reference: NDArray[Any] | None) -> NDArray[Any]:
    """Return what an array is measured from."""
    if reference is None or reference.shape != array.shape:
        return np.zeros_like(array)
    return reference
