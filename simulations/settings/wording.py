"""What is said of a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def unknown(kind: str, given: str, known: Sequence[str]) -> ValueError:
    """Describe a name that does not exist: what exists, and what was probably meant."""
    return ValueError(f"unknown {kind} {given!r}.{hint(given, known)}")


def hint(given: str, known: Sequence[str]) -> str:
    """Return the names that there are as sentences, the likely ones first."""
    likely = difflib.get_close_matches(given, known, n=3)
    meant = f" Did you mean {' or '.join(map(repr, likely))}?" if likely else ""
    return f"{meant} Known: {', '.join(known) or 'none'}."
