"""The batches of the apps' data sets: scikit-learn's digits and irises, in the apps' shapes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits, load_iris
from torch.utils.data import DataLoader, default_collate


@cache
def digits(shape: tuple[int, int, int], image: str = "image") -> list[dict[str, Any]]:
    """Return the digits in random order as dicts, with a mean of 0, as pictures of a shape."""
    pixels, labels = load_digits(return_X_y=True)
    channels, *sides = shape
    pictures = torch.from_numpy(pixels / 16 - 0.3).float().reshape(-1, 1, 8, 8)
    pictures = torch.nn.functional.interpolate(pictures, sides).repeat(1, channels, 1, 1)
    order = np.random.default_rng(0).permutation(len(labels))
    return [{image: pictures[i], "label": int(labels[i])} for i in order]


def _loaders(samples: Any, client: int, clients: int, batch_size: int) -> tuple[Any, Any]:
    """Return loaders of a client's part: four fifths to train on, a fifth to test."""
    own = samples[client::clients]
    cut = int(0.8 * len(own))
    train, test = own[:cut], own[cut:]
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, batch_size)


def cifar_loaders(partition_id: int, num_partitions: int, batch_size: int = 32) -> Any:
    """Stand in for `load_data` of the PyTorch quickstart and of the Opacus example."""
    samples = digits((3, 32, 32), "img")[:480]
    return _loaders(samples, partition_id, num_partitions, batch_size)


def cifar_test() -> Any:
    """Stand in for the quickstart's `load_centralized_dataset`."""
    return DataLoader(digits((3, 32, 32), "img")[-64:], batch_size=32)  # type: ignore[arg-type]


def mnist_loaders(partition_id: int, num_partitions: int) -> Any:
    """Stand in for the Lightning quickstart's `load_data`."""
    train, test = _loaders(digits((1, 28, 28))[:192], partition_id, num_partitions, 16)
    return train, test, test


def fashion_loaders(partition_id: int, num_partitions: int) -> Any:
    """Stand in for the advanced example's `load_data`."""
    return _loaders(digits((1, 28, 28)), partition_id, num_partitions, 32)


class Hub:
    """Stand in for `datasets.load_dataset` of the advanced example: images, transformed."""

    def __init__(self, path: str) -> None:
        pass

    def __getitem__(self, split: str) -> Hub:
        return self

    def with_transform(self, transform: Any) -> list[dict[str, Any]]:
        """Return the images; they are transformed already."""
        return digits((1, 28, 28))


def jax_batches(partition_id: int, num_partitions: int, batch_size: int) -> Any:
    """Stand in for the JAX quickstart's `load_data`."""
    import jax.numpy as jnp

    return tuple(
        [
            {
                "image": jnp.float32(batch["image"].permute(0, 2, 3, 1).numpy()),
                "label": jnp.int16(batch["label"].numpy()),
            }
            for batch in loader
        ]
        for loader in _loaders(digits((1, 28, 28)), partition_id, num_partitions, batch_size)
    )


def token_loaders(partition_id: int, num_partitions: int, model_name: str) -> tuple[Any, Any]:
    """Stand in for the Hugging Face quickstart's `load_data`: random tokens, the first decides."""
    from transformers import BatchEncoding

    ids = torch.randint(3, 100, (96, 12), generator=torch.Generator().manual_seed(partition_id))
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

    train, test = (
        DataLoader(part, batch_size=16, collate_fn=collate)  # type: ignore[arg-type]
        for part in (rows[:64], rows[64:])
    )
    return train, test


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
    train, test = np.split(order, [int(0.8 * len(order))])
    return x[train], y[train], x[test], y[test]
