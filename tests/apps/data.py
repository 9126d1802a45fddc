"""The batches of the apps' data sets, made of files that are here."""

from __future__ import annotations

import io
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from torch.utils.data import DataLoader, Dataset, default_collate

from simulations.data.files import read_idx
from tests.apps.converted import APPS

DATA = Path(os.environ.get("FL_ADMM_DATA", APPS.parent / "data"))
CIFAR = DATA / "cifar10" / "cifar10_jpeg_q75.npz"

needs_cifar = pytest.mark.skipif(
    not CIFAR.is_file(), reason=f"CIFAR-10 as JPEG is not in {CIFAR}; set FL_ADMM_DATA"
)


class Images(Dataset[dict[str, Any]]):
    """CIFAR-10's images as flwr-datasets gives them: dicts of ``img`` and ``label``."""

    def __init__(self, first: int, last: int) -> None:
        from PIL import Image

        raw = _cifar()
        offsets, data = raw["offset"], raw["data"]
        indices = np.random.default_rng(0).permutation(len(raw["label"]))[first:last]
        pictures = [Image.open(io.BytesIO(data[offsets[i] : offsets[i + 1]])) for i in indices]
        pixels = np.stack([np.asarray(picture) for picture in pictures])
        self.images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
        self.labels = [int(raw["label"][i]) for i in indices]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"img": self.images[index], "label": self.labels[index]}


@cache
def _cifar() -> dict[str, Any]:
    with np.load(CIFAR) as file:
        return {name: file[name] for name in ("data", "offset", "label")}


@cache
def _images(first: int, last: int) -> Images:
    return Images(first, last)


_TRAIN, _TEST = 64, 32


def cifar_loaders(partition_id: int, num_partitions: int, batch_size: int) -> tuple[Any, Any]:
    """Stand in for the quickstart's `load_data`, with some of its images."""
    start = partition_id * (_TRAIN + _TEST)
    train, test = _images(start, start + _TRAIN), _images(start + _TRAIN, start + _TRAIN + _TEST)
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, batch_size)


def cifar_parts(partition_id: int, num_partitions: int, samples: int) -> tuple[Any, Any]:
    """Stand in for the Opacus example's `load_data`: alike parts, four fifths to train on."""
    size = samples // num_partitions
    start, cut = partition_id * size, partition_id * size + int(0.8 * size)
    train, test = _images(start, cut), _images(cut, start + size)
    return DataLoader(train, 32, shuffle=True), DataLoader(test, 32)


def cifar_test() -> Any:
    """Stand in for its `load_centralized_dataset`."""
    return DataLoader(_images(50000, 50064), batch_size=32)


# --- The other apps -----------------------------------------------------------------------------


class Digits(Dataset[dict[str, Any]]):
    """MNIST's images as flwr-datasets gives them: dicts of ``image`` and ``label``."""

    def __init__(self, first: int, last: int) -> None:
        raw = DATA / "MNIST" / "raw"
        self.images = _idx(raw / "train-images-idx3-ubyte.gz", 3)[first:last]
        self.labels = _idx(raw / "train-labels-idx1-ubyte.gz", 1)[first:last]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = torch.from_numpy(self.images[index]).float()[None] / 255
        return {"image": image, "label": int(self.labels[index])}


@cache
def _idx(path: Path, ndim: int) -> Any:
    return read_idx(path, ndim, "MNIST")


needs_mnist = pytest.mark.skipif(
    not (DATA / "MNIST" / "raw" / "train-images-idx3-ubyte.gz").is_file(),
    reason=f"MNIST is not in {DATA}; set FL_ADMM_DATA",
)


def mnist_loaders(partition_id: int, num_partitions: int) -> tuple[Any, Any, Any]:
    """Stand in for the Lightning quickstart's `load_data`."""
    start = partition_id * 96
    train, test = Digits(start, start + 64), Digits(start + 64, start + 96)
    return DataLoader(train, 16, shuffle=True), DataLoader(test, 16), DataLoader(test, 16)


def token_loaders(partition_id: int, num_partitions: int, model_name: str) -> tuple[Any, Any]:
    """Stand in for the Hugging Face quickstart's `load_data`: random tokens, whose sum decides."""
    from transformers import BatchEncoding

    generator = torch.Generator().manual_seed(partition_id)
    ids = torch.randint(3, 100, (96, 12), generator=generator)
    rows = [
        {
            "input_ids": own,
            "token_type_ids": torch.zeros_like(own),
            "attention_mask": torch.ones_like(own),
            "labels": int(own[0] >= 50),
        }
        for own in ids
    ]

    def collate(some: list[Any]) -> Any:
        return BatchEncoding(default_collate(some))

    train = DataLoader(rows[:64], batch_size=16, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
    return train, DataLoader(rows[64:], batch_size=16, collate_fn=collate)  # type: ignore[arg-type]


def tiny_bert(model_name: str) -> Any:
    """Stand in for its `get_model`: the class that it loads, with a tiny configuration."""
    from transformers import AutoModelForSequenceClassification, BertConfig

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=100, intermediate_size=32, num_labels=2, **sizes)
    return AutoModelForSequenceClassification.from_config(config)


