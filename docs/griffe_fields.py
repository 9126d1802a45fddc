"""For the site's reference: a strategy's constructor, which follows from its annotated fields.

mkdocstrings reads the sources without importing them, and knows this of dataclasses only.
"""

from __future__ import annotations

import ast
from typing import Any

import griffe


class Fields(griffe.Extension):
    """Give the classes of the library whose settings are fields an ``__init__`` with them."""

    def on_class(self, *, cls: griffe.Class, **more: Any) -> None:
        """Add the parameters that are the class's own."""
        fields = [
            griffe.Parameter(
                name,
                annotation=attribute.annotation,
                kind=griffe.ParameterKind.keyword_only,
                default=_default(attribute.value),
            )
            for name, attribute in cls.attributes.items()
            if attribute.annotation and "ClassVar" not in str(attribute.annotation)
        ]
        if "__init__" in cls.members or cls.decorators or not fields:
            return  # a hand-written constructor, a dataclass, or nothing to say
        base = griffe.Parameter("**base", kind=griffe.ParameterKind.var_keyword)
        cls.set_member(
            "__init__", griffe.Function("__init__", parameters=griffe.Parameters(*fields, base))
        )


def _default(value: Any) -> Any:
    """Return what a field is by default; ``field(default=..., kw_only=False)`` says it so."""
    if value is None or not str(value).startswith("field("):
        return value
    (call,) = ast.parse(str(value)).body
    keywords = {k.arg: ast.unparse(k.value) for k in call.value.keywords}  # type: ignore[attr-defined]
    return keywords.get("default")
