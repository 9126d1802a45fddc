"""The base of every table of an experiment file."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of the file: keys in kebab-case, none but the known."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        alias_generator=lambda name: name.replace("_", "-"),
        use_attribute_docstrings=True,
    )


UNDOCUMENTED = {"use_attribute_docstrings": False}
"""For `create_model`: no search of the source for docstrings, which takes most of its time."""
