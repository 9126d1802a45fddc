"""Flower's example apps as they are, with FedAvg, and converted by our guide: accuracy by round.

Run with `python -m tests.benchmarks.converted_apps advanced-pytorch FedAvg FedADMM` in the
repository (long). Needs the apps in $FL_ADMM_APPS and the files of their data in $FL_ADMM_DATA.
Settings, clients a round and local work are the app's, and what the guide says; --rho gives FedADMM
a rho. A seed draws the initial model, the same for all methods, the clients and the batches;
--samples takes so many training images for all clients together, and less time. The clients'
accuracy is the mean over their test images. "FedAvg, one head" is the advanced example without the
last layers of its clients' own.
"""

from __future__ import annotations

import argparse
import logging
import random
import tempfile
import tomllib
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from difflib import unified_diff
from functools import partial
from io import StringIO
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import pytest
import torch
from flwr.app import MetricRecord
from flwr.server.history import History
from flwr.serverapp.strategy import Result

from tests.apps import conversions
from tests.apps.converted import run_app, swapped


@dataclass(frozen=True)
class App:
    """An app.

    Attributes
    ----------
    convert : callable
    package : str
    num_clients : int
    looks : tuple of int
        The rounds that are shown: the app's own number, and twice that.
    changes : dict
        What of the server's code says the seed, and when to evaluate.
    """

    convert: Callable[..., Path]
    package: str
    num_clients: int
    looks: tuple[int, int]
    changes: dict[str, str]


def of_our_own(model: str, rounds: int, *, legacy: bool = False) -> App:
    """Return an app of `tests/apps/own`."""

    def convert(to: Path, method: str | None, *, samples: int) -> Path:
        return conversions.own(to, model, method, legacy=legacy, rounds=2 * rounds)

    changes = {"local_epochs=1": "local_epochs=1, seed={seed}"}
    return App(convert, "own", 10, (rounds, 2 * rounds), changes)


FASTER = 0.03
"""A step size at which the Opacus example learns."""

CENTRAL = '        """Evaluate model on central data."""\n'
APPS = {
    "advanced-pytorch": App(
        conversions.advanced_pytorch,
        "pytorch_example",
        50,
        (10, 20),
        {
            "(\n        lr=0.1,": "(\n        seed={seed},\n        lr=0.1,",
            CENTRAL: CENTRAL + "        if server_round % 5:\n            return None\n",
        },
    ),
    "advanced-pytorch-plain": App(
        partial(conversions.advanced_pytorch, own_strategy=False),
        "pytorch_example",
        50,
        (10, 20),
        {
            "(\n        lr=lambda": "(\n        seed={seed},\n        lr=lambda",
            CENTRAL: CENTRAL + "        if server_round % 5:\n            return None\n",
        },
    ),
    "quickstart-jax": App(
        conversions.quickstart_jax,
        "jaxexample",
        10,
        (5, 10),
        {
            "(\n        lr=lr,": "(\n        seed={seed},\n        lr=lr,",
            "PRNGKey(0)": "PRNGKey({seed})",
            "num_rounds=num_rounds,\n": "num_rounds=num_rounds, evaluate_fn=jax_accuracy,\n",
            "# Create ServerApp\n": "from tests.apps.data import jax_accuracy\n",
        },
    ),
    "opacus": App(
        conversions.opacus,
        "opacus_fl",
        10,
        (3, 6),
        {"(\n        lr=0.001,": "(\n        seed={seed},\n        lr=0.001,"},
    ),
    "opacus-faster": App(
        partial(conversions.opacus, lr=FASTER),
        "opacus_fl",
        10,
        (3, 6),
        {f"(\n        lr={FASTER},": f"(\n        seed={{seed}},\n        lr={FASTER},"},
    ),
    "own-legacy": of_our_own("mlp", 30, legacy=True),
    "own-transformer": of_our_own("transformer", 30),
    "own-resnet": of_our_own("resnet", 10),
}
AS_IT_IS = ("FedAvg", "FedAvg, one head")


