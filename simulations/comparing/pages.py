"""A report's parts as HTML, Markdown and LaTeX."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Heading(NamedTuple):
    """A heading of a section."""

    text: str


class Paragraph(NamedTuple):
    """A paragraph of plain text."""

    text: str


class Code(NamedTuple):
    """Lines for a shell or a file."""

    text: str


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


Part = Heading | Paragraph | Code | Grid | Image

_STYLE = """
:root { color-scheme: light dark; --text: #1d1d1f; --back: #fff; --line: #d5d5da; --dim: #5c5c66; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e8e8ec; --back: #17171a; --line: #3a3a42; --dim: #a5a5b0; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 68rem; color: var(--text); background: var(--back);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
.caption { color: var(--dim); font-size: .9rem; margin-bottom: .3rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right;
  overflow-wrap: normal; white-space: nowrap; }
th.name, td.name { text-align: left; white-space: normal; min-width: 8rem; }
pre { padding: .8rem; border: 1px solid var(--line); border-radius: 6px; white-space: pre-wrap; }
figure { margin: 1.2rem 0; }
figure img { max-width: 100%; height: auto; background: #fff; border-radius: 6px; }
figcaption { color: var(--dim); font-size: .9rem; }
"""


def as_html(title: str, parts: Sequence[Part]) -> str:
    """Return a page that needs no other file: pictures and style are in it."""
    body = "\n".join(map(_html, parts))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _html(part: Part) -> str:
    match part:
        case Heading(text):
            return f"<h2>{html.escape(text)}</h2>"
        case Paragraph(text):
            return f"<p>{html.escape(text)}</p>"
        case Code(text):
            return f"<pre>{html.escape(text)}</pre>"
        case Image(path, text):
            data = base64.b64encode(path.read_bytes()).decode()
            words = html.escape(text)
            return (
                f'<figure><img src="data:image/png;base64,{data}" alt="{words}">'
                f"<figcaption>{words}</figcaption></figure>"
            )
        case Grid(caption, headers, rows, names):

            def cells(kind: str, texts: Sequence[str]) -> str:
                marks = [' class="name"' if k < names else "" for k in range(len(texts))]
                return "".join(
                    f"<{kind}{mark}>{html.escape(text)}</{kind}>"
                    for mark, text in zip(marks, texts, strict=True)
                )

            lines = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
            return (
                f'<p class="caption">{html.escape(caption)}</p>\n<div class="wide"><table>\n'
                f"<thead><tr>{cells('th', headers)}</tr></thead>\n<tbody>\n{lines}\n</tbody>"
                "</table></div>"
            )


def as_markdown(title: str, parts: Sequence[Part]) -> str:
    """Return Markdown, with the pictures as files beside it."""
    return f"# {title}\n\n" + "\n\n".join(map(_markdown, parts)) + "\n"


def _markdown(part: Part) -> str:
    match part:
        case Heading(text):
            return f"## {text}"
        case Paragraph(text):
            return text
        case Code(text):
            return f"```\n{text}\n```"
        case Image(path, text):
            return f"![{text}]({path.name})"
        case Grid(caption, headers, rows, names):
            rule = ["---"] * names + ["--:"] * (len(headers) - names)
            escaped = [[text.replace("|", "\\|") for text in row] for row in (headers, *rows)]
            lines = [f"| {' | '.join(row)} |" for row in (escaped[0], rule, *escaped[1:])]
            return "\n".join([caption, "", *lines])


def as_latex(parts: Sequence[Part]) -> str:
    """Return the tables as LaTeX, for a document that uses the package booktabs."""
    return "% Needs \\usepackage{booktabs}.\n" + "\n".join(
        _latex(part) for part in parts if isinstance(part, Grid)
    )


def _latex(grid: Grid) -> str:
    head, *rows = [" & ".join(map(_in_latex, row)) + r" \\" for row in (grid.headers, *grid.rows)]
    columns = "l" * grid.names + "r" * (len(grid.headers) - grid.names)
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_in_latex(grid.caption)}}}",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        head,
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
        "",
    ]
    return "\n".join(lines)


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "–": "--",
    "≤": r"$\le$",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


def _in_latex(text: str) -> str:
    return re.sub("|".join(map(re.escape, _LATEX)), lambda found: _LATEX[found[0]], text)
