"""What is said about a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def unknown(kind: str, given: str, known: Sequence[str]) -> ValueError:
    """Describe a name that does not exist: what exists, and what was probably meant."""
    return ValueError(f"unknown {kind} {given!r}.{hint(given, known)}")


def hint(given: str, known: Sequence[str]) -> str:
    """Return the names that there are as sentences, the likely ones first.

    Of a dotted name, such as "penalty.lam", the last part alone counts as well.
    """
    parts = {name: name.rpartition(".")[2] for name in known}
    words = [*known, *parts.values()]
    close = [] if given == "" else difflib.get_close_matches(given, dict.fromkeys(words), n=3)
    likely = dict.fromkeys(name for word in close for name in known if word in (name, parts[name]))
    meant = f" Did you mean {' or '.join(map(repr, [*likely][:3]))}?" if likely else ""
    return f"{meant} Known: {', '.join(known) or 'none'}."
