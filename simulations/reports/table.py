"""The table of a run beside the baselines and the published numbers, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from rich import box
from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ..problems.scores import COLUMNS, ScoreSummary
from .base import NONE
from .files import Result, row_of, total_traffic


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
    compared = {
        "Run here for comparison": result.baselines,
        "New clients, after the run": result.new_clients,
    }
    sections: dict[str, dict[str, tuple[ScoreSummary | None, Mapping[str, float | None]]]] = {
        "This run": {
            title: (result.models.get(title), result.cells.get(title, {}))
            for title in {**result.models, **result.cells}
        }
    }
    for section, methods in compared.items():
        sections[section] = {
            row_of(name, kind): (score, method.cells.get(kind, {}))
            for name, method in methods.items()
            for kind, score in method.models.items()
        }
    shown = [row for its_rows in sections.values() for row in its_rows.values()]
    with_spread = any(score is not None and score.std is not None for score, _ in shown)
    spread = ["Std", "Worst\n10 %", "Best\n10 %"] if with_spread else []
    rows = (*(row for _, row in shown), *result.published.values())
    columns = {key: column for key, column in COLUMNS.items() if any(key in row for row in rows)}
    table.add_column("", min_width=16, overflow="fold")
    for header in (metric.header, *spread, *(column.header for column in columns.values())):
        table.add_column(header, justify="right", no_wrap=True)

    def numbers(values: ScoreSummary | None) -> list[str]:
        if values is None:
            return [""] * (1 + len(spread))
        some = (values.mean, values.std, values.worst, values.best)[: 1 + len(spread)]
        return ["" if number is None else metric.text(number) for number in some]

    def cells(row: Mapping[str, float | None], absent: str) -> list[str]:
        return [
            _cell(row[key], row.get(f"{key}_std"), column.digits) if key in row else absent
            for key, column in columns.items()
        ]

    for section, its_rows in sections.items():
        if its_rows:
            table.add_section()
            table.add_row(Text(section, style="bold"))
        style = "cyan" if section == "This run" else None
        for title, (values, row) in its_rows.items():
            table.add_row(Text(f"  {title}"), *numbers(values), *cells(row, ""), style=style)

    if result.published:
        table.add_section()
        table.add_row(Text("Published", style="bold italic"))
        key = metric.published
        for method, published in result.published.items():
            # A count is a whole number here, but there a mean over seeds.
            numbered = {column: float(value) for column, value in published.items()}
            same = method.casefold() == result.algorithm.casefold()
            table.add_row(
                Text(f"{'▸' if same else ' '} {method}"),
                _cell(numbered.get(key), numbered.get(f"{key}_std"), metric.digits),
                *[""] * len(spread),
                *cells(numbered, NONE),
                style="italic" if same else "dim italic",
            )
    # Not the table's own caption, which would be folded to the width of a narrow table.
    return Group(table, Text(_results_caption(result), style="dim"))


def _results_caption(result: Result) -> str:
    moved = {key: decimal(round(sent)) for key, sent in total_traffic(result.traffic).items()}
    spread = any(values.std is not None for values in result.models.values())
    lines = [
        f"Data: {result.data}.",
        f"{result.rounds:,} rounds in {timedelta(seconds=round(result.seconds))}, engine "
        f"{result.engine}, seed {result.seed}.",
        f"Arrays sent: {moved['down']} down, {moved['up']} up; a round "
        f"{moved['down_per_round']} down, {moved['up_per_round']} up.",
        result.metric.legend
        + (" Std, worst, best: over the clients of this run." if spread else ""),
        *result.legend,
    ]
    rows = [row for one in result.baselines.values() for row in one.cells.values()]
    found = [row for row in (*result.cells.values(), *rows) if "num" in row]
    if found:
        known = any(row.get("ari") is not None for row in found)
        truth = "1 = the true clusters, 0 = chance" if known else "truth unknown"
        lines.append(f"Num: clusters found. ARI: {truth}.")
    if result.baselines:
        lines.append(
            "Run here for comparison: same data, initial model, seed, rounds and share of clients; "
            "each method has its settings."
        )
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
