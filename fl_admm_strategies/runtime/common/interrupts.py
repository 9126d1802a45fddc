"""Ctrl-C, as opposed to a ``KeyboardInterrupt`` that a client's own code raises."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """The user has pressed Ctrl-C: the run ends, also where a client's code was running."""


@contextmanager
def interruptible(on_interrupt: Callable[[], None] | None = None) -> Iterator[None]:
    """Let Ctrl-C raise `Interrupted` in a `with` block, even where code in it swallows that.

    Other threads than the main one get no signals; there, and where Ctrl-C is ignored, this does
    nothing.

    Parameters
    ----------
    on_interrupt : callable, optional
        Called at once, in a signal handler.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    raised: list[Interrupted] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if on_interrupt is not None:
            on_interrupt()
        try:
            before(number, frame)
        except KeyboardInterrupt as interrupt:
            raised.append(Interrupted(*interrupt.args))
            raise raised[0] from None

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if raised:  # what the block raised after it, such as "the grid is closed", follows from it
            raise raised[0] from None


@contextmanager
def explaining(how: Callable[[], str]) -> Iterator[None]:
    """Let an interrupt of a `with` block say, as its text, what `how` returns."""
    try:
        yield
    except KeyboardInterrupt:
        # No other error ends a script as Ctrl-C does.
        raise KeyboardInterrupt(f"The run was interrupted. {how()}") from None
