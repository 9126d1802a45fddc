"""The interface of a rule: what a method of consensus ADMM does to a client's variables.

    minimise  sum_i alpha_i f_i(u_i)   subject to   u_i = w

The variables of a client are its row: a few vectors, among them its scaled dual variable pi_i/rho
(Boyd et al., 2011, section 3.1.1), so that a row stays valid where rho changes. A rule is a frozen
dataclass of Python numbers, one for each client. Its functions are elementwise: they use the
operators + - * / alone and leave their arguments as they are. Strategy and client import the same
class, so both get the same bits from the same numbers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self


class Row(SimpleNamespace):
    """A client's variables: vectors by name, or the same part of each vector."""


@dataclass(frozen=True)
class Rule:
    """Base of the rules. `published`: the paper's form."""

    published: bool

    # Every method answers these

    @classmethod
    def keeps(cls, published: bool) -> dict[str, int]:
        """Return the vectors of a row: 1 for one that begins at w, 0 for one that begins at 0."""
        raise NotImplementedError

    def pull(self, row: Row, w: Any) -> tuple[Any, float]:
        """Return the point of the client's proximal term, and its weight beside the plain loss."""
        raise NotImplementedError

    def start(self, row: Row, w: Any) -> Any:
        """Return where local steps begin."""
        return w

    def move(self, row: Row, u: Any, w: Any) -> Row:
        """Return the row after the client uploaded u; w is the one of its message."""
        raise NotImplementedError

    def copy(self, row: Row) -> Any:
        """Return the client's copy of w; the row has just moved."""
        raise NotImplementedError

    def dual(self, row: Row) -> Any:
        """Return pi_i/rho."""
        return row.dual

    # The same for all methods

    @property
    def vectors(self) -> dict[str, int]:
        """The vectors of a row in this form, as `keeps`."""
        return self.keeps(self.published)

    def begin(self, w: Any) -> Row:
        """Return the row of a client before its first turn: its copy is w, its dual is 0."""
        return Row(**{name: w if at_w else w - w for name, at_w in self.vectors.items()})

    def message(self, row: Row) -> Any:
        """Return what the strategy has the sum of."""
        return self.dual(row) + self.copy(row) if self.published else self.dual(row)

    def part(self, row: Any, part: slice) -> Row:
        """Return a part of a row."""
        return Row(**{name: getattr(row, name)[part] for name in self.vectors})

    def text(self) -> str:
        """Return the numbers as they travel; JSON keeps all bits of a float."""
        return json.dumps(vars(self))

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the rule of a message."""
        return cls(**json.loads(text))
