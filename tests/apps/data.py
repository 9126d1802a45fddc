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
from torch.utils.data import DataLoader, Dataset

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


def cifar_test() -> Any:
    """Stand in for its `load_centralized_dataset`."""
    return DataLoader(_images(50000, 50064), batch_size=32)
