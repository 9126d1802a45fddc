"""UCI HAR by subject: the stand-in for KU-HAR in FedAPM's experiment with split inputs.

See docs/methods/fedapm-notes.md, S4.
"""

from __future__ import annotations

import io
import lzma
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .federated import FederatedData, client_data, split_sizes
from .files import reading

SOURCE = (
    "the inertial signals of https://archive.ics.uci.edu/dataset/240 packed as in the docstring of "
    "simulations.data.har.read_har"
)
CHANNELS = tuple(f"{s}_{a}" for s in ("body_acc", "body_gyro", "total_acc") for a in "xyz")
NUM_CLASSES, WINDOW = 6, 128

Index = npt.NDArray[np.int64]


def read_har(path: Path) -> tuple[npt.NDArray[np.float32], Index, Index]:
    """Read windows (n, 9, 128), activities (n,) 0-5 and subjects (n,).

    The ``.npz.xz`` holds ``X`` (int16; a value is X times ``scale`` of its channel), ``y``,
    ``subject`` and ``channels``; the rows of a recording follow each other in time.

    Raises
    ------
    FileNotFoundError
        If the file is missing.
    ValueError
        If it is damaged.
    """
    with reading(path, SOURCE):
        with lzma.open(path) as packed, np.load(io.BytesIO(packed.read())) as content:
            x, y, subject, scale, channels = (
                content[key] for key in ("X", "y", "subject", "scale", "channels")
            )
        if x.shape != (len(y), len(CHANNELS), WINDOW) or subject.shape != y.shape:
            raise ValueError(f"X, y and subject have shapes {x.shape}, {y.shape}, {subject.shape}")
        if tuple(channels) != CHANNELS or scale.shape != (len(CHANNELS),):
            raise ValueError(f"channels are {', '.join(channels)}, with {scale.size} scales")
    return (
        x * scale.astype(np.float32)[None, :, None],
        y.astype(np.int64),
        subject.astype(np.int64),
    )


def _cut(rows: Index, last: int) -> tuple[Index, Index]:
    """Cut off the last rows, and drop the row before them if it may overlap with the first."""
    kept, cut = rows[:-last], rows[-last:]
    return (kept[:-1] if cut[0] - kept[-1] == 1 else kept), cut


def uci_har(
    seed: int, root: Path, *, people: int | None = None, validation: bool = False
) -> FederatedData:
    """One client a subject (30), 10,299 windows of 2.56 s, six activities. Nothing is random.

    A stand-in for KU-HAR, which cannot be had. Inputs have shape (9, 128): the accelerometer
    without gravity (body_acc x, y, z, in g), the gyroscope (body_gyro x, y, z, in rad/s) and the
    accelerometer with gravity (total_acc x, y, z, in g), at 50 Hz, in these units.

    Successive windows of a recording share half their samples, so a random split would show the
    test part to the training. Of each subject and activity the last 20 % in time order are for
    testing, and the window before them is dropped where it may overlap with them. Validation is
    held out of the training part in the same way.

    Parameters
    ----------
    seed : int
        Not used.
    root : Path
        Data root; the file is ``uci-har/uci_har_int16.npz.xz``.
    people : int or None
        How many subjects, the first ones by their numbers; None for all.
    validation : bool
        Hold the last 20 % of each subject's training windows out for validation.

    Raises
    ------
    FileNotFoundError, ValueError
        See `read_har`; ValueError also if a subject has too few windows of an activity.
    """
    x, y, subject = read_har(root / "uci-har" / "uci_har_int16.npz.xz")
    clients = []
    subjects = np.unique(subject)
    if people is not None and not 1 <= people <= len(subjects):
        raise ValueError(
            f"people is {people}, expected 1 to {len(subjects)}, the subjects of uci-har."
        )
    for person in subjects[:people]:
        dealt: dict[str, list[Index]] = {"train": [], "validation": [], "test": []}
        for activity in np.unique(y[subject == person]):
            train = np.flatnonzero((subject == person) & (y == activity))
            sizes = split_sizes(len(train), validation)
            if sizes.train < 3:
                raise ValueError(
                    f"subject {person} has {len(train)} windows of activity {activity}, too few "
                    "to split in time order"
                )
            train, test = _cut(train, sizes.test)
            dealt["test"].append(test)
            if validation:
                train, held_out = _cut(train, sizes.validation)
                dealt["validation"].append(held_out)
            dealt["train"].append(train)
        counts = [sum(map(len, rows)) for rows in dealt.values()]
        index = np.concatenate([row for rows in dealt.values() for row in rows])
        clients.append(client_data(x[index], y[index], counts))
    return FederatedData("uci-har", clients, None, "classification", x.shape[1:], NUM_CLASSES)
