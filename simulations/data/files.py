"""Where data files lie, and what is said when one is missing or damaged."""

from __future__ import annotations

import os
import zlib
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


def _inflate(path: Path) -> tuple[bytes, str]:
    """Content of a (gzip) file as far as it can be read, and what is wrong with it, if anything."""
    raw = path.read_bytes()
    if path.suffix != ".gz":
        return raw, ""
    # gzip.open would raise without telling how much was there; the decompressor keeps it.
    stream = zlib.decompressobj(wbits=31)
    try:
        content = stream.decompress(raw)
    except zlib.error as error:
        raise ValueError(
            f"{path}: damaged gzip file ({error}); delete it and get it anew"
        ) from None
    return content, "" if stream.eof else " (its gzip stream is cut short)"


def read_idx(path: Path, ndim: int) -> npt.NDArray[np.uint8]:
    """Read a file of unsigned bytes in the idx format of the MNIST family, plain or ``.gz``.

    Parameters
    ----------
    path : Path
        The file.
    ndim : int
        Number of axes it must have: 3 for images, 1 for labels.

    Raises
    ------
    ValueError
        If the file is truncated, too long, damaged, or not such a file.
    """
    content, wrong = _inflate(path)
    header = 4 + 4 * ndim
    if len(content) < header:
        raise ValueError(
            f"{path}: truncated idx file: expected a header of {header} bytes, found "
            f"{len(content)}{wrong}; delete it and get it anew"
        )
    # Magic number: two zero bytes, 8 for unsigned bytes, the number of axes.
    magic = bytes((0, 0, 8, ndim))
    if content[:4] != magic:
        raise ValueError(
            f"{path}: not an idx file of unsigned bytes with {ndim} axes: expected the first bytes "
            f"{magic.hex(' ')}, found {content[:4].hex(' ')}"
        )
    shape = tuple(int(s) for s in np.frombuffer(content, ">u4", count=ndim, offset=4))
    expected = header + int(np.prod(shape))
    if len(content) != expected or wrong:
        raise ValueError(
            f"{path}: damaged idx file: expected {expected} bytes for shape {shape}, found "
            f"{len(content)}{wrong}; delete it and get it anew"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


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
    try:
        table: npt.NDArray[np.float64] = np.loadtxt(path, ndmin=2, **options)
    except FileNotFoundError:
        raise missing_file(path, source) from None
    except ValueError as error:
        raise ValueError(f"{path}: damaged table ({error}); get it anew ({source})") from None
    if table.shape != shape or not np.isfinite(table).all():
        raise ValueError(
            f"{path}: expected {shape[0]} rows of {shape[1]} finite numbers, found "
            f"{table.shape[0]} rows of {table.shape[1]}, "
            f"{np.count_nonzero(~np.isfinite(table))} of them not finite; get it anew ({source})"
        )
    return table
