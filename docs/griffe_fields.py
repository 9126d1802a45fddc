"""For the site's reference: a strategy's constructor, which follows from its annotated fields.

mkdocstrings reads the sources without importing them, and knows this of dataclasses only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import griffe


class Fields(griffe.Extension):
    """Give the classes of the library whose settings are fields an ``__init__`` with them."""

    def on_package(self, *, pkg: griffe.Module, **more: Any) -> None:
        """Add the parameters: the class's own, then those of its bases."""
        classes = list(_classes(pkg))
        own = {cls.path: _fields(cls) for cls in classes}
        for cls in classes:
            if "__init__" in cls.members or cls.decorators or not own[cls.path]:
                continue  # a hand-written constructor, a dataclass, or nothing to say
            fields: dict[str, griffe.Parameter] = {}
            for owner in (cls, *cls.mro()):
                fields = {**own.get(owner.path, {}), **fields}
            parameters = griffe.Parameters(*fields.values())
            cls.set_member("__init__", griffe.Function("__init__", parameters=parameters))


def _classes(module: griffe.Module) -> Iterator[griffe.Class]:
    for member in module.members.values():
        if isinstance(member, griffe.Module):
            yield from _classes(member)
        elif isinstance(member, griffe.Class):
            yield member


def _fields(cls: griffe.Class) -> dict[str, griffe.Parameter]:
    return {
        name: griffe.Parameter(
            name,
            annotation=attribute.annotation,
            kind=griffe.ParameterKind.keyword_only,
            default=_default(attribute.value),
        )
        for name, attribute in cls.attributes.items()
        if attribute.annotation
        and "property" not in attribute.labels
        and "ClassVar" not in str(attribute.annotation)
    }


def _default(value: Any) -> Any:
    """Return what a field is by default; ``field(default=..., kw_only=False)`` says it so."""
    if value is None or not str(value).startswith("field("):
        return value
    (call,) = ast.parse(str(value)).body
    keywords = {k.arg: ast.unparse(k.value) for k in call.value.keywords}  # type: ignore[attr-defined]
    return keywords.get("default")
