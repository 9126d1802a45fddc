"""Byzantine clients: what a method endures of clients that upload something else than they should.

    same-value   c, in all places                       c ~ N(0, sigma^2)
    sign-flip    -|c| u, where u is the honest upload    c ~ N(0, sigma^2)
    gaussian     N(0, sigma^2) in every place
    one-huge     u, with 1e9 in one place
    random-labels    u, learned from labels that were drawn at random

The first three are those of FPFC's paper (arXiv:2211.04218, section 6.4.1), whose sigma are the
defaults, and of FLAME's (arXiv:2407.16397, section VI-A, with sigma^2 = 0.1), which poisons labels
as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from flwr.app import Context
from flwr.client import NumPyClient
from numpy.typing import NDArray

from clients.toolkit.round.app import ClientFn
from clients.toolkit.solving.steps import Scalars
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.maths.checks import Positive, WholeNumber, check_fields

LABELS: Final = "random-labels"
Kind = Literal["same-value", "sign-flip", "gaussian", "one-huge", "random-labels"]

SIGMAS = {"same-value": 100.0, "sign-flip": 10.0, "gaussian": 100.0}


@dataclass(frozen=True)
class Attack:
    """What malicious clients upload, and who they are.

    Parameters
    ----------
    kind : {"same-value", "sign-flip", "gaussian", "one-huge", "random-labels"}
        What is uploaded: one number in all places, the upload times a negative number, noise, the
        upload with 1e9 in one place, or what is honestly learned from labels drawn at random.
    ratio : float
        floor(ratio m) of m clients are malicious, the same for the whole run; 0 is no attack.
    sigma : float, optional
        By default 100, for "sign-flip" 10; "one-huge" and "random-labels" have none.
    seed : int (default: 0)
        Who is malicious, and every draw: c and the noise are drawn anew for every upload, from the
        seed, the client and the round.

    Raises
    ------
    ValueError, TypeError
        If a parameter is out of range.
    """

    kind: Kind
    ratio: float
    sigma: Positive | None = None
    seed: WholeNumber = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.ratio, bool) or not 0 <= self.ratio < 1:
            raise ValueError(f"ratio is {self.ratio}, expected a number in [0, 1).")
        if self.sigma is not None and self.kind not in SIGMAS:
            raise ValueError(
                f"sigma is {self.sigma}, but {self.kind!r} draws no such number: leave it out."
            )

    def malicious(self, num_clients: int) -> frozenset[int]:
        """Return the malicious ones of the clients 0, 1, ..., drawn uniformly from the seed."""
        count = int(self.ratio * num_clients + 1e-9)  # 0.29 * 100 is a little less than 29
        rng = np.random.default_rng([self.seed, *b"malicious"])
        return frozenset(rng.choice(num_clients, count, replace=False).tolist())

    def poisoned(
        self, labels: NDArray[np.integer[Any]], num_classes: int, client: int
    ) -> NDArray[np.integer[Any]]:
        """Return the labels that a malicious client learns from where `kind` is "random-labels".

        Uniform over all classes, drawn once a run from the seed and the client; of two classes the
        other one. Give them to the client in the place of its own, and the client to
        `AttackingClient`.
        """
        if num_classes == 2:
            return (1 - labels).astype(labels.dtype)
        rng = np.random.default_rng([self.seed, client, *b"labels"])
        return rng.integers(0, num_classes, labels.shape).astype(labels.dtype)

    def draw(self, arrays: Arrays, rng: np.random.Generator) -> Arrays:
        """Return what is uploaded in the place of arrays; integers stay as they are."""
        sigma = self.sigma or SIGMAS.get(self.kind, 0.0)
        floating = {name: array for name, array in arrays.items() if array.dtype.kind == "f"}
        made: dict[str, NDArray[np.float64]] = {}
        if self.kind == "same-value":
            value = rng.normal(0, sigma)
            made = {name: np.full(array.shape, value) for name, array in floating.items()}
        elif self.kind == "sign-flip":
            factor = -abs(rng.normal(0, sigma))
            made = {name: factor * array.astype(np.float64) for name, array in floating.items()}
        elif self.kind == "gaussian":
            made = {name: rng.normal(0, sigma, array.shape) for name, array in floating.items()}
        elif self.kind == "one-huge" and (filled := [n for n, a in floating.items() if a.size]):
            place = filled[0]
            made = {place: floating[place].astype(np.float64)}
            made[place].flat[0] = 1e9
        with np.errstate(over="ignore"):  # of float16: infinity, which the server refuses
            cast = {name: np.asarray(array, arrays[name].dtype) for name, array in made.items()}
        return arrays | cast

    def replace(self, arrays: Arrays, client: int, server_round: int) -> Arrays:
        """Return what a client uploads in a round in the place of arrays.

        `attacked_client_fn` does so for clients; handlers of your own call it with what they would
        upload, where the client is one of `malicious`.
        """
        rng = np.random.default_rng([self.seed, client, server_round, *b"attack"])
        return self.draw(arrays, rng)


@dataclass(eq=False)
class AttackingClient(NumPyClient):
    """Another client whose uploads are replaced by an attack.

    It trains honestly on the data that it was given and keeps what it should; only its uploads are
    others, a model or the change of a client's variables alike.
    Handshakes are honest. Where the labels are poisoned, so is the upload.
    It evaluates with 0 examples, so that all metrics are those of the other clients.

    Parameters
    ----------
    client : NumPyClient
        What it would be if it were honest.
    attack : Attack
    client_id : int
    """

    client: NumPyClient
    attack: Attack
    client_id: int

    def fit(
        self, parameters: list[NDArray[Any]], config: Scalars
    ) -> tuple[list[NDArray[Any]], int, Scalars]:
        """Train, and replace the upload."""
        uploaded, num_examples, metrics = self.client.fit(parameters, config)
        if config.get("handshake") or self.attack.kind == LABELS:
            return uploaded, num_examples, metrics
        upload = {str(place): array for place, array in enumerate(uploaded)}
        forged = self.attack.replace(upload, self.client_id, int(config.get("server-round", 0)))
        return list(forged.values()), num_examples, metrics

    def evaluate(
        self, parameters: list[NDArray[Any]], config: Scalars
    ) -> tuple[float, int, Scalars]:
        """Evaluate, with 0 examples."""
        loss, _, metrics = self.client.evaluate(parameters, config)
        return loss, 0, metrics

    def get_properties(self, config: Scalars) -> Scalars:
        """Return the client's."""
        return self.client.get_properties(config)


