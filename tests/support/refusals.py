"""What errors and log lines must name: the setting, its value, the client; not their sentences."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

Warned = Callable[..., list[str]]
"""The fixture `warned`: ``warned("client 3", "round 2")`` are the warnings that name both."""


def names(text: object, *named: object) -> bool:
    """Return whether a text names each of these as a word: "client 1" is not in "client 12"."""
    return all(re.search(rf"(?<!\w){re.escape(str(word))}(?!\w|\.\d)", str(text)) for word in named)


@contextmanager
def refused(error: type[BaseException], *named: object) -> Iterator[None]:
    """Expect an error of a class that names each of these, as `names` finds them."""
    with pytest.raises(error) as caught:
        yield
    assert names(caught.value, *named), caught.value


def warnings_in(records: list[logging.LogRecord], *named: object) -> list[str]:
    """Return the messages of the warnings among log records that name each of these."""
    said = [record.getMessage() for record in records if record.levelno == logging.WARNING]
    return [line for line in said if names(line, *named)]
