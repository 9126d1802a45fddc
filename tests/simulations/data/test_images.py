"""MNIST and FashionMNIST: idx files, the deal to 20 clients, swapped labels."""

import gzip
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from simulations.data import FederatedData, load
from simulations.data.images import deal
from tests.support.refusals import refused


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    content = header + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_dataset(folder: Path, train: int = 3000, test: int = 500) -> None:
    """Made-up images: the label is pixel (0, 0), the sample's number the next two, 255 the last."""
    folder.mkdir(parents=True)
    for part, n in (("train", train), ("t10k", test)):
        images = np.zeros((n, 28, 28), np.uint8)
        images[:, 0, 0] = np.arange(n) % 10
        images[:, 0, 1], images[:, 0, 2] = np.divmod(np.arange(n), 256)
        images[:, 27, 27] = 255
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", images)
        # One of the four files plain, as torchvision leaves them: both forms are read.
        write_idx(folder / f"{part}-labels-idx1-ubyte", (np.arange(n) % 10).astype(np.uint8))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(sys.modules, "torchvision", None)  # not needed where the files are
    write_dataset(tmp_path / "MNIST" / "raw")
    return tmp_path


def numbers(x: torch.Tensor) -> list[int]:
    pixels = (x[:, 0, 0, :3] * 255).round().long()
    return (pixels[:, 1] * 256 + pixels[:, 2]).tolist()


def counts(data: FederatedData, part: str) -> np.ndarray:
    """Images of each original class (rows) at each client (columns)."""
    pixels = [(getattr(c, part)[0][:, 0, 0, 0] * 255).round().long() for c in data.clients]
    return np.stack([np.bincount(p.numpy(), minlength=10) for p in pixels], axis=1)


def test_every_image_is_dealt_once(root: Path) -> None:
    data = load("mnist-swap", 1, root)
    assert data.true_clusters.tolist() == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5
    for part, n in (("train", 3000), ("test", 500)):
        dealt = [i for c in data.clients for i in numbers(getattr(c, part)[0])]
        assert sorted(dealt) == list(range(n))
    assert min(len(c.train[1]) for c in data.clients) >= 10
    assert min(len(c.test[1]) for c in data.clients) >= 2
    x, y = data.clients[0].train
    assert x.shape == (len(y), 1, 28, 28)
    assert (x.dtype, y.dtype, x.max().item()) == (torch.float32, torch.int64, 1.0)


def test_group_g_swaps_g_and_8_minus_g_in_training_and_test(root: Path) -> None:
    data = load("mnist-swap", 1, root, validation=True)
    pairs = [(0, 8)] * 5 + [(1, 7)] * 5 + [(2, 6)] * 5 + [(3, 5)] * 5
    for (a, b), client in zip(pairs, data.clients, strict=True):
        rule = {c: c for c in range(10)} | {a: b, b: a}
        for x, y in (client.train, client.validation, client.test):
            original = (x[:, 0, 0, 0] * 255).round().long().tolist()
            assert y.tolist() == [rule[c] for c in original]


def test_deal_follows_the_shares_of_each_class() -> None:
    labels = np.repeat([0, 1], [100, 40]).astype(np.uint8)
    shares = np.array([[0.5, 0.3, 0.2], [0.0, 0.25, 0.75]])
    dealt = deal(labels, shares, np.random.default_rng(0))
    assert [np.bincount(labels[i], minlength=2).tolist() for i in dealt] == [
        [50, 0],
        [30, 10],
        [20, 30],
    ]
    assert sorted(np.concatenate(dealt)) == list(range(140))


def test_samples_takes_a_seeded_subset_of_both_parts(root: Path) -> None:
    data = load("mnist-swap", 1, root, samples=1500)
    train = [i for c in data.clients for i in numbers(c.train[0])]
    test = [i for c in data.clients for i in numbers(c.test[0])]
    assert (len(set(train)), len(set(test))) == (1500, 250)
    assert max(train) > 1500  # a random subset, not the first ones
    everything = load("mnist-swap", 1, root, samples=10**6)
    assert sum(len(c.train[1]) for c in everything.clients) == 3000


def test_a_damaged_idx_file_is_named(root: Path) -> None:
    path = root / "MNIST" / "raw" / "train-images-idx3-ubyte.gz"
    path.write_bytes(b"\x1f\x8b\x08\x00")
    with refused(ValueError, path, "http"):
        load("mnist-swap", 1, root)
