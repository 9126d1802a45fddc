"""Python's collector of reference cycles, which is in the way where very many objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let the collector rest; as a decorator, during each call.

    It starts by how many objects were made, and then looks at all that the process has, PyTorch's
    included. The messages of ten thousand clients make it do so several times a round, a third of
    the server's time, and are no garbage. Not for code that calls clients.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def only_new_collected() -> Iterator[None]:
    """Let the collector look only at what is made meanwhile.

    A process with PyTorch has 300,000 objects that stay. The collector looks at all of them once a
    thousand clients or so have been made, a quarter of the time of a round of small models. For
    code that calls clients: their garbage is collected as ever.
    """
    if gc.get_freeze_count() or not gc.isenabled():  # an outer block has done it, or more
        yield
        return
    gc.collect(1)  # what is garbage now would be left until it looks at everything again
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
