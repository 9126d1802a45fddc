"""The table of a constructor: what a TOML file may say of its parameters.

The signature is the one source. A parameter of a type that TOML can hold becomes a setting of that
type; one that takes an object of the library, such as a penalty, becomes a table of that object's
own parameters; one that takes neither, such as a function, is no setting. Ranges are checked by the
constructor itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from inspect import Parameter
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import Discriminator, Strict, Tag, create_model, model_validator

import fl_admm_strategies as library
from fl_admm_strategies.maths.penalties import Penalty
from fl_admm_strategies.maths.regularizers import Regularizer
from fl_admm_strategies.runtime.common.settings import RENAMED, HasSettings, parameters_of

from .section import Section, SettingError
from .wording import hint

OBJECTS: dict[object, Mapping[str, type]] = {
    Penalty: {"scad": library.SmoothedSCAD, "l1": library.L1, "mcp": library.MCP},
    library.LambdaPath: {"path": library.LambdaPath},
    Callable[[int, int], int]: {"growing": library.GrowingEpochs, "random": library.RandomEpochs},
    Regularizer: {"l2": library.SquaredL2, "l1": library.L1Norm},
}
"""What a file can give for a parameter of one of these types, by the table's ``type``."""
SCHEDULES: dict[object, type] = {
    Callable[[int], float]: library.StepDecay,
    Callable[[int, int], float]: library.RandomDelay,
}
"""What it can give for a function of the round, or of the round and the client."""


class Built(Section):
    """A table that holds the arguments of a class's constructor.

    Attributes
    ----------
    builds : type
        The class.
    parameters : tuple of str
        Those of its parameters that are settings.
    objects : frozenset of str
        Those of them that may be tables.
    withheld : mapping of str to str
        Parameters that are not for the file to give, and why, as a sentence.
    complete : bool
        Whether the constructor needs no more than the table has, so that it can check it.
    tag : str
        Tells tables for the same parameter apart.
    """

    builds: ClassVar[type[Any]]
    parameters: ClassVar[tuple[str, ...]] = ()
    objects: ClassVar[frozenset[str]] = frozenset()
    withheld: ClassVar[Mapping[str, str]] = {}
    complete: ClassVar[bool] = False
    tag: ClassVar[str] = "<table>"

    @classmethod
    def about_unknown(cls, key: str, known: list[str]) -> str:
        """Return what is said of a key that is no setting, or not one to give here."""
        name = RENAMED.get(
            key.replace("-", "_"), key.replace("-", "_")
        )  # as other libraries have it
        if reason := cls.withheld.get(name):
            return f"cannot be set here. {reason}"
        said = hint(name.replace("_", "-"), known)
        return f"is not a parameter of {cls.builds.__name__}.{said}"

    @model_validator(mode="after")
    def _refused_by_the_constructor(self) -> Self:
        if self.complete:
            try:
                self.build()
            except (TypeError, ValueError) as error:
                parameter, _, rest = str(error).partition(" ")
                if (field := type(self).model_fields.get(parameter)) is None:
                    raise ValueError(str(error)) from None
                raise SettingError(f"{field.alias} {rest}") from None
        return self

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that were given or have a default other than None."""
        values = {name: getattr(self, name) for name in self.parameters}
        return {
            name: value.build() if isinstance(value, Built) else value
            for name, value in values.items()
            if value is not None
        }

    def build(self, **more: Any) -> Any:
        """Call the constructor; `more` come before the table's own."""
        return type(self).builds(**{**self.arguments(), **more})


def table_of(
    kind: type,
    *,
    base: type[Built] = Built,
    withheld: Mapping[str, str] | None = None,
    left_out: Collection[str] = (),
    complete: bool = True,
    tag: str = Built.tag,
    **fields: Any,
) -> type[Any]:
    """Make the table of a class's constructor.

    Parameters
    ----------
    kind : type
        The class. Parameters that it passes on as ``**base`` count as its own.
    base : type
        What the table derives from.
    withheld, complete, tag
        See `Built`.
    left_out : collection of str
        Parameters whose default is the app's to find, None until then.
    **fields
        Fields of the table that are no parameters, as `pydantic.create_model` takes them.

    Returns
    -------
    type
        A subclass of `base`.
    """
    hints, names, objects = annotations_of(kind), [], []
    for name, parameter in parameters_of(kind).items():
        variadic = parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        if variadic or name in (withheld or {}):
            continue
        if (found := _setting_type(hints.get(name))) is None:
            continue
        names.append(name)
        if isinstance(getattr(found, "__metadata__", [None])[-1], Discriminator):
            objects.append(name)
        default = ... if parameter.default is Parameter.empty else parameter.default
        if name in left_out:
            found, default = found | None, None
        fields[name] = (found, default)
    made = create_model(kind.__name__, __base__=base, **fields)
    made.builds, made.parameters, made.withheld = kind, tuple(names), withheld or {}
    made.objects, made.complete, made.tag = frozenset(objects), complete, tag
    return made


def annotations_of(kind: type) -> dict[str, Any]:
    """Return the types of a constructor's parameters, those that it passes on among them."""
    found: dict[str, Any] = {}
    for owner in kind.__mro__:
        if "__init__" in vars(owner) and owner is not object:
            source = kind if owner is HasSettings else vars(owner)["__init__"]
            found = {**get_type_hints(source), **found}
    return found


def _setting_type(annotation: Any) -> Any:
    """Return the type of a setting for a parameter; None where TOML has nothing for it."""
    union = get_origin(annotation) in (Union, UnionType)
    options = get_args(annotation) if union else (annotation,)
    tables = {tag: table for option in options for tag, table in _tables_of(option).items()}
    plain = [found for option in options if (found := _plain(option)) is not None]
    if NoneType in options and (plain or tables):
        plain.append(NoneType)
    if not tables:
        return Union[*plain] if plain else None
    words = [word for one in plain if get_origin(one) is Literal for word in get_args(one)]

    def tag_of(value: Any) -> str:
        if isinstance(value, Built):
            return value.tag
        if isinstance(value, Mapping):
            return f"<{value['type']}>" if "type" in value else Built.tag
        return "<none>" if isinstance(value, str) and words and value not in words else "<value>"

    types = [repr(tag.strip("<>")) for tag in tables if tag != Built.tag]
    wanted = [f"a table with type = {' or '.join(types)}" if types else "a table"]
    tagged = [Annotated[table, Tag(tag)] for tag, table in tables.items()]
    tagged += [Annotated[Union[*plain], Tag("<value>")]] if plain else []
    choice = " or ".join([*wanted, *map(repr, words)])
    return Annotated[
        Union[*tagged],
        Discriminator(tag_of, custom_error_type="choice", custom_error_message=choice),
    ]


def _plain(option: Any) -> Any:
    """Return the type of a value that is no table; None where TOML has none."""
    if option in (bool, int, float, str):
        # No text for a number, no truth for a 1; an integer is a number.
        return Annotated[option, Strict()]
    if option == Sequence[float]:
        return tuple[Annotated[float, Strict()], ...]
    return option if get_origin(option) is Literal else None


@cache  # most methods take the same ones
def _tables_of(annotation: Any) -> dict[str, type[Built]]:
    if annotation in OBJECTS:
        return {
            f"<{name}>": table_of(kind, tag=f"<{name}>", type=(Literal[name], name))
            for name, kind in OBJECTS[annotation].items()
        }
    kind = SCHEDULES.get(annotation, annotation)
    if isinstance(kind, type) and is_dataclass(kind):
        return {Built.tag: table_of(kind)}
    return {}
