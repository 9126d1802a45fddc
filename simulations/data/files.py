"""Where data files lie, and what is said when one is missing or damaged."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT_VARIABLE = "FL_ADMM_DATA"


def data_root(root: Path | str | None) -> Path:
    """Return `root`, else ``$FL_ADMM_DATA``, else ``~/.cache/fl-admm-strategies``."""
    default = "~/.cache/fl-admm-strategies"
    return Path(root or os.environ.get(ROOT_VARIABLE) or default).expanduser()


def missing_file(path: Path, source: str) -> FileNotFoundError:
    """Describe a data file that is not there.

    Parameters
    ----------
    path : Path
        Where the file was looked for.
    source : str
        Where a person gets it.
    """
    return FileNotFoundError(
        f"data file {path.name!r} not found in {path.parent}. Put it there ({source}), or say "
        "where your data lies with --data-root (data_root=) or the environment variable "
        f"{ROOT_VARIABLE}."
    )


@contextmanager
def reading(path: Path, source: str) -> Iterator[None]:
    """Say where a file belongs that is missing, and what is wrong with one that is damaged.

    Parameters
    ----------
    path : Path
        The file; what is raised in the block is about it.
    source : str
        Where a person gets it.

    Raises
    ------
    FileNotFoundError, ValueError
        If it is missing; if it is damaged.
    """
    try:
        yield
    except FileNotFoundError:
        raise missing_file(path, source) from None
    except MemoryError:
        raise
    # A file that is cut short raises what its format's library does: there is no common class.
    except Exception as error:
        raise ValueError(f"{path} is damaged: {error}; get it anew ({source})") from error


def read_idx(path: Path, ndim: int, source: str) -> npt.NDArray[np.uint8]:
    """Read a file of unsigned bytes in the idx format of the MNIST family, plain or ``.gz``.

    Parameters
    ----------
    path : Path
        The file.
    ndim : int
        Number of axes it must have: 3 for images, 1 for labels.
    source : str
        Where a person gets it, for the error.

    Raises
    ------
    ValueError
        If the file is damaged, or no such file.
    """
    with reading(path, source):
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        # Magic number: two zero bytes, 8 for unsigned bytes, the number of axes.
        if content[:4] != bytes((0, 0, 8, ndim)):
            raise ValueError(f"no unsigned bytes with {ndim} axes: begins with {content[:4]!r}")
        shape = np.frombuffer(content, ">u4", count=ndim, offset=4).astype(int)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * ndim).reshape(shape)


def read_table(
    path: Path, source: str, shape: tuple[int, int], **options: Any
) -> npt.NDArray[np.float64]:
    """Read a text table of finite numbers.

    Parameters
    ----------
    path : Path
        The file.
    source : str
        Where a person gets it, for the error.
    shape : tuple of int
        Rows and columns it must have.
    **options
        Passed to `numpy.loadtxt`, e.g. ``delimiter``.

    Raises
    ------
    FileNotFoundError
        If the file is missing.
    ValueError
        If it holds something else than `shape` finite numbers.
    """
    with reading(path, source):
        table: npt.NDArray[np.float64] = np.loadtxt(path, ndmin=2, **options)
        if table.shape != shape or not np.isfinite(table).all():
            raise ValueError(f"shape {table.shape}, expected finite numbers of shape {shape}")
        return table
