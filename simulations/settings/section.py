"""The base of every table of an experiment file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from .wording import hint


class SettingError(ValueError):
    """A mistake in one setting of a table; the message begins with its key."""


class Section(BaseModel):
    """A table of the file: keys in kebab-case, none but the known."""

    model_config = ConfigDict(frozen=True, alias_generator=lambda name: name.replace("_", "-"))

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, raw: Any) -> Any:
        known = [str(field.alias) for field in cls.model_fields.values()]
        for key in raw if isinstance(raw, Mapping) else ():
            if key not in known:
                raise SettingError(f"{key} {cls.about_unknown(str(key), known)}")
        return raw

    @classmethod
    def about_unknown(cls, key: str, known: list[str]) -> str:
        """Return what is said of a key that does not exist."""
        return f"is no setting.{hint(key, known)}"
