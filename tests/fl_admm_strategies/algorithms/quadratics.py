"""The three clients of docs/methods: f_i(w) = a_i/2 (w - b_i)^2 with one parameter, in float64.

And the two of Lp-Proj's: f_i(theta) = a_i/2 ||theta - c_i||^2, a = (1, 2), c = (1, 2), (-1, .5).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, RecordDict
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


def make_client(
    client_class: type[TorchClient[Any]], context: Context, model: type[Scalar] = Scalar
) -> Any:
    """Return the client of a context's partition, with n_i samples that are all b_i."""
    i = int(context.node_config["partition-id"])
    batch = (torch.zeros(N[i]), torch.full((N[i],), B[i], dtype=torch.float64))

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return A[i] / 2 * ((outputs - targets) ** 2).mean()

    return client_class(context, model(), [batch], loss_fn, test_loader=[batch], full_batch=True)


class Pair(nn.Module):
    """A model whose output is its two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.theta.expand(len(inputs), -1)


def pair_client(client_class: type[TorchClient[Any]], context: Context) -> Any:
    """Return the client of a context's partition, one of two."""
    i = int(context.node_config["partition-id"])
    c = torch.tensor(((1.0, 2.0), (-1.0, 0.5))[i], dtype=torch.float64).expand(1, -1)
    batch = (torch.zeros(1, 1), c)

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return (1 + i) / 2 * ((outputs - targets) ** 2).sum()

    return client_class(context, Pair(), [batch], loss_fn, test_loader=[batch], full_batch=True)


class Grid(Federation):
    """The three clients, of which those in `away` are not connected."""

    def __init__(
        self,
        client_class: type[TorchClient[Any]],
        model: type[Scalar] = Scalar,
        away: Collection[int] = (),
    ) -> None:
        self.client_class, self.model = client_class, model
        configs = [{"partition-id": i} for i in range(len(A))]
        super().__init__(client_app(self._client_fn), len(A), node_configs=configs)
        self.away = set(away)

    def _client_fn(self, context: Context) -> Any:
        return make_client(self.client_class, context, self.model).to_client()

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

    def got_in(self, kind: str, server_round: int) -> dict[int, RecordDict]:
        """Return what clients replied in a phase."""
        messages = self.replies(kind, server_round)
        return {m.metadata.src_node_id - node_of(0): m.content for m in messages}


def follow(
    strategy: StatefulStrategy,
    grid: Grid,
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
