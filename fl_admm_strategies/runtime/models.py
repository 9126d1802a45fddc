"""What a run leaves behind: its models, by client and by cluster, and as safetensors files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import MessageType
from flwr.common import log

from ..maths.blocks import Arrays
from ..maths.checks import listing
from .algorithm import FINETUNED, Algorithm, OnClient
from .messages.records import COLLECT, ClientInstruction, RawReply, Scalar, from_array_record
from .messages.stamp import made_by
from .run import Exchange, Run
from .saving.files import DamagedFileError, read_arrays, replacing, write_arrays

FOLDER = "models"
"""Of the models in a results folder."""

MANIFEST = "models.json"
"""Which models are in a folder."""
FINE_TUNE = OnClient("Fine-tune the global model there: clients.personalise(...).")


@dataclass(frozen=True, repr=False)
class Models:
    """The models of a run, each with the names of the initial arrays.

    Attributes
    ----------
    method : str
        The strategy's class.
    global_ : Arrays or None
        The model of all clients; None where the method has none. Where clients keep a part of it,
        as in `FedAPM`, it is the part that they share.
    personal : dict of int to Arrays
        By client.
    clusters : dict of int to Arrays
        By cluster; 1 is the largest, as in the report and its pictures.
    cluster_of : dict of int to int
        The cluster of every client.
    absent : str
        Where there are no personal models, why, and how to get them.
    """

    method: str
    global_: Arrays | None = None
    personal: Mapping[int, Arrays] = field(default_factory=dict)
    clusters: Mapping[int, Arrays] = field(default_factory=dict)
    cluster_of: Mapping[int, int] = field(default_factory=dict)
    absent: str = ""

    def __post_init__(self) -> None:
        if not self.personal and not self.absent:
            raise ValueError("There are no personal models: say why, as `absent`.")

    def __repr__(self) -> str:
        return (
            f"<models of {self.method}: {len(self.personal)} personal, {len(self.clusters)} of "
            f"clusters, {0 if self.global_ is None else 1} global>"
        )

    def named(self) -> dict[str, Arrays]:
        """Return all models by their file's name: ``global``, ``cluster-1``, ``client-3``."""
        found = {} if self.global_ is None else {"global": self.global_}
        found |= {f"cluster-{number}": model for number, model in self.clusters.items()}
        return found | {f"client-{client}": model for client, model in self.personal.items()}

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write every model to ``NAME.safetensors`` in a folder; return the files.

        Each file names its model, so that none passes for another. Models of the same names that
        are there are replaced.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        models = self.named()
        files = {name: _file(path, name) for name in models}
        for name, arrays in models.items():
            write_arrays(files[name], arrays, {"method": self.method, "model": name})
        manifest = {
            "method": self.method,
            "absent": self.absent,
            "models": list(models),
            "cluster-of": self.cluster_of,
        }
        with replacing(path / MANIFEST) as part:
            part.write_text(json.dumps(manifest, indent=1))
        return list(files.values())


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"


