"""The settings of a strategy, each said once, as an annotated field of its class.

    class FedProx(StatefulStrategy):
        mu: NotNegative = 0.1
        lr: StepSize = 0.1

The constructor follows from the fields, with what each of them must pass. The log, the comparison
of a resumed run, the app's table and `Instruction.of` read the constructor's parameters.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, Field, field
from inspect import Parameter, Signature
from types import MappingProxyType
from typing import Any, ClassVar, dataclass_transform

from ...maths.checks import rules_of

RENAMED = {
    "eta": "lr",
    "epochs": "local_epochs",
    "fraction_fit": "fraction_train",
    "learning_rate": "lr",
    "min_available_clients": "min_available_nodes",
    "min_evaluate_clients": "min_evaluate_nodes",
    "min_fit_clients": "min_train_nodes",
    "proximal_mu": "mu",
    "testloader": "test_loader",
    "trainloader": "train_loader",
}
"""Parameters as Flower's legacy strategies, its examples and other libraries call them."""
ELSEWHERE = {
    "evaluate_fn": "evaluate_fn",
    "initial_parameters": "initial_arrays",
    "num_rounds": "num_rounds",
    "on_evaluate_config_fn": "evaluate_config",
    "on_fit_config_fn": "train_config",
}
"""Those that are for `StatefulStrategy.start`, which calls them so."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
class HasSettings:
    """Base of classes whose settings are their annotated fields.

    Arguments are by name; those of ``field(kw_only=False)`` also by position. No settings are a
    `ClassVar`, a name with an underscore, ``field(init=False)``, also where a base has it as a
    setting, and the type without a value of what another base declares, such as ``state: MyState``.
    """

    _fields: ClassVar[dict[str, Parameter]] = {}  # those of the class alone
    _declared: ClassVar[Signature] = Signature()
    __signature__: ClassVar[Signature | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._fields = {}
        for name, annotation in inspect.get_annotations(cls).items():
            said = vars(cls).get(name, MISSING)
            if isinstance(said, Field):
                delattr(cls, name)
                if not said.init and said.default is not MISSING:
                    setattr(cls, name, said.default)
            else:
                said = field(default=said)
            if _is_setting(cls, name, annotation, said):
                by_name = said.kw_only is not False
                cls._fields[name] = Parameter(
                    name,
                    Parameter.KEYWORD_ONLY if by_name else Parameter.POSITIONAL_OR_KEYWORD,
                    default=Parameter.empty if said.default is MISSING else said.default,
                    annotation=annotation,
                )
        fields: dict[str, Parameter] = {}
        declared: set[str] = set()
        for owner in cls.__mro__:
            own = vars(owner).get("_fields", {})
            fields |= {name: parameter for name, parameter in own.items() if name not in declared}
            declared |= inspect.get_annotations(owner).keys()
        cls._declared = Signature(sorted(fields.values(), key=lambda parameter: parameter.kind))
        by_fields = cls.__init__ is HasSettings.__init__
        cls.__signature__ = cls._declared if by_fields else None  # what help() shows

    def __init__(self, *args: Any, **given: Any) -> None:
        kind: Any = type(self)
        declared = self._declared
        refuse_unknown(kind, given.keys() - declared.parameters.keys())
        try:
            values = declared.bind(*args, **given).arguments
        except TypeError as error:
            raise TypeError(f"{kind.__name__}: {error}.") from None
        rules = rules_of(kind)
        for name, parameter in declared.parameters.items():
            value = values.get(name, parameter.default)
            rules[name](name, value)
            vars(self)[name] = value  # past a property of this name
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check settings together, and set what follows from them; the base's comes first."""


def _is_setting(cls: type, name: str, annotation: Any, said: Field[Any]) -> bool:
    if name.startswith("_") or str(annotation).startswith(("ClassVar", "typing.ClassVar")):
        return False
    outside = [base for base in cls.__mro__ if not issubclass(base, HasSettings)]
    of_a_base = any(name in inspect.get_annotations(base) for base in outside)
    return said.init and not (said.default is MISSING and of_a_base)


_PARAMETERS: dict[type, Mapping[str, Parameter]] = {}
"""A federation asks for every client that it makes, in every round."""


def parameters_of(kind: type) -> Mapping[str, Parameter]:
    """Return the parameters of a class's constructor by name, its own first.

    What the constructor passes on as ``**base`` are the parameters of the class it derives from.
    """
    if kind in _PARAMETERS:
        return _PARAMETERS[kind]
    found: dict[str, Parameter] = {}
    for owner in kind.__mro__:
        if "__init__" not in vars(owner) or owner is object:
            continue
        if owner is HasSettings:
            here = list(getattr(kind, "_declared").parameters.values())  # noqa: B009
        else:
            here = list(inspect.signature(vars(owner)["__init__"]).parameters.values())[1:]
        found |= {p.name: p for p in here if p.kind is not p.VAR_KEYWORD and p.name not in found}
        if not any(p.kind is p.VAR_KEYWORD for p in here):
            break
    return _PARAMETERS.setdefault(kind, MappingProxyType(found))


def closest(given: str, known: Collection[str]) -> list[str]:
    """Return what an unknown name may have meant, the likeliest first."""
    if RENAMED.get(given) in known:
        return [RENAMED[given]]
    return difflib.get_close_matches(given, list(dict.fromkeys(known)), n=3)


def refuse_unknown(kind: type, given: Iterable[str], strategy: type | None = None) -> None:
    """Refuse arguments of a constructor that it has no parameters for.

    Parameters
    ----------
    kind : type
        The class.
    given : iterable of str
        Their names.
    strategy : type, optional
        The strategy of a client's class, whose parameters are not the client's.

    Raises
    ------
    TypeError
        If there are any; the message says which parameter may have been meant.
    """
    if (name := next(iter(given), None)) is None:
        return
    parameters = parameters_of(kind)
    known = [n for n, p in parameters.items() if p.kind is not p.VAR_POSITIONAL]
    text = f"{name} is not a parameter of {kind.__name__}"
    if strategy is not None and name in parameters_of(strategy):
        text += f"; it is one of the strategy {strategy.__name__}, which tells the clients."
    elif name in ELSEWHERE and strategy is None:
        text += f"; give {ELSEWHERE[name]} to its start(...)."
    elif likely := closest(name, known):
        text += f"; did you mean {' or '.join(likely)}?"
    else:
        text += f". Its parameters are {', '.join(known)}."
    raise TypeError(text)


def settings_of(subject: object) -> dict[str, Any]:
    """Return an object's settings: its constructor's parameters, kept under their own names."""
    return {name: getattr(subject, name) for name in parameters_of(type(subject))}


def as_text(value: Any) -> str | None:
    """Return a setting as text that is the same in every process.

    None for a function and the like, of which nothing but its address is known. A schedule that is
    a dataclass, such as `StepDecay`, has a text.
    """
    text = repr(value) if not isinstance(value, str) else value
    return None if _ADDRESS.search(text) else text


def changed_settings(before: dict[str, str | None], now: dict[str, str | None]) -> list[str]:
    """Return in words which settings differ, or cannot be compared, between two runs."""
    found = []
    for name in {**before, **now}:
        old, new = before.get(name, "not given"), now.get(name, "not given")
        if old is None or new is None:
            found.append(f"{name} is a function, which cannot be compared with the saved run's")
        elif old != new:
            found.append(f"{name} {new} (was {old})")
    return found
