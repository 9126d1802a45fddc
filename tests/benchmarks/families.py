"""Data of the comparison files in docs/results/baselines and docs/results/pull.

A comparison names them as ``tests.benchmarks.families:FUNCTION``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from simulations.data.federated import (
    ClientData,
    FederatedData,
    client_data,
    generator,
    split_sizes,
)
from simulations.data.har import uci_har
from simulations.data.images import digits, mnist_family
from simulations.data.partitioned import partitioned
from simulations.data.tabular import qsar

SOURCE = "shakespeare/tinyshakespeare.txt"
CONTEXT = 16  # characters before the one that is to be told


def fashion_mnist(
    seed: int, root: Path, *, clients: int = 12, samples: int = 1800, beta: float = 0.3
) -> FederatedData:
    """Return FashionMNIST by Dirichlet label shares; contrast and brightness are the client's own.

    A client's pictures are c x + b: c from 1/2 to 2, its logarithm uniform, b uniform in (-1, 1).
    """
    source = partial(mnist_family, "FashionMNIST")
    options = {"clients": clients, "samples": samples, "beta": beta}
    data = partitioned(source, "fashion-mnist", seed, root, partition="dirichlet-label", **options)
    shifted = []
    for place, client in enumerate(data.clients):
        draw = generator(seed, "contrast and brightness", place)
        contrast, brightness = 2.0 ** draw.uniform(-1, 1), draw.uniform(-1, 1)
        (x, y), (x_test, y_test) = client.train, client.test
        train, test = (contrast * part + brightness for part in (x, x_test))
        shifted.append(ClientData((train, y), None, (test, y_test)))
    return replace(data, name="fashion-mnist, own contrast and brightness", clients=shifted)


def har_people(seed: int, root: Path, *, people: int = 10) -> FederatedData:
    """Return UCI HAR of so many subjects, drawn by the seed, each a client.

    Of the training windows, which overlap by half, every second one is there.
    """
    data = uci_har(seed, root)
    drawn = np.sort(generator(seed, "people").permutation(len(data.clients))[:people])
    clients = []
    for person in drawn:
        (x, y), test = data.clients[person].train, data.clients[person].test
        clients.append(ClientData((x[::2], y[::2]), None, test))
    return replace(data, clients=clients)


def toxicity(seed: int, root: Path) -> FederatedData:
    """Return the toxic molecules of QSAR and twice as many others, by three of their bits.

    The three columns that split all molecules nearest to the middle make eight clients, and are
    left out of the inputs.
    """
    dealt = qsar(seed, root, clients=1)
    ((a, b),) = dealt.clients
    bits, toxic = a > 0, b > 0
    columns = np.argsort(np.abs(bits.mean(axis=0) - 0.5), kind="stable")[:3]
    chosen = np.concatenate(
        [np.flatnonzero(toxic), np.flatnonzero(~toxic)[: 2 * np.count_nonzero(toxic)]]
    )
    chosen = generator(seed, "toxicity").permutation(chosen)
    kind = bits[chosen][:, columns] @ [1, 2, 4]
    x = np.delete(bits[chosen], columns, axis=1).astype(np.float32)
    y = toxic[chosen].astype(np.int64)
    clients = [
        client_data(x[kind == k], y[kind == k], split_sizes(np.count_nonzero(kind == k), False))
        for k in range(8)
    ]
    return FederatedData("qsar by three bits", clients, None, "classification", x.shape[1:], 2)


def speakers(seed: int, root: Path, *, clients: int = 8, samples: int = 250) -> FederatedData:
    """Return the next character after sixteen, by speaker: those of Shakespeare's with most text.

    A client's samples are pieces of its speeches without overlap, the last fifth in the order of
    the text for testing. Where there are more than `samples`, a part is drawn by the seed.
    """
    text = (root / SOURCE).read_text(encoding="ascii")
    number = {character: place for place, character in enumerate(sorted(set(text)))}
    said: Counter[str] = Counter()
    lines: dict[str, list[str]] = {}
    for speech in text.split("\n\n"):
        name, _, words = speech.partition(":\n")
        said[name] += len(words)
        lines.setdefault(name, []).append(words)
    parts = []
    for place, (name, _) in enumerate(said.most_common(clients)):
        codes = np.array([number[character] for character in "\n".join(lines[name])])
        pieces = codes[: len(codes) // (CONTEXT + 1) * (CONTEXT + 1)].reshape(-1, CONTEXT + 1)
        drawn = generator(seed, "speakers", place).permutation(len(pieces))[:samples]
        pieces = pieces[np.sort(drawn)]
        x, y = pieces[:, :-1].astype(np.float32), pieces[:, -1].astype(np.int64)
        parts.append(client_data(x, y, split_sizes(len(y), False)))
    return FederatedData(
        "shakespeare by speaker", parts, None, "classification", (CONTEXT,), len(number)
    )


def digits_by_size(seed: int, root: Path, *, ratio: float = 50.0) -> FederatedData:
    """Return digits, three classes a client, of which the first keeps 1/ratio of its samples."""
    data = partitioned(digits, "digits", seed, root, labels_per_client=3)
    kept = []
    for place, client in enumerate(data.clients):
        x, y = client.train
        count = round(len(y) * ratio ** (place / (len(data.clients) - 1) - 1))
        kept.append(replace(client, train=(x[:count], y[:count])))
    return replace(data, clients=kept)
