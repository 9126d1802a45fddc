"""MNIST and FashionMNIST dealt unevenly, with labels swapped by group (FPFC, section 6.1)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from .federated import FederatedData, client_data, generator, holdout
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


@contextmanager
def downloading(dataset: str, root: Path, missing: FileNotFoundError) -> Iterator[Path]:
    """Download a data set of torchvision's into a folder below `root` that lasts for the block.

    What is moved out of it has arrived as a whole, so that no other process reads half a file.

    Raises
    ------
    FileNotFoundError
        As `missing`, with the reason, if the files cannot be downloaded or stored.
    """
    try:
        from torchvision import datasets  # here: few data sets need it

        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as temporary:
            getattr(datasets, dataset)(temporary, download=True)
            yield Path(temporary)
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: built for another torch
        raise FileNotFoundError(f"{missing} (Downloading it failed: {error})") from error


def download(dataset: str, root: Path) -> None:
    """Fetch the idx files of `dataset` into ``root/<dataset>/raw`` through torchvision.

    Raises
    ------
    FileNotFoundError
        If the files cannot be downloaded or stored.
    """
    folder = root / dataset / "raw"
    first = next((name for name in FILES if _find(folder, name) is None), FILES[0])
    missing = missing_file(folder / f"{first}.gz", SOURCES[dataset])
    with downloading(dataset, root, missing) as temporary:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            found = _find(temporary / dataset / "raw", name)
            if found is not None and _find(folder, name) is None:
                found.replace(folder / found.name)


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
    if any(_find(folder, name) is None for name in FILES):
        download(dataset, root)
    parts, source = {}, SOURCES[dataset]
    for part in ("train", "t10k"):
        files = [f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"]
        images_path, labels_path = (_find(folder, name) or folder / name for name in files)
        images, labels = read_idx(images_path, 3, source), read_idx(labels_path, 1, source)
        with reading(labels_path, source):
            if len(images) != len(labels) or labels.max(initial=0) >= NUM_CLASSES:
                raise ValueError(
                    f"{len(labels)} labels up to {labels.max(initial=0)}, expected one from 0 to 9 "
                    f"for each of {len(images)} images"
                )
        with reading(images_path, source):
            if images.shape[1:] != (28, 28):
                raise ValueError(f"images of shape {images.shape[1:]}, expected 28x28 pixels")
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
