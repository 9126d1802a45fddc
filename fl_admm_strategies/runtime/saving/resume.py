"""Saving a run and going on from what was saved."""

from __future__ import annotations

import os
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from filelock import BaseFileLock
from flwr.common import log
from numpy.typing import NDArray

from ...maths.checks import check_count, listing
from ..common.settings import changed_settings
from .checkpoints import Checkpoint, differences, newest_in, rounds_in, save
from .files import NotWrittenError, lock_folder
from .history import FILE, History
from .state import Saved


class Resume:
    """The checkpoints of a run, and the state that the coming run goes on from.

    Attributes
    ----------
    saved : dict of str to ndarray, or None
        The state to go on from at the next start.
    run_id : str
        Names the run to its clients, through all resumptions.
    """

    def __init__(self) -> None:
        self.saved: dict[str, NDArray[Any]] | None = None
        self.run_id = ""
        self._folder: Path | None = None
        self._history = History(Path(FILE))
        self._every = self._keep = 1
        self._lock: BaseFileLock | None = None
        self._checkpoint: Checkpoint | None = None
        self._kept: deque[dict[int, int]] = deque()  # last_accepted of every checkpoint there is

    @property
    def saved_clients(self) -> list[int]:
        """The clients of the saved state, if there is one."""
        return [] if self.saved is None else [int(c) for c in self.saved["base/client_ids"]]

    def open(
        self,
        folder: str | os.PathLike[str] | None,
        fingerprint: Mapping[str, Any],
        *,
        every: int,
        keep: int,
        resume: bool,
    ) -> Saved | None:
        """Prepare to save the rounds of the coming run, and to continue a saved one.

        Parameters
        ----------
        folder, every, keep, resume
            As `checkpoint_dir`, ... in `StatefulStrategy.start`; without a folder nothing is saved.
        fingerprint : dict
            Which run it is: algorithm, model, seed and settings.

        Returns
        -------
        dict of str to ndarray, or None
            The saved state that the run is to go on from.

        Raises
        ------
        ValueError, RuntimeError
            As in `StatefulStrategy.start`.
        """
        check_count("checkpoint_every", every, least=1)
        check_count("checkpoint_keep", keep, least=1)
        self._folder = self._checkpoint = None
        if folder is None:
            if resume:
                raise ValueError("resume=True needs a checkpoint_dir to resume from.")
            return None
        path = Path(folder)
        self._lock = lock_folder(path).lock
        rounds = rounds_in(path)
        if rounds and not resume:
            raise ValueError(
                f"{path} holds checkpoints of a run, the last of round {rounds[-1]}. "
                "Continue it with resume=True, or give another checkpoint_dir."
            )
        self._folder, self._every, self._keep = path, every, keep
        self._history = History(path / FILE)
        self._kept = deque(maxlen=keep)
        if not rounds:
            if resume:
                log(INFO, "No checkpoint in %s: starting anew", path)
            return None
        saved = newest_in(path)
        if found := differences(saved.fingerprint, fingerprint):
            raise ValueError(
                f"{saved.path} is of another run: {'; '.join(found)}. Resume with the algorithm, "
                "the model and the seed of that run, or give another checkpoint_dir."
            )
        before = saved.fingerprint.get("settings", {})
        if changed := changed_settings(before, fingerprint["settings"]):
            log(WARNING, "Resuming with other settings: %s", "; ".join(changed))
        log(INFO, "Resuming after round %s from %s", saved.server_round, saved.path)
        self._history.open(saved.server_round)
        if self._history.last_round < saved.server_round:
            log(
                WARNING,
                f"{self._history.path} is damaged: what was measured after round "
                f"{self._history.last_round} is lost; the state is whole",
            )
        self._checkpoint = saved
        return saved.arrays

    def compare_clients(self, found: list[int], announced: int, *, allow_missing: bool) -> None:
        """Refuse to go on from a saved state with another federation than its own."""
        if self.saved is None:
            return
        saved, known = self.saved_clients, int(self.saved["base/announced"])
        missing, more = set(saved).difference(found), set(found).difference(saved)
        # More clients than the saved run knew of could be new ones, were it not for their word
        # that the federation is larger: in a simulation all of them then have other data.
        if (more and announced > known) or (missing and not allow_missing):
            raise ValueError(
                f"The saved state belongs to clients {listing(saved)}, but the federation has "
                f"clients {listing(found)}. Continue with the same clients, or start anew without "
                "the saved state."
            )
        if missing:
            log(WARNING, "clients %s of the saved run are not connected", listing(sorted(missing)))

    def begin(self, client_ids: list[int]) -> Iterator[dict[str, Any]]:
        """Start a run, or go on with a saved one; return what was measured in its rounds."""
        checkpoint, self._checkpoint, self.saved = self._checkpoint, None, None
        self._kept.clear()
        if checkpoint is None:
            self.run_id = uuid.uuid4().hex
            return iter(())
        self.run_id = checkpoint.fingerprint["run"]
        for rounds in checkpoint.fingerprint["kept"]:
            self._kept.append(dict(zip(client_ids, rounds, strict=True)))
        return self._history.entries()

    def durable_rounds(self, client: int) -> list[int] | None:
        """Return the rounds of a client that a resumed run may go back to; None: there is none."""
        if self._folder is None:
            return None
        return sorted({last_accepted.get(client, 0) for last_accepted in self._kept})

    def record(self, entry: Mapping[str, Any]) -> bool:
        """Add what was measured in a round; return whether the round can be saved."""
        if self._folder is None or entry["round"] <= self._history.last_round:
            return False
        with self._explaining():
            self._history.append(entry)
        return True

    def is_due(self, server_round: int) -> bool:
        """Return whether a round is to be saved though more rounds follow."""
        return server_round > 0 and server_round % self._every == 0

    def save(
        self,
        server_round: int,
        state: Saved,
        last_accepted: Mapping[int, int],
        fingerprint: Mapping[str, Any],
    ) -> None:
        """Write a round's checkpoint."""
        assert self._folder is not None
        self._kept.append(dict(last_accepted))
        kept = [[then.get(client, 0) for client in last_accepted] for then in self._kept]
        run = {**fingerprint, "run": self.run_id, "kept": kept}
        with self._explaining():
            self._history.flush()
            save(self._folder, server_round, state, run, self._keep)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Let a block that cannot write say what is saved."""
        try:
            yield
        except NotWrittenError as error:
            raise NotWrittenError(f"{error}. {self.how_to_go_on()}") from error

    def how_to_go_on(self) -> str:
        """Return what is saved of a run that ends early, and how to go on from it."""
        if self._folder is None:
            return "Nothing is saved: start() got no checkpoint_dir."
        rounds = rounds_in(self._folder)
        saved = f"The run is saved up to round {rounds[-1]}" if rounds else "No round is saved yet"
        folder = os.fspath(self._folder)
        return f"{saved}; go on with start(..., checkpoint_dir={folder!r}, resume=True)."

    def close(self) -> None:
        """Leave the folder to others: the run has ended."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
