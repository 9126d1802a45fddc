"""Clients with a model of which a part, v_i, stays with them while the rest, u, is shared."""

from __future__ import annotations

import re
from typing import Any

from numpy.typing import NDArray

from fl_admm_strategies.algorithms.shared.split import SplitEvaluation
from fl_admm_strategies.maths.blocks import Arrays, prefixed, under

from ..solving.steps import Evaluation, Scalars, Steps
from .base import Asked
from .torch_client import TorchClient

V = "v/"
"""Prefix of v_i's arrays in a client's memory."""


class SplitClient(TorchClient[Asked]):
    """Base of the clients that keep a part of their model to themselves.

    The part is named by the strategy's pattern, and its shapes may be this client's own. It starts
    from the values of the model that the client is given: seed it where you build it, so that a run
    can be repeated.
    """

    def load_split(self, shared: Arrays, personal: str | None, config: Scalars) -> None:
        """Load u, and the client's v_i, into the model.

        Raises
        ------
        ValueError
            If the pattern leaves other arrays of this model to share, or v_i was lost or is of
            another model.
        """
        state = self.arrays()
        expected = [name for name in state if not is_personal(name, personal)]
        if sorted(shared) != sorted(expected):
            raise ValueError(
                f"The server shares {len(shared)} arrays ({', '.join(shared)}), but "
                f"personal={personal!r} leaves {len(expected)} of the client's model to share "
                f"({', '.join(expected)}). Models may differ in their personal arrays only."
            )
        own = self.personal_part(personal)
        held = self.memory.require_known(config)
        kept = own if held is None else under(V, held)
        shapes, new = ({name: a.shape for name, a in arrays.items()} for arrays in (kept, own))
        if shapes != new:
            raise ValueError(
                f"The personal arrays of round {config['version']} were {shapes}, the client's "
                f"model has {new} now. client_fn must build the same model in every round."
            )
        self.load(state | kept | shared)

    def personal_part(self, personal: str | None) -> Arrays:
        """Return the personal arrays of the model, buffers among them."""
        return {name: a for name, a in self.arrays().items() if is_personal(name, personal)}

    def trained_parts(self, personal: str | None) -> tuple[list[str], list[str]]:
        """Return the names of the parameters in v_i and in u."""
        parts: tuple[list[str], list[str]] = [], []
        for name in self.trained_names():
            parts[not is_personal(name, personal)].append(name)
        return parts

    def kept(self, asked: Any) -> Arrays:
        """Return what the client is to keep of a training: v_i."""
        return prefixed(V, self.personal_part(asked.personal))

    def wanted_names(self, config: Scalars) -> list[str]:
        """Return which arrays the server wants; raise ValueError if any is of v_i."""
        personal: Any = config.get("personal")
        names = super().wanted_names(config)
        if held := [name for name in names if is_personal(name, personal)]:
            raise ValueError(
                f"The server wants {', '.join(held)} uploaded, which personal={personal!r} leaves "
                "with this client. They are not sent."
            )
        return names

    def test(self, parameters: list[NDArray[Any]], config: Scalars) -> Steps[Evaluation]:
        """Evaluate (u, v_i), with v_i of the last training that the server accepted."""
        asked = SplitEvaluation.decode(parameters, config)
        self.load_split(asked.global_, asked.personal, config)
        return (yield from self.evaluate_models({"personal": self.arrays()}))

    def personal_arrays(self) -> Arrays:
        """Return v_i after the last training, the part that the server does not have.

        Raises
        ------
        RuntimeError
            If it has not been trained yet.
        """
        return prefixed(self.model_arrays.prefix, under(V, self.memory.latest()))


def is_personal(name: str, pattern: str | None) -> bool:
    """Return whether the strategy's pattern, None where nothing is personal, is in a name."""
    return pattern is not None and re.search(pattern, name) is not None