def load_models(folder: str | os.PathLike[str]) -> Models:
    """Read the models that `Models.save` wrote, or those in the results folder of an experiment.

    Raises
    ------
    FileNotFoundError
        If there are none.
    DamagedFileError
        If a file is missing, is another model's, or is not as it was written.
    """
    path = Path(folder)
    path = path / FOLDER if (path / FOLDER).is_dir() else path
    try:
        content = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"There are no models in {path}, expected {MANIFEST} and the files that it lists. Give "
            "the folder of Models.save, or that of a run's results."
        ) from None
    try:
        manifest = json.loads(content)
        names = [str(name) for name in manifest["models"]]
        cluster_of = {int(client): int(k) for client, k in manifest["cluster-of"].items()}
        method, absent = str(manifest["method"]), str(manifest["absent"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedFileError(f"{path / MANIFEST} cannot be read: {error!r}") from error
    models = {name: _read_model(_file(path, name), name, method) for name in names}

    def of_kind(kind: str) -> dict[int, Arrays]:
        prefix = f"{kind}-"
        found = {int(n.removeprefix(prefix)): a for n, a in models.items() if n.startswith(prefix)}
        return dict(sorted(found.items()))

    cluster_of = dict(sorted(cluster_of.items()))
    return Models(
        method, models.get("global"), of_kind("client"), of_kind("cluster"), cluster_of, absent
    )


def _read_model(file: Path, name: str, method: str) -> Arrays:
    try:
        arrays, metadata = read_arrays(file)
    except DamagedFileError as error:
        raise DamagedFileError(f"{file}: {error}") from error
    if metadata != {"method": method, "model": name}:
        raise DamagedFileError(
            f"{file} holds {metadata}, expected the model {name!r} of {method}. Save the models "
            "again, or put the file back."
        )
    return arrays


def model_here(algorithm: Algorithm, kind: str, client_id: int) -> Arrays:
    """Return a client's model of a kind; the errors are those of `model_arrays`."""
    name, members = type(algorithm).__name__, algorithm.run.membership
    if client_id not in members:
        raise KeyError(f"There is no client {client_id}; the run knows {listing(members.ids)}.")
    if kind not in algorithm.kinds:
        raise ValueError(f"{name} has no {kind} models, expected one of {list(algorithm.kinds)}.")
    model = FINE_TUNE if kind == FINETUNED else algorithm.model(kind, client_id)
    if isinstance(model, OnClient):
        raise RuntimeError(f"The {kind} models of {name} stay with their clients. {model.how}")
    return model


def gather(strategy: Any, collected: Mapping[int, Arrays] | None) -> Models:
    """Put a strategy's models together.

    Parameters
    ----------
    strategy : StatefulStrategy
    collected : mapping of int to Arrays or None
        Personal models that the clients sent; None where they were not asked.
    """
    method, kinds, client_ids = type(strategy).__name__, strategy.kinds, strategy.client_ids

    def model(kind: str, client: int) -> Arrays:
        return from_array_record(strategy.model_arrays(kind, client))

    shared = model("global", client_ids[0]) if "global" in kinds else None
    personal: dict[int, Arrays] = {}
    used = "the global one" if "global" in kinds else "its cluster's"
    absent = f"{method} has no personal models: every client's is {used}."
    if FINETUNED in kinds:
        absent = f"The fine-tuned models of {method} stay with their clients. {FINE_TUNE.how}"
    if "personal" in kinds:
        first = strategy.model("personal", client_ids[0])
        if not isinstance(first, OnClient):
            personal = {client: model("personal", client) for client in client_ids}
        elif collected is None:
            absent = (
                f"The personal models of {method} stay with their clients. {first.how} Or start "
                "the run with collect=True, and they are sent at its end."
            )
        else:
            # A model of other arrays altogether, such as users' factors, is whole as it is.
            whole, rest = set(strategy.run.layout.given), shared or {}
            personal = {
                client: {**rest, **arrays} if arrays.keys() <= whole else arrays
                for client, arrays in collected.items()
            }
            absent = "No client sent its personal model; the warnings of the run say why."
    clusters: dict[int, Arrays] = {}
    cluster_of: dict[int, int] = {}
    if (labels := strategy.clusters()) is not None:
        records = strategy.cluster_arrays()
        groups = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        # The largest first, those of one size by their first client.
        for number, rows in enumerate(sorted(groups, key=lambda g: (-len(g), g[0])), start=1):
            members = [client_ids[int(row)] for row in rows]
            clusters[number] = from_array_record(records[int(labels[rows[0]])])
            cluster_of |= dict.fromkeys(members, number)
    absent = "" if personal else absent
    return Models(method, shared, personal, clusters, dict(sorted(cluster_of.items())), absent)


def collect_personal(run: Run, exchange: Exchange) -> dict[int, Arrays] | None:
    """Ask all clients for the personal models that stay with them; None where none do.

    Who does not send a usable one is named in a warning, and missing.
    """
    algorithm, clients = run.algorithm, run.membership.ids
    method, personal = algorithm.method, "personal" in algorithm.kinds
    if not personal or not isinstance(algorithm.model("personal", clients[0]), OnClient):
        return None
    config: dict[str, Scalar] = {"server-round": run.last_round, COLLECT: True}
    stamped = config if method is None else {**made_by(method), **config}
    messages = dict.fromkeys(clients, ClientInstruction({"personal": {}}, stamped))
    found: dict[int, Arrays] = {}
    reasons = dict.fromkeys(clients, "it did not answer")
    for client, raw in exchange(messages, MessageType.TRAIN):
        if client is None or client not in reasons:
            continue
        if reason := _fault(raw):
            reasons[client] = reason
        else:
            del reasons[client]
            found[client] = run.layout.complete(dict(raw.arrays or {}))
    for client, reason in sorted(reasons.items()):
        log(WARNING, "The personal model of client %s is missing: %s", client, reason)
    return dict(sorted(found.items()))


def _fault(raw: RawReply) -> str:
    """Return what is wrong with a collected model; empty if nothing is."""
    if raw.error is not None:
        return raw.error
    if not raw.arrays:
        return "it sent no arrays"
    for name, array in raw.arrays.items():
        if array.dtype.kind not in "biuf" or not np.isfinite(array).all():
            return f"its '{name}' holds NaN, infinity or no numbers"
    return ""
