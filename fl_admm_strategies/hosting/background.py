"""A function in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Value = TypeVar("Value")


def in_background(function: Callable[[], Value]) -> Future[Value]:
    """Call a function in a thread that does not keep the process alive, as a pool's would."""
    future: Future[Value] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future
