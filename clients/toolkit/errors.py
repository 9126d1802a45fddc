"""What a client raises, so that every engine can pass it on."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from fl_admm_strategies.runtime.common.interrupts import Interrupted
from fl_admm_strategies.runtime.messages.records import describe


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise `RuntimeError` in place of what would end more than a client.

    ``SystemExit`` ends a Ray actor, ``KeyboardInterrupt`` and ``GeneratorExit`` what waits for it,
    and an error with a ``__str__`` that raises what shows it.
    """
    try:
        yield
    except Interrupted:
        raise
    except BaseException as error:
        if (plain := as_plain(error)) is error:
            raise
        raise plain from None


def as_plain(error: BaseException) -> Exception:
    """Return what `plain_errors` raises in place of an error: mostly the error itself."""
    if isinstance(error, Exception) and _has_text(error):
        return error
    # Without the error, whose notes and the like may raise where it is shown.
    return RuntimeError(describe(error))


def _has_text(error: Exception) -> bool:
    try:
        str(error), repr(error), traceback.format_exception_only(error)
        return True
    except Interrupted:
        raise
    except BaseException:
        return False
