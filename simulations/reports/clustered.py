"""The report of the methods with one model for every cluster, and what FPFC's says like it."""

from __future__ import annotations

import numpy as np
from rich.text import Text

from fl_admm_strategies import IFCA

from ..methods.measures import clustering
from .base import NONE, Finished, MethodReport, Report


class ClusteredReport(MethodReport):
    """The clusters that were found, beside the true ones."""

    def report(self, run: Finished) -> Report:
        """Report how many clusters there are, which, and how good their models are."""
        found = clustering(run.problem, run.strategy)
        ari = found.get("ari")
        unknown = f" ({NONE}: truth unknown)." if ari is None else "."
        return Report(
            legend=(f"Num: clusters found. {ARI}{unknown}",),
            body=(groups_found(run, found["num"], ari, ["cluster"]),),
            extra={"clustering": found, "clusters": run.strategy.clusters()},
        )


ARI = "ARI: 1 = the true clusters, 0 = chance"
_MODELS = {
    "personal": "with the clients' own models",
    "cluster": "with their cluster's",
    "global": "with one model for all (their mean)",
}


def groups_found(run: Finished, num: float | None, ari: float | None, kinds: list[str]) -> Text:
    """Return two sentences on the outcome, for a reader who has not read the paper."""
    truth = ""
    if ari == 1:
        truth = f", exactly the true one{'' if num == 1 else 's'}"
    elif ari is not None:
        num_true = len(np.unique(run.problem.data.true_clusters))
        truth = f"; there are {num_true} true ones (ARI {ari:.2f}; 1 is a perfect match)"
    malicious = len(run.problem.malicious)
    clients = f"{run.problem.num_clients - malicious}{' honest' if malicious else ''} clients"
    told = "was told" if isinstance(run.strategy, IFCA) else "was not told"
    means: list[str | tuple[str, str]] = []
    for kind in kinds:
        means += [", " if means else "", (run.mean(kind), "bold"), f" {_MODELS[kind]}"]
    return Text.assemble(
        (
            f"{run.strategy.title} found {num} group{'' if num == 1 else 's'} among {clients}",
            "bold green",
        ),
        f"{truth}. It {told} how many there are.\n",
        f"Mean {run.problem.metric.measure}: ",
        *means,
        ".",
    )
