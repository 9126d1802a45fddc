"""Files of arrays that a kill cannot tear.

Everything is safetensors: reading a file runs no code. A file is written under another name,
flushed to the disk and renamed, so that under its own name it is whole; a checksum over all of its
content finds what a disk or a copy damaged since.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from filelock import AcquireReturnProxy, BaseFileLock, FileLock, Timeout
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

PART = ".part"
"""The ending of a file that is being written."""

_CHECKSUM = "checksum"
_LOCK = ".lock"
_WAIT = 5.0  # seconds for the processes of a run that was killed to end and to let go


class DamagedFileError(ValueError):
    """A file does not hold what was written to it."""


class NotWrittenError(OSError):
    """A file could not be written: which, and why; most often the disk is full."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Let a `with` block that writes a file raise `NotWrittenError`."""
    try:
        yield
    except NotWrittenError:
        raise
    except (OSError, SafetensorError) as error:
        raise NotWrittenError(f"{path} could not be written: {error}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield another path to write to; then that file is flushed to the disk and takes this name.

    After a kill the file is there as a whole or as it was before, after an error as it was.

    Raises
    ------
    NotWrittenError
        If it could not be written.
    """
    part = path.with_name(path.name + PART)
    try:
        with writing(path):
            yield part
            with part.open("r+b") as file:
                os.fsync(file.fileno())
            part.replace(path)
            _sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def link_file(path: Path, name: Path) -> None:
    """Give a file a second name, without its bytes twice; copy it where there are no hard links.

    A file of that name is replaced. None of ours is changed in place, so that neither name's is.
    """
    with writing(name):
        name.unlink(missing_ok=True)
        try:
            name.hardlink_to(path)
        except OSError:  # of a file system without links, such as some network folders
            shutil.copyfile(path, name)


def write_arrays(
    path: Path, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named arrays to a safetensors file: after a kill it is there as a whole or not at all.

    Parameters
    ----------
    path : Path
        Its folder exists. A file of this name is replaced.
    arrays : mapping of str to ndarray
        Of numbers.
    metadata : mapping of str to str, optional
        Goes into the file's header.

    Raises
    ------
    NotWrittenError
        If it could not be written; a file that was there before is as it was.
    """
    dense = {
        name: np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
        for name, array in arrays.items()
    }
    metadata = dict(metadata or {})
    checksum = _checksum(dense, metadata)
    with replacing(path) as part:
        save_file(dense, part, metadata={**metadata, _CHECKSUM: checksum})


def read_arrays(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return the arrays and the metadata of a file that `write_arrays` wrote.

    Raises
    ------
    DamagedFileError
        If it is cut short, changed, or something else.
    """
    try:
        with safe_open(path, framework="np") as file:
            metadata = dict(file.metadata() or {})
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # bytes of unknown origin: the library may raise anything
        raise DamagedFileError(f"it cannot be read: {error}") from error
    checksum = metadata.pop(_CHECKSUM, None)
    if checksum != _checksum(arrays, metadata):
        raise DamagedFileError(
            "it holds no checksum" if checksum is None else "its content changed since it was saved"
        )
    return arrays, metadata


def lock_folder(folder: Path) -> AcquireReturnProxy[BaseFileLock]:
    """Make a folder and keep other processes out, for a `with` block or until it is released.

    Two runs in one folder would replace each other's files, and a resumed run would continue now
    the one and now the other. The process that holds a folder may lock it once more: a run that
    failed, say in a notebook, can be resumed where it was started.

    Raises
    ------
    RuntimeError
        If another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock: BaseFileLock = FileLock(folder.resolve() / _LOCK, thread_local=False, is_singleton=True)
    try:
        return lock.acquire(timeout=_WAIT)
    except Timeout:
        raise RuntimeError(
            f"Another process is using the checkpoints in {folder}: a run that is still going on, "
            "or a notebook in which one failed. Wait for it or end it, or start a new run in "
            "another folder."
        ) from None


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> str:
    """Return a CRC-32 of everything, which finds damage by chance, not by intent."""
    total = zlib.crc32(json.dumps(sorted(metadata.items())).encode())
    for name, array in sorted(arrays.items()):
        total = zlib.crc32(f"{name} {array.dtype.str} {array.shape}".encode(), total)
        total = zlib.crc32(array.reshape(-1).view(np.uint8).data, total)
    return f"{total:08x}"
