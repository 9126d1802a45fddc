"""A progress bar of rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .messages.records import brief


def in_short(metrics: Mapping[str, float]) -> str:
    """Return the metrics of a round as a line of a log has them: rounded, without needless losses.

    The loss of a model that was evaluated stands there only if nothing else is known of it.
    """
    measured = {name.rpartition("-")[0] for name in metrics if not name.endswith("-loss")}
    shown = (
        f"{name} {_brief(value)}"
        for name, value in metrics.items()
        if name == "train-loss" or name.removesuffix("-loss") not in measured
    )
    return ", ".join(shown)


def _brief(value: float | list[float]) -> str:
    """Return a metric, which is a list where a function of the user's made it one."""
    return brief(str(value)) if isinstance(value, list) else f"{value:.4g}"


@contextmanager
def progress_bar(
    title: str, total: int, completed: int, wanted: bool | None
) -> Iterator[Callable[[int, Mapping[str, float], str], None]]:
    """Show a progress bar on standard error; yield what moves it on.

    That takes the round, its metrics, and what stands behind the main metric.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds  {task.fields[word]}{task.fields[note]}", markup=False),
        TimeRemainingColumn(),
    )
    hidden = not (console.is_terminal if wanted is None else wanted)
    with Progress(*columns, console=console, disable=hidden) as bar:
        task = bar.add_task(title, total=total, completed=completed, word="", note="")

        def advance(server_round: int, metrics: Mapping[str, float], note: str) -> None:
            bar.update(task, completed=server_round, note=note)
            name = next((key for key in metrics if key.endswith(("accuracy", "rmse"))), None)
            if name is not None:
                bar.update(task, word=f"{brief(name)} {_brief(metrics[name])}")

        yield advance
