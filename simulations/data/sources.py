"""Where the samples of FLAME's image data sets come from, before they are dealt to clients.

A source pools the official training and test parts (docs/methods/flame-notes.md, P13) and reads
inputs by index, so that images nobody gets are never decoded and at most one client's are in memory
twice.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from .files import missing_file, reading
from .images import downloading, read_images

Index = npt.NDArray[np.int64]

CIFAR10_SOURCE = "CIFAR-10 python version: https://www.cs.toronto.edu/~kriz/cifar.html"
CIFAR10_FOLDER = "cifar-10-batches-py"


@dataclass(frozen=True, eq=False)
class Pool:
    """All samples of a data set.

    Attributes
    ----------
    labels : ndarray of int64, shape (n,)
        Class of each sample, 0 to num_classes - 1.
    num_classes : int
        Number of classes.
    read : callable
        From indices, shape (k,), to normalised inputs, float32, shape (k, *input_shape). The
        result may be a view with repeated elements: not to be written into.
    stand_in : str
        What the samples lack of those that the data set's name promises, if anything.
    """

    labels: Index
    num_classes: int
    read: Callable[[Index], Tensor]
    stand_in: str = ""


def _normalised(pixels: npt.NDArray[Any], mean: float, std: float) -> Tensor:
    """Bytes to (pixels / 255 - mean) / std, computed in the one copy."""
    x = torch.from_numpy(pixels.astype(np.float32))
    return x.div_(255).sub_(mean).div_(std)


def digits(seed: int, root: Path) -> Pool:
    """Scikit-learn's 1,797 digits, 64 pixels in [0, 1], 10 classes. Needs no file."""
    from sklearn.datasets import load_digits  # here: takes seconds

    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy((images / 16).astype(np.float32))
    return Pool(labels.astype(np.int64), 10, lambda index: x[index])


def mnist_family(dataset: str, seed: int, root: Path) -> Pool:
    """MNIST or FashionMNIST: 70,000 images of shape (1, 28, 28), mean 0.1307, std 0.3081.

    Raises
    ------
    FileNotFoundError, ValueError
        See `read_images`.
    """
    parts = read_images(dataset, root).values()
    images = np.concatenate([images for images, _ in parts])[:, None]
    labels = np.concatenate([labels for _, labels in parts]).astype(np.int64)
    return Pool(labels, 10, lambda index: _normalised(images[index], 0.1307, 0.3081))


def read_packed(
    path: Path, source: str, shape: tuple[int, ...]
) -> tuple[Index, Callable[[Index], npt.NDArray[np.uint8]]]:
    """Open a file of packed JPEGs: labels, and a function that decodes the images of an index.

    The ``.npz`` holds ``data`` (uint8), ``offset`` (n + 1 positions) and ``label`` (n); image i is
    the JPEG ``data[offset[i]:offset[i + 1]]``.

    Parameters
    ----------
    path : Path
        The file.
    source : str
        Where a person gets it, for the error.
    shape : tuple of int
        Shape of one image, (height, width, 3).

    Raises
    ------
    FileNotFoundError
        If the file is missing.
    ValueError
        If it is damaged; an image in it, when it is decoded.
    """
    with reading(path, source):
        with np.load(path) as content:
            data, offset, label = (content[key] for key in ("data", "offset", "label"))
        if len(offset) != len(label) + 1 or offset[0] != 0 or (np.diff(offset) < 0).any():
            raise ValueError(f"offset does not cut data into {len(label)} images")
        if offset[-1] != len(data):
            raise ValueError(f"data has {len(data)} bytes, offset ends at {offset[-1]}")

    def decode(index: Index) -> npt.NDArray[np.uint8]:
        images = np.empty((len(index), *shape), np.uint8)
        with reading(path, source):
            for image, i in zip(images, index, strict=True):
                jpeg = io.BytesIO(data[offset[i] : offset[i + 1]])
                image[...] = np.asarray(Image.open(jpeg, formats=["JPEG"]))
        return images

    return label.astype(np.int64), decode


def cifar10(seed: int, root: Path) -> Pool:
    """CIFAR-10: 60,000 images of shape (3, 32, 32), mean and std 0.5.

    Reads the official files in ``root/cifar-10-batches-py``. Where they are not, but
    ``root/cifar10/cifar10_jpeg_q75.npz`` is, reads that: a **lossy stand-in for development** (the
    images stored as JPEG of quality 75), as the data set's full name says. Where there are neither,
    the official files are downloaded through torchvision.

    Raises
    ------
    FileNotFoundError, ValueError
        If the files are missing and cannot be downloaded, or are damaged.
    """
    folder = root / CIFAR10_FOLDER
    packed = root / "cifar10" / "cifar10_jpeg_q75.npz"
    if folder.is_dir() or not packed.is_file():
        stand_in = ""
        labels, decode = _official_cifar10(folder)
    else:
        stand_in = "lossy stand-in: JPEG of quality 75"
        labels, decode = read_packed(packed, CIFAR10_SOURCE, (32, 32, 3))

    def read(index: Index) -> Tensor:
        return _normalised(np.ascontiguousarray(decode(index).transpose(0, 3, 1, 2)), 0.5, 0.5)

    return Pool(labels, 10, read, stand_in=stand_in)


def _official_cifar10(folder: Path) -> tuple[Index, Callable[[Index], npt.NDArray[np.uint8]]]:
    if not folder.is_dir():
        missing = missing_file(folder / "data_batch_1", CIFAR10_SOURCE)
        with downloading("CIFAR10", folder.parent, missing) as temporary:
            if not folder.is_dir():
                (temporary / CIFAR10_FOLDER).replace(folder)
    from torchvision import datasets

    with reading(folder, CIFAR10_SOURCE):
        parts = [datasets.CIFAR10(folder.parent, train=train) for train in (True, False)]
    pixels = np.concatenate([part.data for part in parts])
    labels = np.concatenate([np.asarray(part.targets, np.int64) for part in parts])
    return labels, lambda index: pixels[index]
