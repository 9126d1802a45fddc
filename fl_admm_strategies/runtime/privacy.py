"""Differential privacy of whole clients: uploads are clipped and noised, and epsilon is counted.

Two federations are neighbours if they differ in the data of one client. Its upload, clipped to a
distance C from where it would change nothing, moves the sum of a round's uploads by 2 C at most.
Where all that a server gives out follows from these sums, noise of standard deviation z C in each
makes every round a Gaussian mechanism (docs/privacy.md has the derivations, and what is not
covered).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib import import_module
from logging import WARNING
from typing import Any, Literal

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from ..maths.blocks import Arrays
from ..maths.checks import Fraction, NotNegative, Positive, check_fields, listing
from .algorithm import Algorithm
from .messages.changes import CLIP, NOISE, NOISED
from .messages.records import Metrics, Reply, Scalar
from .messages.wire import WireDtype
from .trust.layout import Layout
from .uploads import Altered, Upload

_ORDERS = range(2, 65)
"""Of Renyi divergence. Between them the sampled Gaussian mechanism's bound is interpolated."""
_GUESSABLE = 2**64


@dataclass(frozen=True, kw_only=True)
class ClientDP:
    """Client-level differential privacy: the ``privacy`` of a strategy.

    Needs ``pip install 'fl-admm-strategies[privacy]'``, which counts epsilon.

    Parameters
    ----------
    clip : float
        C, how far an upload may be from the one that would change nothing at the server, which in
        most methods is the model that was sent, as the Euclidean norm over all of its arrays. One
        that is further away is scaled back to it.
    noise_multiplier : float
        z: the noise's standard deviation is z C in every number, of the sum of a round's uploads or
        of each upload. 0 clips only.
    delta : float
        Of (epsilon, delta): below one over the number of clients.
    noise_at : {"server", "client"} (default: "server")
        "server" (central): the server is trusted with uploads, and adds the noise once a round.
        "client" (local): every client clips and adds noise itself, and trusts no other party.

    Raises
    ------
    ImportError
        If the library that counts epsilon is not installed.
    """

    clip: Positive
    noise_multiplier: NotNegative
    delta: Fraction
    noise_at: Literal["server", "client"] = "server"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.delta >= 1:
            raise ValueError(f"delta is {self.delta}, expected a number in (0, 1), such as 1e-5.")
        try:
            import_module("dp_accounting")
        except ImportError as error:
            raise ImportError(
                "ClientDP needs dp-accounting, which counts epsilon, and it cannot be imported: "
                f"{error}. Run: pip install 'fl-admm-strategies[privacy]'"
            ) from error

    @property
    def std(self) -> float:
        """Standard deviation of the noise."""
        return self.clip * self.noise_multiplier


