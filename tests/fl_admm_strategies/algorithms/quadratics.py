"""The three clients of docs/methods: f_i(w) = a_i/2 (w - b_i)^2 with one parameter, in float64.

And the two of Lp-Proj's: f_i(theta) = a_i/2 ||theta - c_i||^2, a = (1, 2), c = (1, 2), (-1, .5).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from flwr.app import ArrayRecord, Context, MessageType, RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn

from clients import TorchClient, client_app
from fl_admm_strategies import StatefulStrategy
from tests.support.federation import Federation, node_of

A, B, N = (1.0, 2.0, 4.0), (1.0, -1.0, 3.0), (10, 20, 30)


class Scalar(nn.Module):
    """A model whose output is its one parameter, w."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.w.expand(len(inputs))


class Counting(Scalar):
    """Scalar with a float and an integer buffer, as batch norm has: `seen` and `steps`."""

    seen: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen += len(inputs)
            self.steps += 1
        return super().forward(inputs)


THREE = (*zip(A, B, N, strict=True),)


def make_client(
    client_class: type[TorchClient[Any]],
    context: Context,
    model: type[Scalar] = Scalar,
    losses: Sequence[tuple[float, float, int]] = THREE,
) -> Any:
    """Return the client of a context's partition, with n_i samples that are all b_i."""
    a, b, n = losses[int(context.node_config["partition-id"])]
    batch = (torch.zeros(n), torch.full((n,), b, dtype=torch.float64))

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return a / 2 * ((outputs - targets) ** 2).mean()

    return client_class(context, model(), [batch], loss_fn, test_loader=[batch], full_batch=True)


class Point(nn.Module):
    """A model whose output is its parameters, at 0."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.theta.expand(len(inputs), -1)


def point_client(
    client_class: Any,
    context: Context,
    b: Sequence[float],
    c: Any,
    sizes: Sequence[int] = (),
    model: nn.Module | None = None,
) -> Any:
    """Return the client of a context's partition: f_i(theta) = b_i/2 ||theta - c_i||^2."""
    i = int(context.node_config["partition-id"])
    own, n = torch.tensor(c[i], dtype=torch.float64), sizes[i] if sizes else 1
    batch = (torch.zeros(n, 1), own.expand(n, -1))

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return b[i] / 2 * ((outputs - targets) ** 2).sum(dim=1).mean()

    return client_class(
        context, model or Point(len(own)), [batch], loss_fn, test_loader=[batch], full_batch=True
    )


PAIR = (1.0, 2.0), ((1.0, 2.0), (-1.0, 0.5))
"""b and c of Lp-Proj's two clients."""


class Grid(Federation):
    """The clients, by default the three, of which those in `away` are not connected."""

    def __init__(
        self,
        client_class: type[TorchClient[Any]],
        model: type[Scalar] = Scalar,
        away: Collection[int] = (),
        losses: Sequence[tuple[float, float, int]] = THREE,
    ) -> None:
        self.client_class, self.model, self.losses = client_class, model, losses
        configs = [{"partition-id": i} for i in range(len(losses))]
        super().__init__(client_app(self._client_fn), len(losses), node_configs=configs)
        self.away = set(away)

    def _client_fn(self, context: Context) -> Any:
        return make_client(self.client_class, context, self.model, self.losses).to_client()

    def own(self, client: int) -> dict[str, NDArray[Any]]:
        """Return the model that a client keeps."""
        context = self.context(node_of(client))
        arrays: dict[str, NDArray[Any]] = make_client(
            self.client_class, context, self.model
        ).personal_arrays()
        return arrays

    def own_w(self, *clients: int) -> list[float]:
        """Return the one parameter of the models that clients keep."""
        return [float(self.own(client)["w"].item()) for client in clients]

    def sent_in(self, kind: str, server_round: int) -> dict[int, RecordDict]:
        """Return what clients were sent in a phase."""
        messages = self.phase(kind, server_round)
        return {m.metadata.dst_node_id - node_of(0): m.content for m in messages}

    def uploads(self, server_round: int) -> list[float]:
        """Return the one parameter of the uploads of a round, in the order of the clients."""
        replies = [m for m in self.replies(MessageType.TRAIN, server_round) if not m.has_error()]
        replies.sort(key=lambda reply: reply.metadata.src_node_id)
        records = [reply.content["arrays"] for reply in replies]
        return [float(record["w"].numpy().item()) for record in records if "w" in record]

    def got_in(self, kind: str, server_round: int) -> dict[int, RecordDict]:
        """Return what clients replied in a phase."""
        messages = self.replies(kind, server_round)
        return {m.metadata.src_node_id - node_of(0): m.content for m in messages}


def follow(
    strategy: StatefulStrategy,
    grid: Any,
    *rounds: Sequence[int],
    read: Callable[[], Any] = lambda: None,
    after: Mapping[int, Callable[[], None]] | None = None,
) -> list[Any]:
    """Run the rounds, in each of which these clients train, in place of a draw, from w = 0.

    Returns what `read` says after every round; ``after[server_round]`` is called then.
    """
    seen: list[Any] = []
    script = iter(rounds)
    strategy.run.sampling.for_training = lambda *_: list(next(script))  # type: ignore[method-assign]

    def on_round(server_round: int, metrics: Mapping[str, float]) -> None:
        seen.append(read())
        (after or {}).get(server_round, lambda: None)()

    first = ArrayRecord(grid.model().state_dict())
    strategy.start(grid, first, len(rounds), on_round=on_round)
    return seen


ALL = (0, 1, 2)


class Ran(NamedTuple):
    """w after every round, and the clients' uploads and own models in it, in their order.

    An own model is w^0 = 0 until its client has trained.
    """

    w: list[float]
    uploads: list[list[float]]
    own: list[list[float]]


def run(strategy: StatefulStrategy, grid: Grid, *rounds: Sequence[int], **options: Any) -> Ran:
    """Run the rounds as `follow` does, of a model with the one parameter w."""

    def read() -> tuple[float, list[float]]:
        trained = [i for i in ALL if grid.context(node_of(i)).state.array_records]
        own = [grid.own_w(i)[0] if i in trained else 0.0 for i in ALL]
        return strategy.global_model()["w"].item(), own

    seen = follow(strategy, grid, *rounds, read=read, **options)
    uploads = [grid.uploads(server_round) for server_round in range(1, len(rounds) + 1)]
    return Ran([w for w, _ in seen], uploads, [own for _, own in seen])
