"""FLAME's report: personal, global and hybrid models, and how fair each kind is."""

from __future__ import annotations

import numpy as np
from rich.text import Text

from .base import NONE, Finished, MethodReport, Report
from .table import small_table


class FLAMEReport(MethodReport):
    """The spread of the clients' test losses, and which model they prefer."""

    def report(self, run: Finished) -> Report:
        """Report how fair each kind of model is, and which one the clients prefer."""
        strategy, clients = run.strategy, run.clients.values()
        fairness = {
            title: _fairness([reported[f"{kind}-loss"] for reported in clients])
            for kind, title in strategy.kinds.items()
            if all(f"{kind}-loss" in reported for reported in clients)
        }
        headers = ("Mean", "Variance", "Sample variance")
        table = small_table("Fairness: the test loss of the clients", "Model", *headers)
        for title, values in fairness.items():
            row = [values["mean"], values["variance"], values["sample_variance"]]
            table.add_row(title, *(NONE if v is None else f"{v:.4g}" for v in row))
        return Report(
            legend=(
                "Hybrid: each client takes the better of its personal and the global model. Chosen "
                "on the test data, as in the paper's table, it is too good to be true.",
                f"a = λ/m is {strategy.lam / run.problem.num_clients:g} and ρ is "
                f"{strategy.penalty:g}; at ρ = a the server averages the personal models.",
            ),
            body=(table, _summary(run)),
            extra={"fairness": fairness},
        )


def _summary(run: Finished) -> Text:
    """Return two sentences on the outcome, for a reader who has not read the paper."""
    titles, clients = run.strategy.kinds, run.clients
    by = "val" if titles["hm-val"] in run.scores.models else "oracle"
    personal = sum(reported[f"hm-{by}-personal"] for reported in clients.values())
    where = "validation" if by == "val" else "test"
    return Text.assemble(
        (f"FLAME trained one model for each of {run.problem.num_clients} clients", "bold"),
        " and one for all of them.\n",
        f"Mean {run.problem.metric.measure}: ",
        (run.mean("personal"), "bold"),
        " with the clients' own models, ",
        (run.mean("global"), "bold"),
        f" with the one for all. On their {where} data {personal:.0f} of {len(clients)} "
        "clients do better with their own; ",
        (run.mean(f"hm-{by}"), "bold"),
        " if everybody takes the one that does better there.",
    )


def _fairness(losses: list[float]) -> dict[str, float | None]:
    """Return mean and variances of the clients' test losses (docs/methods/flame-notes.md, P14)."""
    return {
        "mean": float(np.mean(losses)),
        "variance": float(np.var(losses)),
        "sample_variance": float(np.var(losses, ddof=1)) if len(losses) > 1 else None,
    }
