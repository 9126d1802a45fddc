"""The pictures of a comparison: curves with bands over seeds, mean ranks, accuracy and spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..reports.plots import COLOURS, GREY, LINES, Picture
from .statistics import Ranks, groups_of

_DASHES = ("-", "--", ":")
_MARKERS = ("o", "s", "^")


def curves(
    lines: Mapping[str, tuple[Sequence[int], NDArray[np.float64]]],
    *,
    ylabel: str,
    target: float | None,
    picture: Picture,
    xlabel: str = "communication round",
    ticks: Sequence[str] = (),
) -> None:
    """Draw the mean over seeds by round, and one standard deviation to both sides.

    Parameters
    ----------
    lines : mapping of str to (rounds, values)
        By method; values of shape (seeds, rounds).
    ylabel : str
    target : float or None
        A level to draw.
    picture : Picture
    xlabel : str
    ticks : sequence of str
        What stands at 0, 1, ... where x is no round.
    """
    from matplotlib.ticker import MaxNLocator

    figure = picture.figure((8.0, 5.0))
    axes = figure.add_subplot()
    for k, (name, (rounds, values)) in enumerate(lines.items()):
        colour, turn = LINES[k % len(LINES)], k // len(LINES)
        mean = values.mean(axis=0)
        axes.plot(
            rounds,
            mean,
            label=name,
            color=colour,
            linestyle=_DASHES[turn % len(_DASHES)],
            marker=_MARKERS[turn % len(_MARKERS)] if len(rounds) <= 25 else None,
            markersize=4,
        )
        if len(values) > 1:
            std = values.std(axis=0, ddof=1)
            axes.fill_between(rounds, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
    if target is not None:
        axes.axhline(target, color=GREY, linestyle=":", label=f"target: {target:g}")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if ticks:
        axes.set_xticks(range(len(ticks)), ticks)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        loc="outside lower center", ncols=min(5, len(lines) + 1), frameon=False, fontsize=9
    )
    picture.save(figure)


def critical_difference(names: Sequence[str], ranks: Ranks, *, picture: Picture) -> None:
    """Draw the mean ranks on a line, the best at the left.

    Bars join methods that Nemenyi's test does not tell apart. After Demsar, JMLR 7, 2006, Figure 1.
    """
    k, groups = len(names), groups_of(ranks)
    order = np.argsort(ranks.means, kind="stable")
    rows = (k + 1) // 2
    top = 0.35 * (len(groups) + 1)
    figure = picture.figure((8.0, 1.4 + top / 1.6 + 0.3 * rows))
    axes = figure.add_subplot()
    axes.set_xlim(0.4, k + 0.6)
    axes.set_ylim(-top - 0.5 * rows - 0.3, 1.2)
    axes.hlines(0, 1, k, color="black", linewidth=1)
    for tick in range(1, k + 1):
        axes.vlines(tick, 0, 0.12, color="black", linewidth=1)
        axes.text(tick, 0.2, str(tick), ha="center", fontsize=9)
    axes.hlines(0.8, 1, min(1 + ranks.critical, k + 0.5), color=GREY, linewidth=2)
    axes.text(1, 0.9, f"critical difference {ranks.critical:.2f}", fontsize=9, color=GREY)
    for place, row in enumerate(order):
        left = place < rows
        depth = -top - 0.5 * (place if left else k - 1 - place)
        end = 0.95 if left else k + 0.05
        mean = ranks.means[row]
        axes.plot([mean, mean, end], [0, depth, depth], color="black", linewidth=0.9)
        text = f"{names[row]} ({mean:.2f})"
        axes.text(
            end + (-0.04 if left else 0.04),
            depth,
            text,
            ha="right" if left else "left",
            va="center",
            fontsize=9,
        )
    for level, group in enumerate(groups):
        first, last = ranks.means[group[0]], ranks.means[group[-1]]
        axes.hlines(-0.3 - 0.3 * level, first - 0.03, last + 0.03, color=COLOURS[0], linewidth=4)
    axes.set_axis_off()
    picture.save(figure)


def fairness(
    points: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    xlabel: str,
    ylabel: str,
    picture: Picture,
) -> None:
    """Draw a point a seed: the mean over the clients, and the spread over them."""
    figure = picture.figure((8.0, 5.0))
    axes = figure.add_subplot()
    for k, (name, (means, spreads)) in enumerate(points.items()):
        axes.scatter(
            means,
            spreads,
            label=name,
            color=LINES[k % len(LINES)],
            marker=_MARKERS[k // len(LINES) % len(_MARKERS)],
            s=30,
            alpha=0.8,
        )
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=min(5, len(points)), frameon=False, fontsize=9)
    picture.save(figure)
