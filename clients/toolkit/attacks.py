"""Byzantine clients: what a method endures of clients that upload something else than they should.

    same-value   c, in all places                       c ~ N(0, sigma^2)
    sign-flip    -|c| u, where u is the honest upload    c ~ N(0, sigma^2)
    gaussian     N(0, sigma^2) in every place
    one-huge     u, with 1e30 in one place

The first three are those of FPFC's paper (arXiv:2211.04218, section 6.4.1), whose sigma are the
defaults, and of FLAME's (arXiv:2407.16397, section VI-A, with sigma^2 = 0.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.maths.checks import check_choice, check_count, check_positive
from fl_admm_strategies.runtime.messages import (
    CONFIG,
    NUM_EXAMPLES,
    UPLOAD,
    from_array_record,
    parse_groups,
    read_names,
    to_array_record,
)

from .app import ClientFn
from .base import MethodClient, Scalars

Kind = Literal["same-value", "sign-flip", "gaussian", "one-huge"]

SIGMAS = {"same-value": 100.0, "sign-flip": 10.0, "gaussian": 100.0}
HUGE = 1e30


@dataclass(frozen=True)
class Attack:
    """What malicious clients upload, and who they are.

    Parameters
    ----------
    kind : {"same-value", "sign-flip", "gaussian", "one-huge"}
        What is uploaded: one number in all places, the upload times a negative number, noise, or
        the upload with 1e30 in one place.
    ratio : float
        floor(ratio m) of m clients are malicious, the same for the whole run; 0 is no attack.
    sigma : float, optional
        By default 100, for "sign-flip" 10; "one-huge" has none.
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
    sigma: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, (*SIGMAS, "one-huge"))
        if isinstance(self.ratio, bool) or not 0 <= self.ratio < 1:
            raise ValueError(f"ratio is {self.ratio}, expected a number in [0, 1).")
        if self.sigma is not None:
            check_positive("sigma", self.sigma)
            if self.kind == "one-huge":
                raise ValueError(
                    f"sigma is {self.sigma}, but 'one-huge' draws nothing: leave it out."
                )
        check_count("seed", self.seed, least=0)

    def malicious(self, num_clients: int) -> frozenset[int]:
        """Return the malicious ones of the clients 0, 1, ..., drawn uniformly from the seed."""
        count = int(self.ratio * num_clients + 1e-9)  # 0.29 * 100 is a little less than 29
        rng = np.random.default_rng([self.seed, *b"malicious"])
        return frozenset(rng.choice(num_clients, count, replace=False).tolist())

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
        elif place := next((name for name, array in floating.items() if array.size), None):
            made = {place: floating[place].astype(np.float64)}
            made[place].flat[0] = HUGE
        with np.errstate(over="ignore"):  # of float16: infinity, which the server refuses
            cast = {name: np.asarray(array, arrays[name].dtype) for name, array in made.items()}
        return arrays | cast

    def replace(self, arrays: Arrays, client: int, server_round: int) -> Arrays:
        """Return `draw` with the random numbers of a client in a round."""
        rng = np.random.default_rng([self.seed, client, server_round, *b"attack"])
        return self.draw(arrays, rng)


class AttackingClient(NumPyClient):
    """Another client whose uploads are replaced by an attack.

    It trains honestly on honest data and keeps what it should; only the message is another, and of
    that what the method's paper calls the message: see `MethodClient.forge`. Handshakes are honest.
    It evaluates with 0 examples, so that all metrics are those of the other clients.

    Parameters
    ----------
    client : NumPyClient
        What it would be if it were honest.
    attack : Attack
    client_id : int
    """

    def __init__(self, client: NumPyClient, attack: Attack, client_id: int) -> None:
        self.client = client
        self.attack = attack
        self.client_id = client_id

    def fit(
        self, parameters: list[NDArray[Any]], config: Scalars
    ) -> tuple[list[NDArray[Any]], int, Scalars]:
        """Train, and replace the upload."""
        uploaded, num_examples, metrics = self.client.fit(parameters, config)
        if config.get("handshake"):
            return uploaded, num_examples, metrics
        named = dict(zip(_upload_names(config, len(uploaded)), uploaded, strict=True))
        server_round = int(config.get("server-round", 0))
        attack = partial(self.attack.replace, client=self.client_id, server_round=server_round)
        if isinstance(self.client, MethodClient) and hasattr(self.client, "instruction"):
            asked = self.client.instruction.decode(parameters, config)
            forged = self.client.forge(named, asked, attack)
        else:  # a client of FedAvg: all of its model is the message
            forged = attack(named)
        return [forged[name] for name in named], num_examples, metrics

    def evaluate(
        self, parameters: list[NDArray[Any]], config: Scalars
    ) -> tuple[float, int, Scalars]:
        """Evaluate, with 0 examples."""
        loss, _, metrics = self.client.evaluate(parameters, config)
        return loss, 0, metrics

    def get_parameters(self, config: Scalars) -> list[NDArray[Any]]:
        """Return the client's."""
        return self.client.get_parameters(config)

    def get_properties(self, config: Scalars) -> Scalars:
        """Return the client's."""
        return self.client.get_properties(config)


