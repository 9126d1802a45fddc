"""Completing instructions: what every client is told, whatever the algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..maths.blocks import Spec
from .algorithm import Algorithm
from .common.settings import parameters_of
from .members.membership import Membership
from .members.sampling import Sampling
from .messages.changes import CLIP, NOISE
from .messages.records import (
    COLLECT,
    GROUPS,
    UPLOAD,
    ClientInstruction,
    Scalar,
    names_setting,
    to_json,
)
from .messages.schema import Instruction, Instructions
from .messages.stamp import is_stamp, made_by
from .messages.wire import OutOfRangeError, Reduction, WireDtype
from .saving.resume import Resume
from .trust.layout import NAMES
from .trust.validation import ReplyValidation

OF_EVERY_MESSAGE = frozenset(
    {"server-round", "seed", "version", "run", "durable", "handshake"}
    | {CLIP, COLLECT, GROUPS, NAMES, NOISE, UPLOAD}
)
"""What the runtime tells every client, whatever the method."""


def check_user_settings(algorithm: Algorithm, config: Mapping[str, Any]) -> None:
    """Raise ValueError for settings of the user's for the clients that are the strategy's to give.

    What a method's messages hold is checked where they are made (`Outgoing.complete`).
    """
    name, parameters = type(algorithm).__name__, parameters_of(type(algorithm))
    for key in config:
        parameter = key.replace("-", "_")
        if parameter in parameters:
            raise ValueError(
                f"The setting {key!r} for the clients is a parameter of {name}. Leave it out, and "
                f"give {name}({parameter}=...)."
            )
        if key in OF_EVERY_MESSAGE or is_stamp(key):
            raise ValueError(_given_twice(key, name))


def _given_twice(key: str, name: str) -> str:
    return (
        f"The setting {key!r} for the clients is one that {name} tells them itself. Leave it out, "
        "or give it another name."
    )


@dataclass(frozen=True)
class Outgoing:
    """Makes complete messages of an algorithm's instructions.

    Parameters
    ----------
    algorithm : Algorithm
        Whose they are.
    membership, sampling, resume, validation
        The run's collaborators; `validation` gets what was sent.
    wire_dtype : {"float16"} or None
    """

    algorithm: Algorithm
    membership: Membership
    sampling: Sampling
    resume: Resume
    validation: ReplyValidation
    wire_dtype: WireDtype

    def complete(
        self,
        server_round: int,
        config: Mapping[str, Any],
        instructions: Instructions,
        spec: Spec | None,
    ) -> dict[int, ClientInstruction]:
        """Add to the instructions what every client is told.

        The user's settings, the round, the client's own seed, the run, which of its states the
        server takes it to be in and could go back to, and the names of the arrays to upload where
        they are not those it received.

        Raises
        ------
        ValueError
            If no client can be sent its arrays as `wire_dtype` has them (one alone that cannot is
            left out of the phase, by name), or the user gives a setting that the method gives.
        """
        messages: dict[int, ClientInstruction] = {}
        reduce, beyond = self._reduction(server_round), None
        seeds = self.sampling.client_seeds(instructions, server_round)
        wanted = [] if spec is None else list(spec)
        of_all: dict[str, Scalar] = {**config, "server-round": server_round}
        if (method := self.algorithm.method) is not None:
            of_all |= made_by(method)
        for client, typed in sorted(instructions.items()):
            instruction = typed.encode() if isinstance(typed, Instruction) else typed
            if clash := config.keys() & instruction.config.keys():
                raise ValueError(_given_twice(min(clash), type(self.algorithm).__name__))
            version = self.membership.last_accepted.get(client, 0)
            common = {**of_all, "seed": seeds[client], "version": version, **self.of_run(client)}
            if spec is not None and wanted != list(next(iter(instruction.groups.values()))):
                common[UPLOAD] = names_setting(tuple(wanted))
            groups = instruction.groups
            if reduce is not None:
                try:
                    groups, said = reduce(instruction.groups)
                except OutOfRangeError as error:
                    self.validation.refuse(server_round, {client: f"it is not asked: {error}"})
                    beyond = error
                    continue
                common |= said
            messages[client] = ClientInstruction(groups, common | instruction.config)
        if beyond is not None and not messages:
            raise beyond
        self.validation.sent = messages
        return messages

    def of_run(self, client: int) -> dict[str, Scalar]:
        """Return what differs between runs of the same bits: its name, and what it can go back to.

        The names of these settings are `OF_RUN`.
        """
        settings: dict[str, Scalar] = {"run": self.resume.run_id}
        if (durable := self.resume.durable_rounds(client)) is not None:
            settings["durable"] = to_json(durable)
        return settings

    def _reduction(self, server_round: int) -> Reduction | None:
        """Return what reduces the messages of a phase; handshakes travel as they are."""
        if self.wire_dtype is None or server_round == 0:
            return None
        run = self.algorithm.run
        return Reduction(self.wire_dtype, run.model_spec.keys() - set(run.trained))
