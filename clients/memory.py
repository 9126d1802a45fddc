"""What a client keeps between rounds, so that it and the server never disagree about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.app import Context
from numpy.typing import NDArray

from fl_admm_strategies.wire import Arrays, from_array_record, to_array_record

_PREFIX = "memory."


class Memory:
    """Named arrays in ``context.state``, by the round that they came out of.

    The server says in every message which of the client's uploads it accepted last
    (``config["version"]``, 0 before the first). That may not be the client's last: a reply can be
    lost, come too late or be refused. So the client keeps what it held at that round until the
    server is seen to have moved on, and goes back to it where need be: a round that the server did
    not accept has not happened.

    Parameters
    ----------
    context : Context
        The client's context.

    Examples
    --------
    >>> memory = Memory(context)
    >>> held = memory.recall(config) or {"u": first}
    >>> memory.keep(config, {"u": held["u"] + 1})
    """

    def __init__(self, context: Context) -> None:
        self._state = context.state

    def recall(self, config: Mapping[str, Any]) -> Arrays | None:
        """Return what the client kept in the round that the server takes it to be in.

        Returns
        -------
        dict of str to ndarray, or None
            None for a client that the server has not accepted anything from, and for one that does
            not hold the arrays of that round (see `lost`).
        """
        record = self._state.array_records.get(f"{_PREFIX}{int(config['version'])}")
        return None if record is None else from_array_record(record)

    def keep(self, config: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep arrays as those of this round, beside those that the server knows of."""
        wanted = f"{_PREFIX}{int(config['version'])}"
        for key in [key for key in self._state if key.startswith(_PREFIX) and key != wanted]:
            del self._state[key]
        self._state[f"{_PREFIX}{int(config['server-round'])}"] = to_array_record(arrays)

    def latest(self) -> Arrays:
        """Return what the client kept last, whether or not the server accepted that round.

        Raises
        ------
        RuntimeError
            If it has kept nothing yet.
        """
        if not (rounds := self._rounds()):
            raise RuntimeError(
                "This client has not been trained yet, so it has nothing of its own."
            )
        return from_array_record(self._state.array_records[f"{_PREFIX}{rounds[-1]}"])

    def _rounds(self) -> list[int]:
        keys = [key for key in self._state if key.startswith(_PREFIX)]
        return sorted(int(key.removeprefix(_PREFIX)) for key in keys)

    def lost(self, config: Mapping[str, Any]) -> ValueError:
        """Return the error for a client whose arrays of a known round are gone."""
        return ValueError(
            f"The server expects this client's variables of round {config['version']}, but it "
            f"holds those of rounds {self._rounds()}: its state was lost, or is of another run."
        )
