"""A report's parts as Markdown, which is also the page."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
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

_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 1rem; max-width: 68rem; font: 16px/1.5 system-ui, sans-serif;
  overflow-wrap: anywhere; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: .9rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #8886; white-space: nowrap; }
:is(th, td):not([style]) { text-align: left; white-space: normal; min-width: 8rem; }
p:has(+ table), em { color: GrayText; font-size: .9rem; font-style: normal; }
pre { padding: .8rem; border: 1px solid #8886; border-radius: 6px; white-space: pre-wrap; }
img { max-width: 100%; height: auto; background: #fff; border-radius: 6px; }
"""


def code(text: str) -> str:
    """Return lines for a shell or a file as Markdown."""
    return f"```\n{text}\n```"


def as_markdown(title: str, parts: Sequence[Part]) -> str:
    """Return Markdown, with the pictures as files beside it."""
    return "\n\n".join([f"# {title}", *map(_markdown, parts)]) + "\n"


def _markdown(part: Part) -> str:
    match part:
        case Image(path, text):
            return f"![{text}]({path.name})"
        case Grid(caption, headers, rows, names):
            rule = ["---"] * names + ["--:"] * (len(headers) - names)
            escaped = [[text.replace("|", "\\|") for text in row] for row in (headers, *rows)]
            lines = [f"| {' | '.join(row)} |" for row in (escaped[0], rule, *escaped[1:])]
            return "\n".join([caption, "", *lines])
    return part


def as_html(title: str, parts: Sequence[Part]) -> str:
    """Return a page that needs no other file: pictures and style are in it."""
    from markdown_it import MarkdownIt

    shown: list[Part] = []
    for part in parts:
        shown += [part, f"*{part.text}*"] if isinstance(part, Image) else [part]
    page = MarkdownIt("js-default").render(as_markdown(title, shown))
    for part in parts:
        if isinstance(part, Image):
            data = base64.b64encode(part.path.read_bytes()).decode()
            page = page.replace(f'src="{part.path.name}"', f'src="data:image/png;base64,{data}"')
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"{page}</body>\n</html>\n"
    )
