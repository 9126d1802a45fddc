"""Images: where they come from, and MNIST dealt unevenly with labels swapped by group (FPFC, 6.1).

A source pools the official training and test parts (docs/methods/flame-notes.md, P13) and reads
inputs by index, so that images of no client are never decoded.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from .federated import FederatedData, client_data, generator, holdout, split_sizes
from .files import missing_file, read_idx, reading

SOURCES = {
    "MNIST": "http://yann.lecun.com/exdb/mnist/",
    "FashionMNIST": "https://github.com/zalandoresearch/fashion-mnist",
}
FILES = tuple(
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)
CLIENTS, GROUP_SIZE, NUM_CLASSES = 20, 5, 10
MIN_TRAIN, MIN_TEST = 10, 2  # a client with fewer can neither be trained nor scored
MAX_DRAWS = 100  # of proportions; at 1,000 images and more the first few will do

Index = npt.NDArray[np.int64]
Labels = npt.NDArray[np.uint8]


def _find(folder: Path, name: str) -> Path | None:
    candidates = (folder / name, folder / f"{name}.gz")
    return next((path for path in candidates if path.is_file()), None)


def download(dataset: str, root: Path, missing: FileNotFoundError) -> None:
    """Fetch a data set of torchvision's into `root`.

    Raises
    ------
    FileNotFoundError
        As `missing`, with the reason, if the files cannot be downloaded or stored.
    """
    try:
        from torchvision import datasets  # here: few data sets need it

        getattr(datasets, dataset)(root, download=True)
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: built for another torch
        raise FileNotFoundError(f"{missing} (Downloading it failed: {error})") from error


def read_images(dataset: str, root: Path) -> dict[str, tuple[npt.NDArray[np.uint8], Labels]]:
    """Read images (n, 28, 28) and labels (n,) of the parts 'train' and 't10k'.

    Parameters
    ----------
    dataset : {'MNIST', 'FashionMNIST'}
        Which of the two, named as torchvision names their folders.
    root : Path
        Data root; the files, plain or ``.gz``, lie in ``root/<dataset>/raw``, or are downloaded.

    Raises
    ------
    FileNotFoundError
        See `download`.
    ValueError
        If a file is damaged, or images and labels do not belong together.
    """
    folder = root / dataset / "raw"
    source = SOURCES[dataset]
    if absent := next((name for name in FILES if _find(folder, name) is None), None):
        download(dataset, root, missing_file(folder / f"{absent}.gz", source))
    parts = {}
    for part in ("train", "t10k"):
        files = [f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"]
        images_path, labels_path = (_find(folder, name) or folder / name for name in files)
        images, labels = read_idx(images_path, 3, source), read_idx(labels_path, 1, source)
        if images.shape != (len(labels), 28, 28):
            raise ValueError(f"{images_path} and {labels_path.name} do not go together.")
        parts[part] = (images, labels)
    return parts


def deal(labels: Labels, shares: npt.NDArray[np.float64], rng: np.random.Generator) -> list[Index]:
    """Deal samples to clients in given proportions per class.

    Parameters
    ----------
    labels : ndarray, shape (n,)
        Class of each sample.
    shares : ndarray, shape (num_classes, m)
        ``shares[c, i]`` is client i's share of class c; rows sum to 1.
    rng : Generator
        Decides which samples of a class go where.

    Returns
    -------
    list of ndarray
        The sample indices of each client, in random order.
    """
    dealt: list[list[Index]] = [[] for _ in range(shares.shape[1])]
    for c, share in enumerate(shares):
        members = rng.permutation(np.flatnonzero(labels == c))
        cuts = np.floor(np.cumsum(share)[:-1] * len(members)).astype(np.int64)
        for client, index in zip(dealt, np.split(members, cuts), strict=True):
            client.append(index)
    return [rng.permutation(np.concatenate(index)) for index in dealt]


def swap_labels(labels: npt.NDArray[np.int64], group: int) -> npt.NDArray[np.int64]:
    """Exchange the labels p and 8 - p, where p is the client's group 0-3; others stay."""
    swapped = labels.copy()
    swapped[labels == group] = 8 - group
    swapped[labels == 8 - group] = group
    return swapped