def forge_z(u: Arrays, asked: Any, attack: Callable[[Arrays], Arrays]) -> Arrays:
    """Return the u_i of which the server makes the z_i that an attack wants.

    With pi_i <- pi_i + rho (u_i - w) its z_i is 2 u_i - (w - pi_i/rho): twice u_i less the anchor.
    """
    z = attack({name: 2 * array - asked.anchor[name] for name, array in u.items()})
    return {name: (array + asked.anchor[name]) / 2 for name, array in z.items()}


def _upload_names(config: Mapping[str, Any], count: int) -> list[str]:
    if (wanted := config.get(UPLOAD)) is not None:
        return read_names(UPLOAD, wanted)
    groups = parse_groups(config)  # none from a plain FedAvg server
    return [str(place) for place in range(count)] if groups is None else next(iter(groups.values()))


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

    Examples
    --------
    >>> app = client_app(attacked_client_fn(client_fn, Attack("sign-flip", ratio=0.25)))
    """

    def attacked(context: Context) -> Any:
        client, honest = _client_of(context, None), client_fn(context)
        if client not in attack.malicious(int(context.node_config["num-partitions"])):
            return honest
        inner: Any = getattr(honest, "numpy_client", honest)  # what NumPyClient.to_client() wraps
        return AttackingClient(inner, attack, client).to_client()

    return attacked


def attacked_app(app: ClientApp, attack: Attack, *, num_clients: int | None = None) -> ClientApp:
    """Return a `ClientApp` some of whose clients are malicious, whatever it is made of.

    All floating point arrays of a reply to a training message are replaced. Of this library's
    methods some send more than their message: use `attacked_client_fn` for those.

    Parameters
    ----------
    app : ClientApp
    attack : Attack
    num_clients : int, optional
        By default ``num-partitions`` of the nodes; give it where a node hosts several clients.
    """
    return _AttackedApp(app, attack, num_clients)


class _AttackedApp(ClientApp):
    def __init__(self, app: ClientApp, attack: Attack, num_clients: int | None) -> None:
        super().__init__()
        self._app, self._attack, self._num_clients = app, attack, num_clients

    def __call__(self, message: Message, context: Context) -> Message:
        reply = self._app(message, context)
        kind = message.metadata.message_type.partition(".")[0]
        if reply.has_error() or kind not in ("train", "evaluate"):
            return reply
        malicious = self._attack.malicious(
            self._num_clients or int(context.node_config["num-partitions"])
        )
        for key in list(reply.content):
            record, suffix = reply.content[key], key.partition("@")[2]
            client = int(suffix) if suffix else _client_of(context, self._num_clients)
            if client not in malicious:
                continue
            if kind == "evaluate" and isinstance(record, MetricRecord):
                for name in {NUM_EXAMPLES, "num_examples"} & record.keys():
                    record[name] = 0
            elif kind == "train" and isinstance(record, ArrayRecord):
                config = _config_of(message, suffix)
                if not config.get("handshake"):
                    arrays = from_array_record(record)
                    server_round = int(config.get("server-round", 0))
                    forged = self._attack.replace(arrays, client, server_round)
                    reply.content[key] = to_array_record(forged)
        return reply


def _client_of(context: Context, num_clients: int | None) -> int:
    """Return the client of a node that is one.

    Raises
    ------
    ValueError
        If the node does not say which client of how many it is.
    """
    config = context.node_config
    if "partition-id" not in config or "num-partitions" not in config:
        raise ValueError(
            f"node_config is {dict(config)}, expected partition-id and num-partitions: they say "
            "which clients are malicious."
        )
    node, nodes = int(config["partition-id"]), int(config["num-partitions"])
    return node * (num_clients or nodes) // nodes  # as `client_app` deals them out


def _config_of(message: Message, suffix: str) -> dict[str, Any]:
    """Return the settings that a client was sent, under whichever API."""
    records = message.content.config_records
    found = records.get(f"{CONFIG}@{suffix}") if suffix else next(iter(records.values()), None)
    return dict(found or {})
