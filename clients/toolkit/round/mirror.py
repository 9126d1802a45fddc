"""A client's mirror of its row in a method of consensus ADMM, whatever its local work is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fl_admm_strategies.algorithms.shared.consensus import BEGIN
from fl_admm_strategies.algorithms.shared.rule import Row, Rule
from fl_admm_strategies.maths.blocks import Arrays, Block, prefixed, spec_of, under

from ..solving.steps import Scalars
from .base import MethodClient

ROW = "row/"
"""Before the names of the row's vectors in a client's memory."""
SUMMED = "summed"
"""What the strategy's sum has of a client that alone holds its row."""


@dataclass(frozen=True)
class Turn:
    """A client's turn: its message, w as one vector, its rule, and its row before the turn."""

    message: Any
    block: Block
    w: NDArray[Any]
    rule: Rule
    row: Row


class MirrorClient(MethodClient[Any]):
    """Base of the clients of consensus ADMM: each holds its row, or a mirror of it."""

    resent: ClassVar[bool] = True
    """Whether the strategy has all that the client keeps, where it holds the rows."""

    def turn(self, message: Any, config: Scalars) -> Turn:
        """Return a turn with the row of the message, or the client's own where it has none."""
        rule = self.strategy.rule.read(message.rule)  # type: ignore[attr-defined]
        block = Block(spec_of({name: message.model[name] for name in message.optimised}))
        w = block.vector(message.model)
        if message.start is None:
            row = Row(**under(ROW, self.memory.require(config)))
        else:
            begun = vars(rule.begin(message.start.get(BEGIN, w)))
            row = Row(**{name: message.start.get(name, begun[name]) for name in rule.vectors})
        return Turn(message, block, w, rule, row)

    def end(self, turn: Turn, upload: Arrays, kept: Arrays, config: Scalars) -> Arrays:
        """Move the row by the upload as it travels, keep it, and return that upload.

        A client that alone holds its row uploads what its message has become less what the
        strategy's sum has of it.
        """
        message, rule, block = turn.message, turn.rule, turn.block
        if message.duals == "strategy":
            changed = self.changed(upload, message.model, config)
            row = rule.move(turn.row, block.vector(changed), turn.w)
        else:
            row = rule.move(turn.row, block.vector(upload), turn.w)
            begins = message.start is not None
            summed = rule.message(turn.row) if begins else self.memory.require(config)[SUMMED]
            change = np.subtract(rule.message(row), summed, dtype=np.float64)
            upload = upload | block.arrays(change)
            changed = self.changed(upload, block.rest(message.model), config)
            kept = kept | {SUMMED: summed + block.vector(changed).astype(np.float64)}
        kept = kept | prefixed(ROW, {name: getattr(row, name) for name in rule.vectors})
        resent = self.resent and message.duals == "strategy"
        self.memory.keep(config, kept, resent=resent)
        return changed
