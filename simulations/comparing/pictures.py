"""The pictures of a comparison beside its curves: mean ranks, accuracy and spread."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

from ..reports.plots import COLOURS, LINES, Picture, legend_below
from .statistics import Ranks


def critical_difference(names: Sequence[str], ranks: Ranks, *, picture: Picture) -> None:
    """Draw the mean ranks, the best at the top, with half the critical difference to both sides.

    Bars that do not overlap are of methods that Nemenyi's test tells apart.
    """
    order = sorted(range(len(names)), key=lambda k: -ranks.means[k])
    figure, axes = picture.axes((8.0, 1.4 + 0.3 * len(names)))
    means, rows = [ranks.means[k] for k in order], [names[k] for k in order]
    axes.errorbar(means, rows, xerr=ranks.critical / 2, fmt="o", linewidth=3, color=COLOURS[0])
    axes.set_xlabel("mean rank")
    axes.margins(y=0.5 / len(names))
    picture.save(figure)


def fairness(
    points: Sequence[tuple[str, float, float]], *, xlabel: str, ylabel: str, picture: Picture
) -> None:
    """Draw a point a seed: of a method the mean over the clients, and the spread over them."""
    import pandas as pd
    import seaborn as sns

    frame = pd.DataFrame(points, columns=["method", xlabel, ylabel])
    palette = [*islice(cycle(LINES), frame["method"].nunique())]
    figure, axes = picture.axes((8.0, 5.0))
    looks = {"hue": "method", "style": "method", "palette": palette}
    sns.scatterplot(frame, x=xlabel, y=ylabel, ax=axes, alpha=0.8, **looks)
    legend_below(figure, axes)
    picture.save(figure)
