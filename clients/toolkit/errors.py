"""What a client raises, so that every engine can pass it on."""

from __future__ import annotations

import sysconfig
import traceback
from logging import ERROR
from pathlib import Path

from flwr.common import log

import fl_admm_strategies
from fl_admm_strategies.runtime.messages.records import describe

_HOUSE = Path(fl_admm_strategies.__file__).parents[1]
_NOT_USERS = (
    "<",  # code without a file
    *(f"{_HOUSE / folder}/" for folder in ("fl_admm_strategies", "clients", "simulations")),
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
)
_shown: set[str] = set()


def reported(error: BaseException) -> str:
    """Return an error as one line, with the place in the user's code that it comes from.

    The first of a text is logged with the frames from there on. An error that no code of the user's
    is in is a sentence of the library, or of PyTorch about what the library was given.
    """
    text, frames = describe(error), traceback.extract_tb(error.__traceback__)
    users = [k for k, frame in enumerate(frames) if not frame.filename.startswith(_NOT_USERS)]
    if not users:
        return text
    if text not in _shown:
        _shown.add(text)
        shown = "".join(traceback.format_list(frames[users[0] :]))
        log(ERROR, "A client raised %s\n%s", text, shown)
    inmost = frames[users[-1]]
    return f"{text} ({Path(inmost.filename).name}, line {inmost.lineno}, in {inmost.name})"
