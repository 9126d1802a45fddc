"""The table of a run beside the baselines and the published numbers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from rich.filesize import decimal

from ..problems.scores import COLUMNS, ModelScores, ScoreSummary
from .base import NONE
from .files import Result, row_of, total_traffic
from .pages import Grid, Part

Cells = Mapping[str, float | None]


def results_table(result: Result) -> list[Part]:
    """Return a run's results, with the published ones below, and what the table means."""
    metric = result.metric
    sections: dict[str, dict[str, tuple[ScoreSummary | None, Cells]]] = {
        "This run": {
            title: (result.models.get(title), result.cells.get(title, {}))
            for title in {**result.models, **result.cells}
        },
        "For comparison": _of_methods(result.baselines),
        "New clients": _of_methods(result.new_clients),
    }
    shown = [row for rows in sections.values() for row in rows.values()]
    spread = any(score is not None and score.std is not None for score, _ in shown)
    cells = [*(row for _, row in shown), *result.published.values()]
    columns = {key: column for key, column in COLUMNS.items() if any(key in row for row in cells)}
    headers = ["", metric.header, *(["Std", "Worst 10 %", "Best 10 %"] if spread else [])]
    num_scores = len(headers) - 1
    headers += [column.header for column in columns.values()]

    def of_columns(row: Cells, absent: str) -> list[str]:
        return [
            _cell(row[key], row.get(f"{key}-std"), column.digits) if key in row else absent
            for key, column in columns.items()
        ]

    rows = []
    for section, its_rows in sections.items():
        if its_rows:
            rows.append([f"**{section}**", *[""] * (len(headers) - 1)])
        for title, (score, row) in its_rows.items():
            numbers = [score.mean, score.std, score.worst, score.best] if score else [None] * 4
            texts = ["" if number is None else metric.text(number) for number in numbers]
            rows.append([title, *texts[:num_scores], *of_columns(row, "")])
    if result.published:
        rows.append(["**Published**", *[""] * (len(headers) - 1)])
        for method, published in result.published.items():
            key = metric.key
            mean = _cell(published.get(key), published.get(f"{key}-std"), metric.digits)
            # A count is a whole number here, but there a mean over seeds.
            numbered = {column: float(value) for column, value in published.items()}
            rows.append([method, mean, *[""] * (num_scores - 1), *of_columns(numbered, NONE)])
    title = f"**{result.algorithm} on {result.experiment}**"
    legend = "\n".join(f"* {line}" for line in _legend(result, spread))
    return [title, Grid("", headers, rows), legend]


def _of_methods(
    methods: Mapping[str, ModelScores],
) -> dict[str, tuple[ScoreSummary | None, Cells]]:
    return {
        row_of(name, kind): (score, method.cells.get(kind, {}))
        for name, method in methods.items()
        for kind, score in method.models.items()
    }


def _legend(result: Result, spread: bool) -> list[str]:
    moved = {key: decimal(round(sent)) for key, sent in total_traffic(result.traffic).items()}
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
    rows = [*result.cells.values()]
    rows += [row for one in result.baselines.values() for row in one.cells.values()]
    if any("num" in row for row in rows):
        lines.append("Num: clusters found. ARI: 1 = the true clusters, 0 = chance.")
    if any("loss-variance" in row for row in rows):
        lines.append("Loss var: variance of the clients' test losses.")
    if result.baselines:
        lines.append(
            "For comparison: run here on the same data, initial model, seed, rounds and share of "
            "clients; each method has its settings."
        )
    if result.published:
        lines.append("Published: the paper's own numbers; ± over its seeds.")
    return lines


def _cell(value: float | None, std: float | None, digits: int | None) -> str:
    if value is None:
        return NONE
    if digits is None:
        return f"{value:,.0f}"
    text = f"{value}" if isinstance(value, int) else f"{value:.{digits}f}"
    return text if std is None else f"{text} ±{std:.2g}"