def run(app: App, method: str, seed: int, rho: float | None, samples: int) -> Result:
    """Run an app once; return what was measured."""
    results: list[Result] = []
    histories: list[History] = []

    def keeping(kind: type[Any], found: list[Any]) -> Callable[..., None]:
        plain = kind.__init__

        def kept(self: Any, *args: Any, **given: Any) -> None:
            plain(self, *args, **given)
            found.append(self)

        return kept

    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        folder = app.convert(Path(place), None if method in AS_IT_IS else method, samples=samples)
        server, client = (folder / app.package / f"{n}_app.py" for n in ("server", "client"))
        if method == "FedAvg, one head":
            line = "    load_layer_weights_from_state(context.state, model)\n"
            client.write_text(swapped(client.read_text(), {line: ""}))
        text = server.read_text()
        for words, new in app.changes.items():
            text = text.replace(words, new.format(seed=seed))
        if rho is not None:
            text = text.replace(f"seed={seed},", f"seed={seed}, rho={rho},", 1)
        server.write_text(text)
        project = tomllib.loads((folder / "pyproject.toml").read_text())
        config = project["tool"]["flwr"]["app"]["config"] | {"num-server-rounds": app.looks[-1]}
        patch.setattr(Result, "__init__", keeping(Result, results))
        patch.setattr(History, "__init__", keeping(History, histories))
        random.seed(seed)
        with redirect_stdout(StringIO()):
            run_app(folder, app.package, app.num_clients, config, patch, seed=seed)
    for history in histories:  # of the legacy API
        results.append(found := Result())
        for name, values in history.metrics_distributed.items():
            for server_round, value in values:
                metrics = found.evaluate_metrics_clientapp.setdefault(server_round, MetricRecord())
                metrics[name] = float(value)
    # The advanced example makes one of its own, beside the strategy's.
    return max(results, key=lambda result: len(accuracies(result, app.looks[-1])))


def lines_changed(app: App, method: str) -> tuple[int, int]:
    """Return how many lines of an app's code are new, and gone, blank ones aside."""
    with tempfile.TemporaryDirectory() as before, tempfile.TemporaryDirectory() as after:
        old, new = (
            {file.name: file.read_text() for file in (folder / app.package).glob("*.py")}
            for folder in (
                app.convert(Path(before), None, samples=1000),
                app.convert(Path(after), method, samples=1000),
            )
        )
    changes = [
        line[0]
        for name in old
        for line in unified_diff(old[name].splitlines(), new.get(name, "").splitlines(), n=0)
        if line[1:].strip() and not line.startswith(("+++", "---", "@@"))
    ]
    return changes.count("+"), changes.count("-")


def accuracies(result: Result, server_round: int) -> dict[str, float]:
    """Return what was measured after a round, in percent, on the server and by the clients."""
    found = {}
    for where, metrics in (
        ("server", result.evaluate_metrics_serverapp),
        ("clients", result.evaluate_metrics_clientapp),
    ):
        for name, value in metrics.get(server_round, {}).items():
            if "acc" in name:
                found[f"{where}: {name}"] = 100 * float(value)  # type: ignore[arg-type]
    return found


def main() -> None:
    """Print every round of each run, and a row of a table for each method."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("app", choices=APPS)
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rho", type=float)
    parser.add_argument("--samples", type=int, default=60_000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    app = APPS[given.app]
    rounds = range(1, app.looks[-1] + 1)
    added, gone = lines_changed(app, "FedADMM")
    print(f"lines changed: {added} new, {gone} gone", flush=True)
    for method in given.methods:
        runs = []
        for seed in range(given.first_seed, given.first_seed + given.seeds):
            result = run(app, method, seed, given.rho, given.samples)
            runs.append([accuracies(result, server_round) for server_round in rounds])
            for kind in runs[-1][-1]:
                series = [round(found.get(kind, 0), 1) for found in runs[-1]]
                print(f"{method}, seed {seed}, {kind}: {series}", flush=True)
        for kind in runs[0][-1]:
            cells = [[found[look - 1][kind] for found in runs] for look in app.looks]
            shown = " | ".join(f"{mean(c):.1f} ± {pstdev(c):.1f}" for c in cells)
            print(f"| {method} | {kind} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
