"""The parts of a report, and how they become Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple


class Grid(NamedTuple):
    """A table; the first `names` columns are text, the others numbers."""

    caption: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1


class Image(NamedTuple):
    """A PNG file, and what it shows."""

    path: Path
    text: str


Part = str | Grid | Image
"""A piece of Markdown, a table or a picture."""


def code(text: str) -> str:
    """Return lines for a shell or a file as Markdown."""
    return f"```\n{text}\n```"


def as_markdown(parts: Iterable[Part]) -> str:
    """Return Markdown, with the pictures as files beside it."""
    return "\n\n".join(map(_markdown, parts)) + "\n"


def _markdown(part: Part) -> str:
    match part:
        case Image(path, text):
            return f"![{text}]({path.name})"
        case Grid(caption, headers, rows, names):
            rule = ["---"] * names + ["--:"] * (len(headers) - names)
            escaped = [[text.replace("|", "\\|") for text in row] for row in (headers, *rows)]
            lines = [f"| {' | '.join(row)} |" for row in (escaped[0], rule, *escaped[1:])]
            return "\n".join([caption, "", *lines] if caption else lines)
    return part