def images_swap(
    dataset: str,
    name: str,
    seed: int,
    root: Path,
    *,
    samples: int | None = None,
    test_partition: Literal["same", "independent"] = "same",
    validation: bool = False,
) -> FederatedData:
    """Deal an image data set to 20 clients in 4 groups of 5.

    Each class is dealt in proportions ~ Dirichlet(1, ..., 1); group g = 0..3 then swaps the labels
    g and 8 - g. Proportions are drawn again (up to 100 times) until every client has at least 10
    training and 2 test images. flwr-datasets' `DirichletPartitioner` is not used because it does
    not give out its proportions, which the test images need.

    Parameters
    ----------
    dataset : {'MNIST', 'FashionMNIST'}
        The images.
    name : str
        Registry name.
    seed : int
        Decides proportions, who gets which images, and the subset.
    root : Path
        Data root.
    samples : int or None
        Use a random subset of at most this many training images and of as large a part of the test
        images, for a quick run; None for all.
    test_partition : {'same', 'independent'}
        Test images in the proportions of the training images, or in proportions of their own, as
        in the authors' code (docs/methods/fpfc-notes.md, P12).
    validation : bool
        Hold 20 % of each client's training images out for validation.

    Raises
    ------
    FileNotFoundError, ValueError
        See `read_images`; ValueError also if `samples` is too small for 20 clients.
    """
    parts = read_images(dataset, root)
    total = len(parts["train"][1])
    fraction = 1.0 if samples is None else min(1.0, samples / total)
    chosen: dict[str, Index] = {}
    for part, (_, labels) in parts.items():
        order = generator(seed, name, "subset", part).permutation(len(labels))
        chosen[part] = order[: max(0, round(fraction * len(labels)))]
    train_labels, test_labels = (parts[part][1][chosen[part]] for part in ("train", "t10k"))

    rng = generator(seed, name, "deal")
    for _ in range(MAX_DRAWS):
        shares = rng.dirichlet(np.ones(CLIENTS), size=NUM_CLASSES)
        independent = rng.dirichlet(np.ones(CLIENTS), size=NUM_CLASSES)
        train = deal(train_labels, shares, rng)
        test = deal(test_labels, shares if test_partition == "same" else independent, rng)
        if min(map(len, train)) >= MIN_TRAIN and min(map(len, test)) >= MIN_TEST:
            break
    else:
        raise ValueError(
            f"{len(train_labels)} training and {len(test_labels)} test images are too few: no draw "
            f"of {MAX_DRAWS} gave each of {CLIENTS} clients {MIN_TRAIN} and {MIN_TEST}; use "
            "samples = 1000 or more"
        )

    groups = np.arange(CLIENTS) // GROUP_SIZE
    clients = []
    for group, train_index, test_index in zip(groups, train, test, strict=True):
        indices = (chosen["train"][train_index], chosen["t10k"][test_index])
        images, labels = (
            np.concatenate([parts["train"][kind][indices[0]], parts["t10k"][kind][indices[1]]])
            for kind in (0, 1)
        )
        clients.append(
            client_data(
                images[:, None].astype(np.float32) / 255,
                swap_labels(labels.astype(np.int64), int(group)),
                (*holdout(len(indices[0]), validation), len(indices[1])),
            )
        )
    return FederatedData(name, clients, groups, "classification", (1, 28, 28), NUM_CLASSES)


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
        if len(offset) != len(label) + 1 or offset[-1] != len(data):
            raise ValueError(f"offset does not cut data into {len(label)} images")

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
        download("CIFAR10", folder.parent, missing)
    from torchvision import datasets

    with reading(folder, CIFAR10_SOURCE):
        parts = [datasets.CIFAR10(folder.parent, train=train) for train in (True, False)]
    pixels = np.concatenate([part.data for part in parts])
    labels = np.concatenate([np.asarray(part.targets, np.int64) for part in parts])
    return labels, lambda index: pixels[index]


GROUPS = 3


def digits_swap(
    seed: int, root: Path, *, clients: int = 12, validation: bool = False
) -> FederatedData:
    """Deal all 1797 digits (8x8 pixels, /16) to `clients` clients in 3 equal groups.

    Group g, a block of consecutive clients, holds the labels ``(y + 3 g) mod 10``, so that one
    global model can serve one group only.

    Parameters
    ----------
    seed : int
        Decides who gets which samples.
    root : Path
        Not used: scikit-learn ships the digits.
    clients : int
        Number of clients, a multiple of 3.
    validation : bool
        Hold 20 % of each client's training part out for validation.

    Raises
    ------
    ValueError
        If `clients` is not a positive multiple of 3, or leaves a client too few samples.
    """
    if clients < GROUPS or clients % GROUPS:
        raise ValueError(f"clients is {clients}, expected a positive multiple of {GROUPS}.")
    from sklearn.datasets import load_digits  # here: takes seconds

    images, labels = load_digits(return_X_y=True)
    order = generator(seed, "digits", "deal").permutation(len(labels))
    group = np.arange(clients) * GROUPS // clients
    parts = []
    for g, index in zip(group, np.array_split(order, clients), strict=True):
        sizes = split_sizes(len(index), validation)
        parts.append(client_data(images[index] / 16, (labels[index] + 3 * g) % 10, sizes))
    return FederatedData("digits-swap", parts, group, "classification", (64,), 10)
