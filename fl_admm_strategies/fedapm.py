"""FedAPM: a model that is partly shared and partly every client's own, by inexact consensus ADMM.

Every client first moves its personal parameters v_i, then its copy u_i of the shared ones; only the
latter travel. It is FedADMM with a step on v_i in front.

Zhu, Nie, Zeng, Wang, Sun, Yao, Chen, Xu, Yang, "FedAPM: Federated Learning via ADMM with Partial
Model Personalization", KDD 2025: Algorithm 1, equations (8) to (16). The client's half is
`clients.FedAPMClient`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from .blocks import Spec, compile_pattern, matching, optimised, spec_of
from .checks import check_choice, check_count, check_fraction, check_not_negative, check_positive
from .fedadmm import FedADMM
from .wire import Arrays, Order, Scalar


class FedAPM(FedADMM):
    """Federated learning with partial model personalisation by inexact ADMM (FedAPM).

    Parameters
    ----------
    personal : str or None
        Regular expression searched in the names of the arrays: v_i, which stays with the clients
        and may have other shapes on each of them. `clients.input_layers`, `output_layers` and
        `split_input` write it for the paper's three kinds of personalisation. None: nothing is
        personal, which is `FedADMM`.
    sigma : float (default: 0.01)
        sigma_i, the weight of the proximal term of the v-step; 0 switches it off. The descent of
        the augmented Lagrangian needs sigma > 8/15 rho (Lemma 5).
    personal_epochs : int (default: 3)
        E_v, local epochs of the v-step. `local_epochs` is E_u.
    u_start : {"local", "server"} (default: "local")
        Whether both steps of a client begin at its own u_i (Algorithm 1), or at the server's w as
        FedAlt's do. With the duals in the strategy "server" sends w beside the anchor, twice the
        bytes.
    tolerance : float, optional
        xi_i^0: the u-step takes full-gradient steps until the accuracy test (16) holds, in place of
        `local_epochs`. The descent holds from the first round on if it is at least
        ||alpha_i grad_u f_i(v_i^0, w^0)||^2 (specs 3.4, C1).
    tolerance_decay : float (default: 0.9)
        mu_i: xi_i <- mu_i xi_i in every round of client i, the first included (10).
    max_steps : int (default: 1000)
        Steps after which the accuracy test is given up; the clients' metric ``residual`` tells.
    **fedadmm
        The other parameters of `FedADMM`: `rho`, `lr`, `local_epochs`, `weights`, `duals`,
        `averaged`; and those of `StatefulStrategy`.

    Notes
    -----
    The initial arrays are a whole model, any client's: they say which arrays are shared, and start
    them. v_i^0 is what the client's own model holds when it is built. `global_model` has the shared
    arrays only, since nobody but the clients has the others. Clients that come and go: as with
    `FedADMM`; a new one brings its own v_i.

    Examples
    --------
    >>> strategy = FedAPM(output_layers(model, 1), rho=0.01, lr=0.1, fraction_train=0.3)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=300)
    """

    def __init__(
        self,
        personal: str | None,
        *,
        sigma: float = 0.01,
        personal_epochs: int = 3,
        u_start: Literal["local", "server"] = "local",
        tolerance: float | None = None,
        tolerance_decay: float = 0.9,
        max_steps: int = 1000,
        **fedadmm: Any,
    ) -> None:
        super().__init__(**fedadmm)
        self._personal = compile_pattern("personal", personal)
        check_not_negative("sigma", sigma)
        check_count("personal_epochs", personal_epochs, least=1)
        check_choice("u_start", u_start, ("local", "server"))
        if tolerance is not None:
            check_positive("tolerance", tolerance)
        check_fraction("tolerance_decay", tolerance_decay, zero=False)
        check_count("max_steps", max_steps, least=1)
        self.personal = personal
        self.sigma = sigma
        self.personal_epochs = personal_epochs
        self.u_start = u_start
        self.tolerance = tolerance
        self.tolerance_decay = tolerance_decay
        self.max_steps = max_steps
        self._shared: Spec = {}

    def hyperparameters(self) -> dict[str, Any]:
        """Return the settings for the log."""
        settings = {
            "Personal": self.personal,
            "sigma": self.sigma,
            "Personal epochs": self.personal_epochs,
            "u_start": self.u_start,
        } | super().hyperparameters()
        if self.tolerance is not None:
            settings["Local epochs"] = "until the tolerance is met"
            settings["Tolerance"] = f"{self.tolerance} * {self.tolerance_decay}^k"
            settings["Steps at most"] = self.max_steps
        return settings

    def init_state(self, arrays: Arrays) -> None:
        """Start FedADMM's state for the shared arrays alone."""
        if self._personal is not None:
            # Of what is optimised something must be personal and something shared.
            matching("personal", self._personal, optimised(arrays, self._averaged))
            arrays = {n: a for n, a in arrays.items() if not self._personal.search(n)}
        self._shared = spec_of(arrays)
        super().init_state(arrays)

    def reply_spec(self) -> Spec:
        """Return the shared arrays' names, shapes and dtypes."""
        return self._shared

    def _order(self, client: int) -> Order:
        order = super()._order(client)
        if self.u_start == "server" and self.duals == "strategy":
            order.groups["start"] = self._block.arrays(self.consensus.w)
        return order

    def _settings(self, alpha: float) -> dict[str, Scalar]:
        settings = super()._settings(alpha) | {
            "sigma": float(self.sigma),
            "personal-epochs": int(self.personal_epochs),
        }
        if self.personal is not None:
            settings["personal"] = self.personal
        if self.u_start == "server" and self.duals == "client":
            settings["start"] = "center"
        if self.tolerance is not None:
            settings |= {
                "tolerance": float(self.tolerance),
                "tolerance-decay": float(self.tolerance_decay),
                "max-steps": int(self.max_steps),
            }
        return settings

    def evaluate_orders(self, server_round: int, client_ids: Sequence[int]) -> dict[int, Order]:
        """Send everybody w, and u_i to whom may not hold it; v_i is with the clients."""
        model = self.global_model()
        orders = {}
        for client in client_ids:
            groups = {"global": model}
            if (start := self._start(client)) is not None:
                groups["start"] = self._block.arrays(start)
            alpha = float(self.alpha[self._index[client]])
            orders[client] = Order(groups, self._settings(alpha))
        return orders

    def personal_model(self, client_id: int) -> Arrays:
        """Raise RuntimeError: v_i is not here, unless nothing is personal."""
        if self.personal is None:
            return super().personal_model(client_id)
        raise RuntimeError(
            "The clients' own parameters stay with them: read FedAPMClient(...).personal_arrays() "
            "there. global_arrays has the shared ones."
        )
