"""Functions of the user's own, by name: ``mypackage.module:function``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def is_import(name: str) -> bool:
    """Return whether a name is that of a function in a module, and none of ours."""
    return ":" in name


def imported(kind: str, name: str) -> Callable[..., Any]:
    """Import a function.

    Modules are looked for in the current folder as well, as ``python -m`` does.

    Parameters
    ----------
    kind : str
        What it is to be, for the errors: "data set".
    name : str
        ``module:function``.

    Raises
    ------
    ValueError
        If there is no such module or no such function in it.
    """
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(f"{kind} is {name!r}, expected module:function.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not (module + ".").startswith(error.name + "."):
            raise  # it is there, and imports something that is not
        raise ValueError(
            f"{kind} {name!r}: there is no module {module!r} in {here} or where Python looks for "
            "modules. Start from the folder that has it, or install it."
        ) from None
    if not callable(found):
        raise ValueError(
            f"{kind} {name!r}: module {module!r} has no function {attribute!r}, expected "
            "module:function."
        )
    function: Callable[..., Any] = found
    return function
