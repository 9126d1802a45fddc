"""The client of FedADMM; the strategy and the paper are in `fl_admm_strategies.FedADMM`."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fl_admm_strategies import FedADMM
from fl_admm_strategies.algorithms.fedadmm import FIXED_RHO, FedADMMInstruction
from fl_admm_strategies.maths.blocks import Arrays, prefixed, under

from ..toolkit.models.arrays import Room
from ..toolkit.round.torch_client import BUFFERS, TorchClient, read_only, to_numpy
from ..toolkit.solving.objective import LocalObjective, ProximalTerm
from ..toolkit.solving.steps import MethodSteps, Minimisation, Scalars, Steps

RHO = "rho"
"""Name, in the client's memory, of the rho that its pi_i belongs to."""


class FedADMMClient(TorchClient[Any]):
    """Client of `FedADMM`: E epochs on its loss, pulled towards the anchor."""

    strategy: ClassVar[Any] = FedADMM
    instruction: ClassVar[Any] = FedADMMInstruction

    def steps(self, asked: FedADMMInstruction, config: Scalars) -> MethodSteps:
        """Move u_i, and pi_i where the client has it; upload u_i or the change of a message."""
        self.receive(asked, asked.anchor, config)
        names = self.trainable(asked.optimised, setting="FedADMM(averaged=...)")
        w = read_only({name: asked.anchor[name] for name in names}, self.device)
        u, dual = self.held(asked, w, config)
        if asked.start_at == "own":  # else it has just been loaded
            self.load_block(u)
        room = Room(dual)
        for name, place in room.tensors.items():
            torch.div(dual[name], -asked.rho, out=place).add_(w[name])
        anchor = room.tensors or w
        metrics, kept = yield from self.local_step(asked, anchor, config)
        upload = self.arrays()
        moved = {name: upload[name] for name in asked.optimised}
        kept |= prefixed("u/", moved)
        new = read_only(moved, self.device)
        if asked.duals == "client":
            change, of_all = {name: new[name] - w[name] for name in w}, asked.averaging == "all"
            if of_all:  # z_i - z_i of before = (u - u before) + (u - w)
                change = {name: (new[name] - u[name]) + change[name] for name in w}
            sent = asked.averaged
            averaged = {name: array for name, array in upload.items() if name in sent}
            upload, share = self.clipped(averaged | to_numpy(change), sent, config)
            if share < 1:
                back = (1 - share) / (2 if of_all else 1)
                new = {name: array - back * change[name] for name, array in new.items()}
                kept |= to_numpy(new, "u/")
            changes = {name: upload[name] for name in change}
            whole, held_back = self.whole_change(changes, config, first=asked.begins)
            upload |= whole
            kept |= held_back
        for name, place in room.tensors.items():  # (12), where the anchor was
            torch.sub(new[name], w[name], out=place).mul_(asked.rho).add_(dual[name])
        kept |= prefixed(BUFFERS, self.buffers()) | prefixed("dual/", room.packed())
        if dual:
            kept[RHO] = np.array(asked.rho)
        self.memory.keep(config, kept, resent=self.is_resent(asked))
        return upload, metrics

    def local_step(
        self, asked: FedADMMInstruction, anchor: dict[str, Tensor], config: Scalars
    ) -> Steps[tuple[Scalars, Arrays]]:
        """Run u <- u - eta [grad f_i(u) + (rho/alpha_i) (u - anchor)]; return metrics, and v_i."""
        metrics = yield Minimisation(self.objective(asked, anchor), asked.lr, asked.local_epochs)
        return metrics, {}

    def objective(self, asked: Any, anchor: dict[str, Tensor]) -> LocalObjective:
        """Return alpha_i f_i(u) + (rho/2) ||u - anchor||^2."""
        term = ProximalTerm(FIXED_RHO if asked.wants_step_sum else asked.rho, anchor)
        return LocalObjective(
            [term],
            loss_weight=asked.loss_weight,
            moving=self.shared(asked),
            wants_step_sum=asked.wants_step_sum,
        )

    def is_resent(self, asked: FedADMMInstruction) -> bool:
        """Return whether the server has all that the client keeps."""
        return asked.duals == "strategy"

    def shared(self, asked: Any) -> list[str]:
        """Return the parameters that travel: u_i, and those that are averaged."""
        return self.trained_names()

    def receive(self, asked: Any, arrays: Arrays, config: Scalars) -> None:
        """Load the arrays of a message into the model."""
        self.load(arrays)

    def held(
        self, asked: Any, w: dict[str, Tensor], config: Scalars
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return u_i (w, if nobody needs it) and, where the client keeps or gets it, pi_i."""
        if asked.start is not None:
            u, dual = read_only(asked.start, self.device), _zeros(w)
        elif asked.dual is not None:
            u, dual = w, read_only(asked.dual, self.device) or _zeros(w)
        else:
            held = self.memory.require(config)
            dual = read_only(under("dual/", held), self.device)
            needed = asked.start_at == "own" or asked.duals == "client"
            u = read_only(under("u/", held), self.device) if needed else w
            if (rho := float(held.get(RHO, asked.rho))) != asked.rho:  # pi_i/rho is what stays
                dual = {name: array * (asked.rho / rho) for name, array in dual.items()}
        return u, dual if asked.duals == "client" or asked.start_at == "global" else {}

    def personal_arrays(self) -> Arrays:
        """Return u_i after the last training, a whole model; RuntimeError before the first."""
        latest = self.memory.latest()
        return self.model_arrays.complete(under(BUFFERS, latest) | under("u/", latest))


def _zeros(like: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(array) for name, array in like.items()}