class Privacy:
    """Adds a run's noise at the server, and counts its epsilon.

    Parameters
    ----------
    setting : ClientDP or None
    seed : int
        The run's.
    """

    def __init__(self, setting: ClientDP | None, seed: int) -> None:
        if setting is not None and not isinstance(setting, ClientDP):
            raise TypeError(
                f"privacy is {setting!r}, expected ClientDP(clip=..., noise_multiplier=..., "
                "delta=...)."
            )
        self.setting = setting
        self._seed = seed
        self.reset()

    @property
    def is_central(self) -> bool:
        """Whether the server clips and adds the noise."""
        return self.setting is not None and self.setting.noise_at == "server"

    @property
    def is_local(self) -> bool:
        """Whether the clients do."""
        return self.setting is not None and self.setting.noise_at == "client"

    def asks(self, upload: Upload) -> dict[str, Scalar]:
        """Return the settings of clients that add noise, or that clip changes of their own."""
        if (dp := self.setting) is None:
            return {}
        if self.is_local:
            return {CLIP: dp.clip, NOISE: dp.std}
        return {CLIP: dp.clip} if upload.kind == "sum" else {}

    def reset(self) -> None:
        """Start a run."""
        self._spent: dict[int, float] = {}  # the sum of 1/z^2 over the rounds a client was asked in
        self._rounds = Counter[tuple[float, int, int]]()  # by z, the clients asked, and all

    def check(self, algorithm: Algorithm, layout: Layout, wire_dtype: WireDtype) -> None:
        """Refuse a run in which epsilon would not be true, before anybody trains.

        Raises
        ------
        ValueError
            If the method's state is no function of noisy sums, uploads are not counted alike, or
            the model has arrays that cannot be noised.
        """
        if self.setting is None:
            return
        name, upload, reason = type(algorithm).__name__, algorithm.upload, ""
        if not upload.goes_with(
            "noise at the server" if self.is_central else "noise at the clients"
        ):
            advice = {
                "own copy": " Give noise_at='client'; or, where there is the setting, "
                "duals='client' or aggregation='mean'.",
                "sum": " Give noise_at='server'.",
            }
            reason = f"{upload.because()}.{advice.get(upload.kind, '')}"
        elif self.is_central and getattr(algorithm, "weights", "uniform") == "size":
            reason = (
                "weights is 'size', and one client's part in a mean by examples has no bound. "
                "Give weights='uniform'."
            )
        elif upload.kind == "sum" and wire_dtype is not None:
            reason = (
                f"wire_dtype is {wire_dtype!r}, and rounding would take uploads beyond "
                "the clip, which its clients keep to themselves. Leave out wire_dtype."
            )
        if reason:
            raise ValueError(f"{name} cannot have privacy={self.setting}: {reason}")
        if others := [array for array in layout.to_send() if array not in layout.trained]:
            raise ValueError(
                f"{name} cannot have privacy=ClientDP(...) with a model that does not train "
                f"{listing(others)}: with noise a variance may be negative, and a counter has "
                "none. Take GroupNorm in place of BatchNorm."
            )
        if self.is_central and self.setting.noise_multiplier and self._seed < _GUESSABLE:
            log(
                WARNING,
                f"privacy: the noise follows from seed={self._seed}, which can be guessed. That is "
                "good for experiments; where epsilon must hold, give seed=secrets.randbits(128).",
            )

    # ------------------------------------------------------------------------------------------
    # Noise
    # ------------------------------------------------------------------------------------------

    def apply(self, server_round: int, replies: dict[int, Reply]) -> Altered:
        """Return clipped replies that count alike, each with an equal part of the sum's noise."""
        if self.setting is None or not self.is_central:
            return Altered(replies, {})
        replies = {client: replace(reply, num_examples=1.0) for client, reply in replies.items()}
        uploads = {client: reply.arrays for client, reply in replies.items() if reply.arrays}
        if uploads and self.setting.noise_multiplier:
            chance, like = self._chance(server_round, uploads), next(iter(uploads.values()))
            noise = {n: chance.normal(0.0, self.setting.std, a.shape) for n, a in like.items()}
            for client, arrays in uploads.items():
                noisy = {
                    name: (array + noise[name] / len(uploads)).astype(array.dtype)
                    for name, array in arrays.items()
                }
                replies[client] = replace(replies[client], arrays=noisy)
        return Altered(replies, {})

    def _chance(self, server_round: int, uploads: Mapping[int, Arrays]) -> np.random.Generator:
        """Return the generator of a round's noise.

        It depends on the uploads. If a round is done again after an interrupt, with other uploads,
        it gets other noise; with the same noise, the difference of both would be without any.
        """
        digest = blake2b(str((self._seed, server_round, [*uploads])).encode())
        for arrays in uploads.values():
            for array in arrays.values():
                digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return np.random.default_rng(int.from_bytes(digest.digest(), "little"))

    def check_reply(self, reply: Reply) -> None:
        """Raise ValueError if a client was to add noise and does not say that it did."""
        if self.is_local and reply.metrics.pop(NOISED, 0) != 1:
            raise ValueError(
                "its reply does not say that the client has clipped its upload and added noise, "
                f"for which privacy asks. Use a client of this library; one of your own adds the "
                f"metric {NOISED!r}: 1."
            )

    # ------------------------------------------------------------------------------------------
    # Epsilon
    # ------------------------------------------------------------------------------------------

    def spend(self, clients: Collection[int], num_clients: int, *, stateless: bool) -> None:
        """Count a round in which these clients, out of so many, were asked for an upload.

        `stateless`: what they upload depends on nothing but their data and what they were sent.
        """
        if self.setting is None or not clients:
            return
        z = self.setting.noise_multiplier / 2  # times 2 C, what replacing a client can change
        for client in clients:
            self._spent[client] = self._spent.get(client, 0.0) + (1 / z**2 if z else math.inf)
        if stateless and z:  # noise of a client's own, for all who know that it was drawn
            size = len(clients) if self.is_central else num_clients
            self._rounds[z, size, num_clients] += 1

    def measured(self) -> Metrics:
        """Return ``epsilon``: what the rounds have cost the client that was asked most often.

        Its rounds are one Gaussian mechanism. Where clients are `stateless`, the secret of the
        sampling counts as well: the bound for fixed-size sampling of Wang, Balle, Kasiviswanathan
        (AISTATS 2019) may be smaller.
        """
        if self.setting is None:
            return {}
        most, delta = max(self._spent.values(), default=0.0), self.setting.delta
        library = import_module("dp_accounting")
        found: float = library.get_epsilon_gaussian(most**-0.5 if most else math.inf, delta)
        if self._rounds and math.isfinite(found):
            accountant = library.rdp.RdpAccountant(_ORDERS, library.NeighboringRelation.REPLACE_ONE)
            for (z, size, num_clients), count in self._rounds.items():
                event = library.GaussianDpEvent(z)
                drawn = library.SampledWithoutReplacementDpEvent(num_clients, size, event)
                accountant.compose(drawn, count)
            found = min(found, accountant.get_epsilon(delta))
        return {"epsilon": float(found)}

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return what a resumed run goes on counting from."""
        if self.setting is None:
            return {}
        rounds = [[*sampled, count] for sampled, count in self._rounds.items()]
        return {
            "privacy_ids": np.array([*self._spent], dtype=np.int64),
            "privacy_spent": np.array([*self._spent.values()], dtype=np.float64),
            "privacy_rounds": np.array(rounds, dtype=np.float64).reshape(-1),
        }

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned."""
        if self.setting is None:
            return
        ids, spent = arrays["privacy_ids"].tolist(), arrays["privacy_spent"].tolist()
        self._spent = dict(zip(ids, spent, strict=True))
        for z, size, num_clients, count in arrays["privacy_rounds"].reshape(-1, 4).tolist():
            self._rounds[z, int(size), int(num_clients)] = int(count)