def irises(partition_id: int, num_partitions: int) -> tuple[Any, Any, Any, Any]:
    """Stand in for the scikit-learn quickstart's `load_data`: scikit-learn has the same irises."""
    x, y = load_iris(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))[partition_id::num_partitions]
    size = int(0.8 * len(order))
    train, test = order[:size], order[size:]
    return x[train], y[train], x[test], y[test]


# --- advanced-pytorch ---------------------------------------------------------------------------


class Clothes(Dataset[int]):
    """FashionMNIST as the advanced example transforms it, but a batch at a time.

    Parameters
    ----------
    part : str
        "train" or "t10k".
    indices : ndarray of int64
    augmented : bool (default: False)
        Whether images are cropped at random and half of them flipped.
    """

    def __init__(self, part: str, indices: Any, *, augmented: bool = False) -> None:
        raw = DATA / "FashionMNIST" / "raw"
        self.images = torch.tensor(_idx(raw / f"{part}-images-idx3-ubyte.gz", 3)[indices])
        self.labels = torch.tensor(_idx(raw / f"{part}-labels-idx1-ubyte.gz", 1)[indices]).long()
        self.augmented = augmented

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> int:
        return index

    def batch(self, indices: list[int]) -> dict[str, torch.Tensor]:
        """Return images, transformed, and labels."""
        images, count = self.images[indices], len(indices)
        if self.augmented:
            padded = torch.nn.functional.pad(images, (4, 4, 4, 4))
            rows, columns = (torch.randint(9, (count, 1)) + torch.arange(28) for _ in range(2))
            columns = torch.where(torch.rand(count, 1) < 0.5, columns.flip(1), columns)
            images = padded[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None]]
        scaled = (images.float() / 255 - 0.1307) / 0.3081
        return {"image": scaled[:, None], "label": self.labels[indices]}

    def loader(self, *, shuffle: bool) -> Any:
        """Return a loader of batches of 32."""
        return DataLoader(self, batch_size=32, shuffle=shuffle, collate_fn=self.batch)


needs_fashion = pytest.mark.skipif(
    not (DATA / "FashionMNIST" / "raw" / "train-images-idx3-ubyte.gz").is_file(),
    reason=f"FashionMNIST is not in {DATA}; set FL_ADMM_DATA",
)


@cache
def _dirichlet_parts(num_partitions: int, samples: int) -> Any:
    """Return the advanced example's partitioner, on the labels of the first samples."""
    import datasets
    from flwr_datasets.partitioner import DirichletPartitioner

    labels = _idx(DATA / "FashionMNIST" / "raw" / "train-labels-idx1-ubyte.gz", 1)[:samples]
    partitioner = DirichletPartitioner(
        num_partitions=num_partitions, partition_by="label", alpha=1.0, seed=42
    )
    columns = {"label": labels.tolist(), "index": list(range(len(labels)))}
    partitioner.dataset = datasets.Dataset.from_dict(columns)
    return partitioner


@cache
def fashion_loaders(
    partition_id: int, num_partitions: int, samples: int = 60_000
) -> tuple[Any, Any]:
    """Stand in for the advanced example's `load_data`, with its partitions and batches."""
    partition = _dirichlet_parts(num_partitions, samples).load_partition(partition_id)
    both = partition.train_test_split(test_size=0.2, seed=42)
    train, test = (np.array(both[name]["index"]) for name in ("train", "test"))
    loader = Clothes("train", train, augmented=True).loader(shuffle=True)
    return loader, Clothes("train", test).loader(shuffle=False)


class Hub:
    """Stand in for `datasets.load_dataset`: the test images of FashionMNIST, transformed."""

    def __init__(self, path: str) -> None:
        self.items = _test_clothes()

    def __getitem__(self, split: str) -> Hub:
        return self

    def with_transform(self, transform: Any) -> list[dict[str, Any]]:
        """Return the images; they are transformed already."""
        return self.items


@cache
def _test_clothes() -> list[dict[str, Any]]:
    whole = Clothes("t10k", np.arange(10_000))
    batch = whole.batch(list(range(10_000)))
    return [{name: values[i] for name, values in batch.items()} for i in range(10_000)]


# --- quickstart-jax -----------------------------------------------------------------------------


@cache
def jax_batches(
    partition_id: int, num_partitions: int, batch_size: int, samples: int = 60_000
) -> tuple[list[Any], list[Any]]:
    """Stand in for the JAX quickstart's `load_data`: alike parts of MNIST, whole batches."""
    import jax.numpy as jnp

    raw = DATA / "MNIST" / "raw"
    images = _idx(raw / "train-images-idx3-ubyte.gz", 3)
    labels = _idx(raw / "train-labels-idx1-ubyte.gz", 1)
    order = np.random.default_rng(42).permutation(samples)
    mine = np.array_split(order, num_partitions)[partition_id]
    cut = int(0.8 * len(mine))

    def batches(indices: Any) -> list[Any]:
        starts = range(0, len(indices) - batch_size + 1, batch_size)
        parts = [indices[start : start + batch_size] for start in starts]
        return [
            {"image": jnp.float32(images[i])[..., None] / 255, "label": jnp.int16(labels[i])}
            for i in parts
        ]

    return batches(mine[:cut]), batches(mine[cut:])
