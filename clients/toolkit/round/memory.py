"""What a client keeps between rounds, so that it and the server never disagree about it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context
from flwr.common import log
from numpy.typing import NDArray

from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.runtime.messages.records import STATE_LOST, to_array_record, views
from fl_admm_strategies.runtime.saving.files import DamagedFileError, read_arrays, write_arrays


class ContextStore:
    """Arrays in Flower's ``context.state``, which travels with every message and ends with the run.

    Parameters
    ----------
    context : Context
        The client's context.
    name : str
        What its entries are called, before their rounds.
    """

    outlives_the_run = False

    def __init__(self, context: Context, name: str) -> None:
        self._state, self._prefix = context.state, f"{name}."

    def rounds(self) -> list[int]:
        """Return the rounds that it holds arrays of, sorted."""
        keys = [key for key in self._state if key.startswith(self._prefix)]
        return sorted(int(key.removeprefix(self._prefix)) for key in keys)

    def read(self, server_round: int, run: str | None) -> Arrays | None:
        """Return the arrays of a round, views of the state; a context belongs to one run."""
        # Not of `array_records`: that and the state would refer to each other, so that all that the
        # state holds would outlive its message until Python looks for cycles.
        record = self._state.get(f"{self._prefix}{server_round}")
        return views(record) if isinstance(record, ArrayRecord) else None

    def write(self, server_round: int, arrays: Mapping[str, NDArray[Any]], run: str) -> None:
        """Store the arrays of a round."""
        self._state[f"{self._prefix}{server_round}"] = to_array_record(arrays)

    def remove(self, server_round: int) -> None:
        """Remove the arrays of a round."""
        del self._state[f"{self._prefix}{server_round}"]


class FolderStore:
    """Arrays in a folder, which outlive the run: ``client-3/round-000012.safetensors``.

    Parameters
    ----------
    folder : str or Path
        All clients may share it; each has a folder of its own in it.
    client_id : int
    """

    outlives_the_run = True

    def __init__(self, folder: str | os.PathLike[str], client_id: int) -> None:
        self._folder = Path(folder) / f"client-{client_id}"

    def _path(self, server_round: int) -> Path:
        return self._folder / f"round-{server_round:06d}.safetensors"

    def rounds(self) -> list[int]:
        """Return the rounds that it holds arrays of, sorted."""
        paths = self._folder.glob("round-*.safetensors")
        return sorted(int(path.stem.removeprefix("round-")) for path in paths)

    def read(self, server_round: int, run: str | None) -> Arrays | None:
        """Return the arrays of a round; None, too, where they are another run's or damaged."""
        path = self._path(server_round)
        if not path.exists():
            return None
        try:
            arrays, metadata = read_arrays(path)
        except DamagedFileError as error:
            log(WARNING, "%s is damaged: %s", path, error)
            return None
        return arrays if run in (None, metadata.get("run")) else None

    def write(self, server_round: int, arrays: Mapping[str, NDArray[Any]], run: str) -> None:
        """Store the arrays of a round: after a kill they are there as a whole or not at all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_arrays(self._path(server_round), arrays, {"run": run})

    def remove(self, server_round: int) -> None:
        """Remove the arrays of a round."""
        self._path(server_round).unlink(missing_ok=True)


class Memory:
    """Named arrays that a client keeps, by the round that they came out of.

    The server says in every message which of the client's uploads it accepted last
    (``config["version"]``, 0 before the first). That may not be the client's last: a reply can be
    lost, come too late or be refused. So the client keeps what it held at that round until the
    server is seen to have moved on, and goes back to it where need be: a round that the server did
    not accept has not happened.

    Parameters
    ----------
    context : Context
        The client's context.
    folder : str or Path, optional
        Keep the arrays in this folder, one for the clients of one run, which a resumed run must
        find again: then it continues to the same bits. The client keeps those of the rounds that
        the server has checkpoints of as well (``config["durable"]``). A client's files go by its
        ``partition-id``, or by its node id where it has none, which a restart changes. By default
        the arrays are in ``context.state``, which ends with the run and travels with every message.
    name : str (default: "memory")
        Tells memories of one client in ``context.state`` apart.

    Examples
    --------
    >>> memory = Memory(context)
    >>> held = memory.recall(config) or {"u": first}
    >>> memory.keep(config, {"u": held["u"] + 1})
    """

    def __init__(
        self,
        context: Context,
        folder: str | os.PathLike[str] | None = None,
        *,
        name: str = "memory",
    ) -> None:
        partition = context.node_config.get("partition-id")
        self._client = context.node_id if partition is None else int(partition)
        self._store: ContextStore | FolderStore = (
            ContextStore(context, name) if folder is None else FolderStore(folder, self._client)
        )

    def recall(self, config: Mapping[str, Any]) -> Arrays | None:
        """Return what the client kept in the round that the server takes it to be in.

        Returns
        -------
        dict of str to ndarray, or None
            Read-only where they are in the context: copy what you change. None for a client that
            the server has not accepted anything from, and for one that does not hold the arrays of
            that round (see `lost`).
        """
        return self._store.read(int(config["version"]), _run(config))

    def require(self, config: Mapping[str, Any]) -> Arrays:
        """Return what `recall` does; raise `lost` where there is nothing."""
        if (arrays := self.recall(config)) is None:
            raise self.lost(config)
        return arrays

    def require_known(self, config: Mapping[str, Any]) -> Arrays | None:
        """Return what `require` does; None before the server has accepted anything."""
        return None if int(config["version"]) == 0 else self.require(config)

    def keep(
        self,
        config: Mapping[str, Any],
        arrays: Mapping[str, NDArray[Any]],
        *,
        resent: bool = False,
    ) -> None:
        """Keep arrays as those of this round, beside those that the server knows of.

        Alone where what it knows is `resent` once it may not be what the client holds.
        """
        server_round = int(config["server-round"])
        wanted = {server_round} if resent else {server_round, int(config["version"])}
        if self._store.outlives_the_run:
            wanted |= set(json.loads(config.get("durable", "[]")))
        self._store.write(server_round, arrays, _run(config))
        for old in self._store.rounds():
            if old not in wanted:
                self._store.remove(old)

    def latest(self) -> Arrays:
        """Return what the client kept last, whether or not the server accepted that round.

        Raises
        ------
        RuntimeError
            If it has kept nothing yet.
        """
        rounds = self._store.rounds()
        arrays = self._store.read(rounds[-1], None) if rounds else None
        if arrays is None:
            raise RuntimeError(
                "This client has not been trained yet, so it keeps no arrays. Train it first."
            )
        return {name: array.copy() for name, array in arrays.items()}

    def lost(self, config: Mapping[str, Any]) -> ValueError:
        """Return the error for a client that has lost the arrays of a known round.

        The server knows it by what it begins with, and next time sends the client what it needs to
        start afresh.
        """
        return ValueError(
            f"[{STATE_LOST} {self._client}] The server expects this client's variables of "
            f"round {config['version']}, but it holds those of rounds {self._store.rounds()}: its "
            "state was lost, or is of another run."
        )


def _run(config: Mapping[str, Any]) -> str:
    return str(config.get("run", ""))
