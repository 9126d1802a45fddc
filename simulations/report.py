"""What every run says about itself: its files, and its table beside the published numbers.

Everything here takes plain numbers and knows no algorithm by name; what is particular to one comes
as a `Report`.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import ArrayLike
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fl_admm_strategies.runtime.strategy import Traffic

NONE = "–"


@dataclasses.dataclass(frozen=True)
class Metric:
    """What heads the results: a number per client and model, or one of the whole federation.

    Attributes
    ----------
    key : str
        Its name in the clients' metrics, ``KIND-KEY``, and in ``result.json``.
    published : str
        Its column in the published rows.
    header : str
        Of the table's column.
    measure : str
        What it is, in the middle of a sentence, e.g. "test accuracy".
    legend : str
        What the header stands for, under the table.
    axis : str
        Name and unit at the plot's axis.
    percent : bool
        A share of 1 that is shown in percent; published values are in percent then.
    higher_is_better : bool
        Which end is the best.
    digits : int
        Decimals in the table.
    """

    key: str
    published: str
    header: str
    measure: str
    legend: str
    axis: str
    percent: bool = False
    higher_is_better: bool = False
    digits: int = 2

    @property
    def scale(self) -> int:
        """The factor between a value and what is shown."""
        return 100 if self.percent else 1

    def text(self, value: float, *, unit: bool = False) -> str:
        """Write a value as the table and the sentences have it."""
        if not math.isfinite(value):
            return "NaN"
        if self.percent:
            return f"{100 * value:.{self.digits}f}{' %' if unit else ''}"
        return f"{value:.3g}" if abs(value) >= 1000 else f"{value:.{self.digits}f}"


METRICS = {
    metric.key: metric
    for metric in (
        Metric(
            key="accuracy",
            published="acc",
            header="Acc %",
            measure="test accuracy",
            legend="Acc: test accuracy, mean over clients.",
            axis="mean test accuracy of the clients (%)",
            percent=True,
            higher_is_better=True,
        ),
        Metric(
            key="rmse",
            published="rmse",
            header="RMSE",
            measure="test error (RMSE)",
            legend="RMSE: test error in the target's unit, mean over clients.",
            axis="mean test RMSE",
        ),
        Metric(
            key="objective",
            published="objective",
            header="Objective",
            measure="objective",
            legend="Objective: the function that is minimised, on the training data.",
            axis="objective",
            digits=4,
        ),
    )
}
"""The metrics there are; `dataclasses.replace` makes a variant, e.g. with more digits."""


@dataclasses.dataclass(frozen=True)
class Score:
    """A metric over the clients, one value each.

    Attributes
    ----------
    mean : float
        Unweighted mean over the clients, as FPFC's tables have it; or the one value of a metric
        that belongs to the whole federation.
    std : float or None
        Standard deviation over the clients (of this run; published ± are over random seeds).
    worst : float or None
        Mean over the worst tenth of the clients, rounded up to whole clients.
    best : float or None
        Mean over the best tenth of the clients, rounded up to whole clients.
    """

    mean: float
    std: float | None = None
    worst: float | None = None
    best: float | None = None


class Column(NamedTuple):
    """A column of the results table beside the metric."""

    header: str
    digits: int | None
    """Decimals; None writes a count in full, from a million on as 7.33e7."""
    percent: bool = False
    """A share of 1 that is shown in percent; published values are in percent then."""


# In the order of the table.
COLUMNS = {
    "num": Column("Num", 2),
    "ari": Column("ARI", 2),
    "f1": Column("F1 %", 2, percent=True),
    "auc": Column("AUC %", 2, percent=True),
    "cr": Column("CR", 1),
    "time": Column("Time s", 2),
    "cost": Column("Cost", None),
}


@dataclasses.dataclass(frozen=True)
class Report:
    """What an algorithm adds to the report of its run. All of it may be empty.

    Attributes
    ----------
    cells : mapping of str to mapping of str to (float or None)
        Further cells of the results table by row and column (a key of `COLUMNS`), as they are to be
        shown: shares in percent. A row with the title of a model is that model's, any other is
        added below; None shows as unknown. Metrics of the clients with the name of a column need
        not be given: their means are there (`column_means`).
    note : str
        Ends the line with the number of rounds under the table.
    legend : sequence of str
        Lines under the table that explain the cells.
    body : sequence of renderables
        Shown under the table with a blank line between them: tables of the algorithm's own, and as
        the last the sentences that say what came out to somebody who has not read the paper.
    files : mapping of str to str
        The files that the algorithm wrote into the run's folder, and what each shows.
    extra : mapping of str to Any
        Further fields of ``result.json``; see `plain` for what the values may be.
    """

    cells: Mapping[str, Mapping[str, float | None]] = dataclasses.field(default_factory=dict)
    note: str = ""
    legend: Sequence[str] = ()
    body: Sequence[RenderableType] = ()
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Result:
    """What came out of a run, as plain data.

    Attributes
    ----------
    experiment : str
        Name of the experiment.
    algorithm : str
        Name of the algorithm, spelled as in ``published``.
    data : str
        What the data set says it is; a stand-in says so.
    metric : Metric
        What ``models`` measures.
    models : mapping of str to Score
        For each kind of model, such as "personal model", its score.
    traffic : mapping of int to Traffic
        Bytes of arrays that each round moved; round 0 is the hand-shake.
    seconds : float
        Duration of the run.
    rounds : int
        Number of rounds.
    engine : str
        What ran the clients: "ray", "inprocess" or "deployment".
    seed : int
        Seed of the run.
    published : mapping of str to mapping of str to float
        For each published method its row: some of the metric's column, `COLUMNS`, and their
        deviations over the paper's seeds, as ``NAME_std``. Shares are in percent.
    baselines : mapping of str to Score
        The methods that were run here on the same data for comparison.
    cells, note, legend, extra
        As in `Report`; the cells are also those of the baselines.
    """

    experiment: str
    algorithm: str
    data: str
    metric: Metric
    models: Mapping[str, Score]
    traffic: Mapping[int, Traffic]
    seconds: float
    rounds: int
    engine: str
    seed: int
    published: Mapping[str, Mapping[str, float]]
    baselines: Mapping[str, Score] = dataclasses.field(default_factory=dict)
    cells: Mapping[str, Mapping[str, float | None]] = dataclasses.field(default_factory=dict)
    note: str = ""
    legend: Sequence[str] = ()
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {self.metric.published, *COLUMNS}
        known |= {f"{name}_std" for name in known}
        for method, row in self.published.items():
            if unknown := set(row) - known:
                raise ValueError(
                    f"the published row {method!r} has {sorted(unknown)}; for the metric "
                    f"{self.metric.key!r} it may have {sorted(known)}."
                )
        for name, cells in self.cells.items():
            if unknown := set(cells) - set(COLUMNS):
                raise ValueError(
                    f"row {name!r} has {sorted(unknown)}; the table's columns are {list(COLUMNS)}."
                )


def score(values: ArrayLike, metric: Metric) -> Score:
    """Summarise one value per client.

    Parameters
    ----------
    values : array_like of shape (m,)
        The metric of each client. A value that is not finite counts as a worst one, and makes the
        mean not finite.
    metric : Metric
        Says which end is the worst: low accuracy, high error.

    Returns
    -------
    Score
        Mean and spread over the clients, and the means of the worst and the best tenth.

    Raises
    ------
    ValueError
        If there is no client.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"values has shape {array.shape}; give one value per client, shape (m,).")
    sign = -1.0 if metric.higher_is_better else 1.0
    # An infinite accuracy is no good news: everything that is not finite sorts last, as NaN does.
    finite = np.where(np.isfinite(array), array, np.nan)
    from_best = sign * np.sort(sign * finite)
    tenth = math.ceil(len(array) / 10)
    return Score(
        mean=float(finite.mean()),
        std=float(finite.std()),
        worst=float(from_best[-tenth:].mean()),
        best=float(from_best[:tenth].mean()),
    )


