"""The meaning of parameters, from docstrings, and what is said of a name that does not exist."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Sequence

# A line of names at the margin, "lr : float", with the indented or empty lines below it.
_ENTRY = re.compile(
    r"^(?P<names>[*\w][^:\n]*?)(?: : .*)?\n(?P<text>(?:(?: +.*)?\n)*)", re.MULTILINE
)
_PARAMETERS = re.compile(
    r"^Parameters\n-+\n(?P<entries>.*?)(?=^\w[\w ]*\n-+\n|\Z)", re.MULTILINE | re.DOTALL
)


def parameter_docs(*owners: object) -> dict[str, str]:
    """Return the meaning of parameters by name, of the first owner whose docstring has it."""
    found: dict[str, str] = {}
    for owner in owners:
        # Not inherited: what a class passes on has its meaning where it is taken.
        text = inspect.cleandoc(getattr(owner, "__doc__", None) or "") + "\n"
        if (section := _PARAMETERS.search(text)) is None:
            continue
        for entry in _ENTRY.finditer(section["entries"]):
            meaning = " ".join(entry["text"].split())
            for name in entry["names"].split(","):
                found.setdefault(name.strip(), meaning)
    return found


def first_line(owner: object) -> str:
    """Return the first line of a docstring."""
    return inspect.cleandoc(getattr(owner, "__doc__", None) or "").partition("\n")[0]


def unknown(kind: str, given: str, known: Sequence[str]) -> ValueError:
    """Describe a name that does not exist: what exists, and what was probably meant."""
    return ValueError(f"unknown {kind} {given!r}.{hint(given, known)}")


def hint(given: str, known: Sequence[str]) -> str:
    """Return the names that there are as sentences, the likely ones first."""
    likely = difflib.get_close_matches(given, known, n=3)
    meant = f" Did you mean {' or '.join(map(repr, likely))}?" if likely else ""
    return f"{meant} Known: {', '.join(known) or 'none'}."
