"""All clients train in every round; those that are drawn upload, and only they are averaged."""

from __future__ import annotations

from collections.abc import Sequence

from ...maths.blocks import Spec
from ...runtime.sampled import SampledStrategy


class EveryoneTrains(SampledStrategy):
    """Who trains and who uploads, where a method's personal part moves in every client.

    Parameters
    ----------
    everyone_trains : bool (default: True)
        False: only those who are drawn train.
    **base
        The parameters of `SampledStrategy`.
    """

    everyone_trains: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._idle = frozenset[int]()  # who trains in this round and uploads nothing

    @property
    def all_upload(self) -> bool:
        """Whether all clients of a round upload arrays: those that were not drawn do not."""
        return not self.everyone_trains or self.fraction_train == 1

    def in_training(self, drawn: Sequence[int]) -> list[int]:
        """Return who trains in a round for which these were drawn."""
        everyone = self.client_ids if self.everyone_trains else drawn
        self._idle = frozenset(everyone).difference(drawn)
        return sorted({*drawn} | self._idle)

    def wanted_of(self, client_id: int) -> list[str] | None:
        """Return the arrays that a client of this round uploads: none, or all (None)."""
        return [] if client_id in self._idle else None

    def upload_spec_of(self, client_id: int) -> Spec:
        """Return an upload's arrays, of which clients that were not drawn have none."""
        return {} if client_id in self._idle else self.upload_spec()
