"""UCI HAR by subject: no window of the training part overlaps with one of another part."""

import io
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch

from simulations.data import load
from simulations.data.har import CHANNELS
from tests.support.refusals import refused

STEP = 64


def write(root: Path, **changes: np.ndarray) -> Path:
    """3 subjects, 6 activities, 2 recordings of 6 windows; a value tells the time it is of."""
    x, y, subject = [], [], []
    clock = 0
    for person in (1, 2, 5):
        for _ in range(2):
            for activity in range(6):
                for window in range(6):
                    x.append(clock + STEP * window + np.arange(128))
                    y.append(activity)
                    subject.append(person)
                clock += STEP * 7
    content = {
        "X": np.repeat(np.array(x, np.int16)[:, None], 9, axis=1),
        "y": np.array(y, np.uint8),
        "subject": np.array(subject, np.uint8),
        "scale": np.array([1.0, 1, 1, 2, 2, 2, 1, 1, 1]),
        "channels": np.array(CHANNELS),
    }
    path = root / "uci-har" / "uci_har_int16.npz.xz"
    path.parent.mkdir(exist_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, **(content | changes))
    path.write_bytes(lzma.compress(buffer.getvalue(), preset=0))
    return path


def times(part: tuple[torch.Tensor, torch.Tensor]) -> set[int]:
    return set(part[0][:, 0].flatten().long().tolist())


def test_a_client_is_a_subject_and_inputs_are_scaled(tmp_path: Path) -> None:
    write(tmp_path)
    data = load("uci-har", 0, tmp_path)
    assert (data.name, data.num_classes, data.input_shape) == ("uci-har", 6, (9, 128))
    assert len(data.clients) == 3
    for i, client in enumerate(data.clients):
        for x, y in (client.train, client.test):
            assert (x.dtype, y.dtype, x.shape) == (torch.float32, torch.int64, (len(y), 9, 128))
            assert torch.equal(x[:, 3], 2 * x[:, 0])
            # A subject has 12 recordings of 7 * 64 samples.
            first = 12 * 7 * STEP * i
            assert first <= x[:, 0].min() <= x[:, 0].max() < first + 12 * 7 * STEP


@pytest.mark.parametrize("validation", [False, True])
def test_parts_share_no_sample_and_come_in_time_order(tmp_path: Path, validation: bool) -> None:
    """Of 12 windows of an activity, the last round(12 / 5) = 2 test and one is dropped.

    Without validation 9 train. With it, round(10 / 5) = 2 of the training part validate, of the 9
    after dropping, and one more is dropped where the cut parts two rows of one recording: rows 0-5
    and 6-11 are recordings, rows 10-11 test, 9 is dropped, 7-8 validate, 6 is dropped, 0-5 train.
    """
    write(tmp_path)
    for client in load("uci-har", 0, tmp_path, validation=validation).clients:
        parts = [client.train, *([client.validation] if client.validation else []), client.test]
        assert [len(y) for _, y in parts] == ([36, 12, 12] if validation else [54, 12])
        assert all(torch.bincount(y).unique().numel() == 1 for _, y in parts)
        for i, early in enumerate(parts):
            for late in parts[i + 1 :]:
                assert not times(early) & times(late)
                for activity in range(6):
                    last = early[0][early[1] == activity, 0].max()
                    assert last < late[0][late[1] == activity, 0].min()


def test_files_that_are_damaged_or_too_small_are_named(tmp_path: Path) -> None:
    few = {"X": np.zeros((3, 9, 128), np.int16), "y": np.zeros(3, np.uint8)}
    path = write(tmp_path, **few, subject=np.full(3, 7, np.uint8))
    with refused(ValueError, "subject 7", "activity 0"):
        load("uci-har", 0, tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with refused(ValueError, path):
        load("uci-har", 0, tmp_path)
