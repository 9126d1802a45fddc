"""The files of a run: strict JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_json

from fl_admm_strategies.runtime.record import Traffic
from fl_admm_strategies.runtime.saving.files import replacing

from ..problems.scores import Metric, ModelScores, ScoreSummary


def row_of(method: str, kind: str) -> str:
    """Return the title of a baseline's row."""
    return f"{method}: {kind}"


@dataclasses.dataclass(frozen=True)
class Result:
    """What came out of a run, as plain data.

    Attributes
    ----------
    experiment : str
        Name of the experiment.
    algorithm : str
        Name of the method, spelled as in ``published``.
    data : str
        What the data set says it is; a stand-in says so.
    metric : Metric
        What ``models`` measures.
    models : mapping of str to ScoreSummary
        For each kind of model, such as "personal model", its score.
    traffic : mapping of int to Traffic
        Bytes of arrays that each round moved; round 0 is a handshake.
    seconds : float
        Duration of the run; of one that was resumed, since then.
    rounds : int
        Number of rounds.
    engine : str
        What ran the clients: "ray", "inprocess" or "deployment".
    seed : int
        Seed of the run.
    published : mapping of str to mapping of str to float
        For each published method its row: some of the metric's column, `COLUMNS`, and their
        deviations over the paper's seeds, as ``NAME-std``. Shares are in percent.
    cells : mapping of str to mapping of str to (float or None)
        Further cells of its rows, and further rows; see `ReportContent`.
    baselines : mapping of str to ModelScores
        By name, the methods that were run here on the same data for comparison.
    new_clients : mapping of str to ModelScores
        Of the clients that were held out of the run, by what they did after it.
    legend, extra
        As in `ReportContent`.
    """

    experiment: str
    algorithm: str
    data: str
    metric: Metric
    models: Mapping[str, ScoreSummary]
    traffic: Mapping[int, Traffic]
    seconds: float
    rounds: int
    engine: str
    seed: int
    published: Mapping[str, Mapping[Any, float]]
    cells: Mapping[str, Mapping[str, float | None]] = dataclasses.field(default_factory=dict)
    baselines: Mapping[str, ModelScores] = dataclasses.field(default_factory=dict)
    new_clients: Mapping[str, ModelScores] = dataclasses.field(default_factory=dict)
    legend: Sequence[str] = ()
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def total_traffic(traffic: Mapping[int, Traffic]) -> dict[str, float]:
    """Sum up bytes of arrays: in all, and per round of training (without a handshake)."""
    rounds = [moved for server_round, moved in traffic.items() if server_round > 0]
    return {
        "down": sum(moved.down for moved in traffic.values()),
        "up": sum(moved.up for moved in traffic.values()),
        "down_per_round": sum(moved.down for moved in rounds) / max(len(rounds), 1),
        "up_per_round": sum(moved.up for moved in rounds) / max(len(rounds), 1),
    }


def as_json(value: Any, indent: int | None = None) -> str:
    """Return a value as strict JSON, where numbers that are not finite are null.

    Dataclasses and mappings become objects, arrays, sets and sequences lists, paths strings.

    Raises
    ------
    PydanticSerializationError
        If the value is of no such kind.
    """
    return to_json(value, indent=indent, inf_nan_mode="null", fallback=_plain).decode()


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"cannot write a {type(value).__name__} ({value!r}) as JSON.")


def write_result(path: str | Path, result: Result) -> None:
    """Write a result as strict JSON, two spaces deep.

    The fields are those of `Result`, but the metric is its key, the traffic is summed up, and the
    fields of ``extra`` stand beside the others.
    """
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    extra = fields.pop("extra")
    del fields["legend"]
    fields |= {"metric": result.metric.key, "traffic": total_traffic(result.traffic)}
    write_text(Path(path), as_json(fields | extra, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file, as a whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, as a whole or not at all."""
    with replacing(path) as part:
        part.write_bytes(content)
