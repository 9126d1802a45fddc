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
_NOT_USERS = tuple(
    str(_HOUSE / folder) + "/" for folder in ("fl_admm_strategies", "clients", "simulations")
) + tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
_shown: set[str] = set()


def reported(error: BaseException) -> str:
    """Return an error as one line, with the place in the user's code that it comes from.

    The first of a text is logged with the frames from there on. An error that no code of the user's
    is in is a sentence of the library, or of PyTorch about what the library was given.
    """
    text, frames = describe(error), _users_frames(error)
    if not frames:
        return text
    if text not in _shown:
        _shown.add(text)
        log(ERROR, "A client raised %s\n%s", text, "".join(traceback.format_list(frames)))
    inmost = [frame for frame in frames if _is_users(frame)][-1]
    return f"{text} ({Path(inmost.filename).name}, line {inmost.lineno}, in {inmost.name})"


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    places = [place for place, frame in enumerate(frames) if _is_users(frame)]
    return frames[places[0] :] if places else []


def _is_users(frame: traceback.FrameSummary) -> bool:
    return not frame.filename.startswith(("<", *_NOT_USERS))
