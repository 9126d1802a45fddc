"""FedAPM's report: what the clients share, and what stays with them."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from .base import Finished, MethodReport, Report


class FedAPMReport(MethodReport):
    """How many parameters are shared, and how far the clients' copies of them are apart."""

    def report(self, run: Finished) -> Report:
        """Say what stayed with the clients, and in two sentences what came out."""
        strategy, arrays = run.strategy, run.arrays.items()
        sizes = {name: array.numpy().size for name, array in arrays}
        shared = sum(sizes[name] for name in strategy.upload_spec())
        total = sum(sizes.values())
        legend = ["Personal model: a client's own part with its own copy of the shared one."]
        extra: dict[str, Any] = {"shared": shared, "personal": total - shared}
        if (residual := strategy.round_metrics().get("primal-residual")) is not None:
            legend.append(
                f"Primal residual: {residual:.4g}, the mean distance of the participants' copies "
                "from the shared part that they got, in the last round."
            )
            extra["primal_residual"] = residual
        text = Text.assemble(
            (
                f"FedAPM trained a model for each of {run.problem.num_clients} clients: "
                f"{shared:,} of its {total:,} parameters they share",
                "bold",
            ),
            ", the others never leave their client.\n",
            f"Mean {run.problem.metric.measure}: ",
            (run.mean("personal"), "bold"),
            " with a client's own copy of the shared part, ",
            (run.mean("global"), "bold"),
            " with the shared part itself.",
        )
        return Report(legend=tuple(legend), body=(text,), extra=extra)