def plain(value: Any) -> Any:
    """Return a value as what strict JSON can hold.

    Dataclasses and mappings become dictionaries, arrays and sequences lists, numpy scalars numbers,
    paths strings. Numbers that are not finite become None: JSON has no NaN.

    Raises
    ------
    TypeError
        If the value is of no such kind.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(entry) for entry in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(
        f"cannot write a {type(value).__name__} ({value!r}) as JSON; give numbers, strings, "
        "mappings, sequences, arrays or dataclasses of these."
    )


def write_metrics_line(file: TextIO, record: Mapping[str, Any]) -> None:
    """Append one round to ``metrics.jsonl`` and flush it, so that a killed run keeps its rounds.

    Parameters
    ----------
    file : TextIO
        The open file.
    record : Mapping[str, Any]
        ``{"round": int, "train": {...}, "evaluate": {...}, "clients": {...}}``; see `plain` for
        what the values may be.
    """
    file.write(json.dumps(plain(record), allow_nan=False) + "\n")
    file.flush()


def column_means(clients: Iterable[Mapping[str, float]], kind: str) -> dict[str, float]:
    """Return the mean over the clients of every metric ``KIND-COLUMN``, as the table shows it.

    Parameters
    ----------
    clients : iterable of mapping of str to float
        What every client reported; a metric counts where all of them have it.
    kind : str
        The kind of model.
    """
    everybody = list(clients)
    return {
        key: float(np.mean([own[f"{kind}-{key}"] for own in everybody]))
        * (100 if column.percent else 1)
        for key, column in COLUMNS.items()
        if everybody and all(f"{kind}-{key}" in own for own in everybody)
    }


def write_result(path: str | Path, result: Result) -> None:
    """Write a result as strict JSON, two spaces deep.

    The fields are those of `Result`, but the metric is its key, the traffic is summed up, and the
    fields of ``extra`` stand beside the others.
    """
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    extra = fields.pop("extra")
    del fields["note"], fields["legend"]
    fields |= {"metric": result.metric.key, "traffic": _traffic(result.traffic)}
    text = json.dumps(plain(fields | extra), allow_nan=False, indent=2, ensure_ascii=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


def _traffic(traffic: Mapping[int, Traffic]) -> dict[str, float]:
    """Sum up bytes of arrays: in all, and per round of training (without the hand-shake)."""
    rounds = [moved for server_round, moved in traffic.items() if server_round > 0]
    return {
        "down": sum(moved.down for moved in traffic.values()),
        "up": sum(moved.up for moved in traffic.values()),
        "down_per_round": sum(moved.down for moved in rounds) / max(len(rounds), 1),
        "up_per_round": sum(moved.up for moved in rounds) / max(len(rounds), 1),
    }


def results_table(result: Result) -> Group:
    """Lay out a run's results, with the published ones under a rule.

    Parameters
    ----------
    result : Result
        What came out of the run.

    Returns
    -------
    rich.console.Group
        The table and what it means; fits a terminal of 80 columns.
    """
    metric = result.metric
    table = Table(
        # Text, not str: rich would read a bracket in a name as its own markup and drop it.
        title=Text(f"{result.algorithm} on {result.experiment}", style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    shown = {**result.models, **result.baselines}.values()
    spread = ["Std", "Worst\n10 %", "Best\n10 %"] if any(s.std is not None for s in shown) else []
    rows = (*result.cells.values(), *result.published.values())
    columns = {key: column for key, column in COLUMNS.items() if any(key in row for row in rows)}
    table.add_column("", min_width=16, overflow="fold")
    for header in (metric.header, *spread, *(column.header for column in columns.values())):
        table.add_column(header, justify="right", no_wrap=True)

    def numbers(values: Score) -> list[str]:
        some = (values.mean, values.std, values.worst, values.best)[: 1 + len(spread)]
        return ["" if number is None else metric.text(number) for number in some]

    def cells(row: Mapping[str, float | None], absent: str) -> list[str]:
        return [
            _cell(row[key], row.get(f"{key}_std"), column.digits) if key in row else absent
            for key, column in columns.items()
        ]

    table.add_row(Text("This run", style="bold"))
    for title, values in result.models.items():
        own = cells(result.cells.get(title, {}), "")
        table.add_row(Text(f"  {title}"), *numbers(values), *own, style="bold cyan")
    for title, row in result.cells.items():
        if title not in result.models and title not in result.baselines:
            empty = [""] * (1 + len(spread))
            table.add_row(Text(f"  {title}"), *empty, *cells(row, ""), style="cyan")

    if result.baselines:
        table.add_section()
        table.add_row(Text("Run here for comparison", style="bold"))
        for title, values in result.baselines.items():
            own = cells(result.cells.get(title, {}), "")
            table.add_row(Text(f"  {title}"), *numbers(values), *own)

    if result.published:
        table.add_section()
        table.add_row(Text("Published", style="bold italic"))
        key = metric.published
        for method, published in result.published.items():
            # A count is a whole number here, but there a mean over seeds.
            row = {column: float(value) for column, value in published.items()}
            same = method.casefold() == result.algorithm.casefold()
            table.add_row(
                Text(f"{'▸' if same else ' '} {method}"),
                _cell(row.get(key), row.get(f"{key}_std"), metric.digits),
                *[""] * len(spread),
                *cells(row, NONE),
                style="italic" if same else "dim italic",
            )
    # Not the table's own caption, which would be folded to the width of a narrow table.
    return Group(table, Text(_results_caption(result), style="dim"))


def _results_caption(result: Result) -> str:
    moved = _traffic(result.traffic)
    ending = f"; {result.note}." if result.note else "."
    spread = any(values.std is not None for values in result.models.values())
    lines = [
        f"Data: {result.data}.",
        f"{result.rounds:,} rounds in {_duration(result.seconds)}, engine {result.engine}, "
        f"seed {result.seed}{ending}",
        f"Arrays sent: {_bytes(moved['down'])} down, {_bytes(moved['up'])} up; a round "
        f"{_bytes(moved['down_per_round'])} down, {_bytes(moved['up_per_round'])} up.",
        result.metric.legend
        + (" Std, worst, best: over the clients of this run." if spread else ""),
        *result.legend,
    ]
    if result.baselines:
        lines.append("Run here for comparison: same data, start, rounds and local work.")
    if result.published:
        lines[-1] += " Published: the paper's own numbers; ± over its seeds."
    return "\n".join(lines)


def _cell(value: float | None, std: float | None, digits: int | None) -> str:
    if value is None:
        return NONE
    if digits is None:
        return _count(value)
    text = f"{value}" if isinstance(value, int) else f"{value:.{digits}f}"
    return text if std is None else f"{text} ±{std:.2g}"


def _count(value: float) -> str:
    """Write a number of parameters as the papers do: in full, from a million on as 7.33e7."""
    if value < 1_000_000:
        return f"{value:,.0f}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.3g} GB" if number < 1000 else f"{number:,.0f} GB"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