def attacked_client_fn(client_fn: ClientFn, attack: Attack) -> ClientFn:
    """Return a ``client_fn`` some of whose clients are malicious.

    Parameters
    ----------
    client_fn : callable
        As `client_app` and ``ClientApp(client_fn=...)`` take it.
    attack : Attack

    Returns
    -------
    callable
        Likewise. Which of its clients are malicious follows from ``partition-id`` and
        ``num-partitions`` of their contexts; the others are those of `client_fn` itself.

    Raises
    ------
    ValueError
        If the attack is on the labels, which `client_fn` reads: see `Attack.poisoned`.

    Examples
    --------
    >>> app = client_app(attacked_client_fn(client_fn, Attack("sign-flip", ratio=0.25)))
    """
    if attack.kind == LABELS:
        raise ValueError(
            f"kind is {LABELS!r}, an attack on the data, expected one on the uploads. Give a "
            "malicious client attack.poisoned(labels, num_classes, client) to train on, and return "
            "AttackingClient(client, attack, client_id) in its place."
        )

    def attacked(context: Context) -> Any:
        client, honest = int(context.node_config["partition-id"]), client_fn(context)
        if client not in attack.malicious(int(context.node_config["num-partitions"])):
            return honest
        inner: Any = getattr(honest, "numpy_client", honest)  # what NumPyClient.to_client() wraps
        return AttackingClient(inner, attack, client).to_client()

    return attacked
