"""The pictures a run leaves behind: the metric over rounds, who is close to whom, and a map.

The heat map and the map of the client models are those of figure 3 of FPFC (Yu et al.,
arXiv:2211.04218), but the plane of the map is that of classical scaling, whose distances are those
of the models, where the paper has t-SNE's, whose are not. Everything is drawn through matplotlib's
``Figure`` objects: no ``pyplot``, so no global state, no window and no display is needed. It
and SciPy are imported when something is drawn: commands that draw nothing import this module, too.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .files import write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

DPI = 150  # 8 inches become 1200 pixels

# Okabe and Ito's palette, which people with any of the common colour deficiencies tell apart;
# its black is kept for edges and text, and in the place of its yellow, weak on white, is wine.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255")
LINES = (*COLOURS, "black")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES: tuple[Any, ...] = ((0, (5, 4)), (0, (1, 2)), (0, (8, 2, 1, 2)))
GREY = "#6B6B6B"
_OTHER_COLOUR, _OTHER_MARKER = "#BDBDBD", "*"

MOST_DRAWN = 1_000
"""Clients in a picture that has a place for each: there are no more pixels for them."""


@dataclass(frozen=True)
class Picture:
    """Where a picture goes and what stands above it.

    Attributes
    ----------
    path : Path
        The PNG file to write; its folder is made.
    title : str
        What was run, e.g. "FPFC on digits-swap".
    setting : str
        In which form of the method and with which settings; below the title.
    pdf : bool
        Write a PDF file of the same name as well, with text that stays text.
    """

    path: Path
    title: str
    setting: str = ""
    pdf: bool = False

    def figure(self, inches: tuple[float, float]) -> Figure:
        """Return a figure with title and setting, and the room below them for axes."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        width, height = inches
        engine = ConstrainedLayoutEngine()
        figure = Figure(figsize=inches, dpi=DPI, layout=engine)
        FigureCanvasAgg(figure)
        top = 0.07
        for text, size, wrap, (colour, weight) in (
            (self.title, 13.0, 68, ("black", "bold")),
            (self.setting, 8.5, 115, (GREY, "normal")),
        ):
            if lines := textwrap.wrap(text, int(wrap * width / 8), break_on_hyphens=False):
                figure.text(
                    0.15 / width,
                    1 - top / height,
                    "\n".join(lines),
                    fontsize=size,
                    color=colour,
                    fontweight=weight,
                    verticalalignment="top",
                )
                top += len(lines) * size * 1.25 / 72 + 0.03
        engine.set(rect=(0, 0, 1, 1 - top / height))
        return figure

    def save(self, figure: Figure) -> None:
        """Write the file or the files."""
        import matplotlib

        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Without versions and dates in the files: the same run leaves the same bytes.
        write_figure(self.path, figure, {"Software": None})
        if self.pdf:
            nothing = {"Creator": None, "Producer": None, "CreationDate": None}
            with matplotlib.rc_context({"pdf.fonttype": 42}):  # journals refuse Type 3
                write_figure(self.path.with_suffix(".pdf"), figure, nothing)


def metric_over_rounds(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    ylabel: str,
    xlabel: str = "communication round",
    picture: Picture,
    compared: Collection[str] = (),
    levels: Mapping[str, float] | None = None,
    log: bool = False,
) -> None:
    """Draw how a metric moved over the rounds, 1200 x 750 pixels, or higher for a long legend.

    Parameters
    ----------
    series : Mapping[str, Sequence[tuple[float, float]]]
        For every line its name (such as "personal model") and its (round, value) pairs. A value
        that is not finite, or on a logarithmic axis not positive, leaves a gap.
    ylabel : str
        Name and unit of the metric, such as "test accuracy (%)".
    xlabel : str
        What the rounds are counted in.
    picture : Picture
        Where to draw it.
    compared : Collection[str]
        The lines that are there for comparison: thin and dashed.
    levels : Mapping[str, float], optional
        Values that do not move, such as published ones, by name: a grey horizontal line each.
    log : bool
        Whether the axis of the metric is logarithmic.

    Raises
    ------
    ValueError
        If no series holds a value that can be drawn.
    """
    from matplotlib.ticker import MaxNLocator

    lines = {
        name: np.array(sorted(points), dtype=np.float64).reshape(-1, 2)
        for name, points in series.items()
    }
    for line in lines.values():
        fits = np.isfinite(line[:, 1]) & ((line[:, 1] > 0) | (not log))
        line[~fits, 1] = np.nan
    if not any(np.isfinite(line[:, 1]).any() for line in lines.values()):
        raise ValueError(
            f"no finite value to draw in the series {list(series)}: evaluate at least once during "
            "the run, and look for a diverged model if every value is NaN or infinite."
        )
    figure = picture.figure((8.0, 5.0))
    axes = figure.add_subplot()
    for k, (name, line) in enumerate(lines.items()):
        thin = name in compared
        wide = k == 0 and len(lines) > 1  # the headline can be seen below a line on top of it
        axes.plot(
            line[:, 0],
            line[:, 1],
            label=name,
            color=LINES[k % len(LINES)],
            linestyle="--" if thin else "-",
            # A lone point draws no line, and a few points should be seen as what they are.
            marker=_MARKERS[k % len(_MARKERS)] if len(line) <= 25 else None,
            markersize=3.5 if thin else 7.5 if wide else 4.5,
            linewidth=1.2 if thin else 3.5 if wide else 1.8,
            zorder=2 if thin else 3,
        )
    for k, (name, value) in enumerate((levels or {}).items()):
        dashes = _DASHES[k % len(_DASHES)]
        axes.axhline(value, label=name, color=GREY, linestyle=dashes, linewidth=1.2, zorder=1)
    if log:
        axes.set_yscale("log")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    rounds = np.unique(np.concatenate([line[:, 0] for line in lines.values()]))
    if len(rounds) == 1:
        axes.set_xticks(rounds)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    _legend_below(figure, axes)
    picture.save(figure)


def _legend_below(figure: Figure, axes: Axes) -> None:
    """Put the legend under the axes, in as many columns as fit the width of the picture.

    The picture grows by what the legend has beyond eight rows, so that the axes stay as they are.
    """
    handles, names = axes.get_legend_handles_labels()
    names = [textwrap.fill(name, 90) for name in names]
    width, height = figure.get_size_inches()
    for columns in range(min(4, len(names)), 0, -1):
        rows = math.ceil(len(names) / columns)
        figure.set_size_inches(width, height + 0.21 * max(0, rows - 8))
        legend = figure.legend(
            handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=9
        )
        figure.draw_without_rendering()
        if columns == 1 or legend.get_window_extent().width <= 0.97 * figure.bbox.width:
            return
        legend.remove()


def distance_heat_map(
    omega: ArrayLike, found: ArrayLike, clients: Sequence[int], *, picture: Picture
) -> None:
    """Draw the Euclidean distance of every two client models, ordered by found cluster.

    The largest cluster comes first, clients that are alone in their cluster come last, as one
    block. Of more than `MOST_DRAWN` clients so many are drawn, of each cluster its share.

    Parameters
    ----------
    omega : array_like of shape (m, d)
        The client models omega_i, one per row.
    found : array_like of int, shape (m,)
        Label of the cluster that was found for each client.
    clients : sequence of int, length m
        Their numbers.
    picture : Picture
        Where to draw it, 1200 x 1050 pixels.

    Raises
    ------
    ValueError
        If a model is not finite.
    """
    from matplotlib.patches import Rectangle
    from scipy.spatial.distance import cdist

    models, drawn = _finite(omega), _drawn(np.asarray(found))
    sizes = [len(group) for group in _by_size(np.asarray(found))]
    groups = [np.intersect1d(group, drawn) for group in _by_size(np.asarray(found))]
    m, order = len(drawn), np.concatenate(groups)
    # Not by the expanded square: fused models differ by 1e-5, which its cancellation would hide.
    distances = cdist(models[order], models[order])

    together = [k for k, size in enumerate(sizes) if size > 1 and len(groups[k])]
    blocks = [len(groups[k]) for k in together]
    names = [f"cluster {k + 1} ({sizes[k]})" for k in together]
    if alone := m - sum(blocks):
        blocks.append(alone)
        names.append(f"alone ({sizes.count(1)})")

    framed = " Framed: the clusters found." if alone < m else ""
    figure, axes = _square(
        picture,
        f"Dark: the two clients hold nearly the same model.{framed}{_of_how_many(m, len(models))}",
    )
    image = axes.imshow(
        distances,
        cmap="YlGnBu_r",
        interpolation="nearest",
        vmin=0.0,
        # Where all models are equal the colour bar would otherwise show negative distances.
        vmax=float(distances.max()) or 1.0,
        extent=(0, m, m, 0),
    )
    figure.colorbar(
        image, ax=axes, shrink=0.85, label="distance of two client models, ‖ω$_i$ − ω$_j$‖"
    )
    edges = np.concatenate(([0], np.cumsum(blocks)))
    if len(blocks) <= 12:
        axes.hlines(edges[1:-1], 0, m, color=GREY, linewidth=0.7)
        axes.vlines(edges[1:-1], 0, m, color=GREY, linewidth=0.7)
    for start, size, name in zip(edges[:-1], blocks, names, strict=True):
        if not name.startswith("alone"):
            corner = (float(start), float(start))
            axes.add_patch(
                Rectangle(corner, size, size, fill=False, edgecolor="#D55E00", lw=2, clip_on=False)
            )

    middles = (edges[:-1] + edges[1:]) / 2
    # A line of text needs about one thirtieth of the picture to itself.
    roomy = [k for k, size in enumerate(blocks) if size >= m / 30]
    axes.set_yticks(middles[roomy], [names[k] for k in roomy], fontsize=9)
    axes.set_ylabel("clients by found cluster (number of clients)")
    axes.tick_params(length=0)
    axes.set_anchor("N")
    if m <= 25:
        axes.set_xticks(np.arange(m) + 0.5, [str(clients[i]) for i in order], fontsize=9)
        axes.set_xlabel("client number")
    else:
        axes.set_xticks([])
        axes.set_xlabel(f"the same {m:,} clients, in the same order")
    picture.save(figure)


def embedding(
    omega: ArrayLike, found: ArrayLike, true: ArrayLike | None, *, picture: Picture
) -> None:
    """Draw the client models as points of a plane: colour is found cluster, marker is true one.

    The plane is that of classical scaling, in which the distances of the points come nearest to
    those of the models. Points that would hide each other are drawn side by side. Of more than
    `MOST_DRAWN` clients so many are drawn, of each cluster its share.

    Parameters
    ----------
    omega : array_like of shape (m, d)
        The client models omega_i, one per row.
    found : array_like of int, shape (m,)
        Label of the cluster that was found for each client. The seven largest clusters of two
        clients or more have a colour of their own, all others are grey.
    true : array_like of int, shape (m,), or None
        Label of the cluster each client really belongs to, where it is known. Markers go by the
        same rule, and the small clusters' is a star.
    picture : Picture
        Where to draw it, 1200 x 1050 pixels.

    Raises
    ------
    ValueError
        If a model is not finite.
    """
    from matplotlib.lines import Line2D

    models, drawn = _finite(omega), _drawn(np.asarray(found))
    points, share = _plane(models[drawn])
    large = len(drawn) <= 200
    # Markers of 70 or 20 square points; the axes are some 400 points wide.
    points = _side_by_side(points, 1 / 40 if large else 1 / 75)
    figure, axes = _square(
        picture,
        "Each point is one client, close points hold similar models. The plane shows "
        f"{share:.0%} of the\nsquared distances; equal models, one point in it, are drawn side by "
        f"side.{_of_how_many(len(drawn), len(models))}",
    )

    colours, colour_key = _classes(np.asarray(found), COLOURS, _OTHER_COLOUR)
    handles = [Line2D([], [], linestyle="none", label="Colour: found cluster")]
    handles += [_key(name, colour, "o") for name, colour in colour_key]
    if true is None:
        markers = np.full(len(models), _MARKERS[0], dtype=object)
    else:
        markers, marker_key = _classes(np.asarray(true), _MARKERS, _OTHER_MARKER)
        handles.append(Line2D([], [], linestyle="none", label="\nMarker: true cluster"))
        handles += [_key(name, "white", marker) for name, marker in marker_key]
    figure.legend(handles=handles, loc="outside right center", frameon=False)

    colours, markers = colours[drawn], markers[drawn]
    # The other clusters' points first, so that they hide no coloured one.
    for colour in (_OTHER_COLOUR, *COLOURS):
        for marker in (_OTHER_MARKER, *_MARKERS):
            here = (colours == colour) & (markers == marker)
            axes.scatter(
                points[here, 0],
                points[here, 1],
                c=colour,
                marker=marker,
                s=70 if large else 20,
                edgecolors="black",
                linewidths=0.6,
                alpha=0.85,
            )
    axes.set_xlabel("first principal coordinate, in the unit of ‖ω$_i$ − ω$_j$‖")
    axes.set_ylabel("second principal coordinate")
    axes.margins(0.08)
    # One scale for both axes: a distance means the same in every direction.
    axes.set_aspect("equal", adjustable="datalim")
    picture.save(figure)


def _plane(models: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Return classical scaling's place in the plane for every model, shape (m, 2).

    And what share of the squared distances between the models those between the places have.
    (Of Euclidean distances the principal coordinates are the scores of the principal components.)
    """
    centred = models - models.mean(axis=0)
    scale = float(np.abs(centred).max()) or 1.0  # squares of very large numbers are no numbers
    centred /= scale
    values, vectors = np.linalg.eigh(centred @ centred.T)
    values = np.where(values > 1e-12 * values[-1], values, 0.0)[::-1]  # no roots of rounding errors
    points = vectors[:, ::-1][:, :2] * np.sqrt(values[:2])
    # Of the two directions of an axis the one in which the first of the farthest clients is right.
    far = points[np.argmax(np.abs(points).round(6), axis=0), np.arange(points.shape[1])]
    points = np.pad(points * np.where(far < 0, -scale, scale), ((0, 0), (0, 2 - len(far))))
    return points, float(values[:2].sum() / values.sum()) if values.sum() > 0 else 1.0


def _side_by_side(points: NDArray[np.float64], marker: float) -> NDArray[np.float64]:
    """Return points of which none hides another: such as would are spread around their middle.

    Parameters
    ----------
    points : ndarray of shape (m, 2)
    marker : float
        Diameter of a marker, as a share of the picture's width.
    """
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import connected_components
    from scipy.spatial.distance import cdist

    size = marker * (float(np.ptp(points, axis=0).max()) or 1.0)
    _, groups = connected_components(csr_matrix(cdist(points, points) < 0.5 * size), directed=False)
    spread = points.copy()
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        if len(members) > 1:
            # A sunflower's seeds: every place is about as far from its neighbours as any other.
            k = np.arange(len(members)) + 0.5
            radius, angle = 0.75 * size * np.sqrt(k), k * math.pi * (3 - math.sqrt(5))
            ring = np.column_stack((radius * np.cos(angle), radius * np.sin(angle)))
            spread[members] = points[members].mean(axis=0) + ring
    return spread


def _finite(omega: ArrayLike) -> NDArray[np.float64]:
    models = np.asarray(omega, dtype=np.float64)
    diverged = np.flatnonzero(~np.isfinite(models).all(axis=1))
    if diverged.size:
        raise ValueError(
            f"the models of {diverged.size} of {len(models)} clients are not finite (first: client "
            f"{diverged[0]}): the run diverged; try a smaller learning rate."
        )
    return models


def _drawn(labels: NDArray[Any]) -> NDArray[np.intp]:
    """Return the clients that a picture has: all, or `MOST_DRAWN`, of each cluster its share.

    Which they are of a cluster is chance, the same in every picture of a run.
    """
    m, chance = len(labels), np.random.default_rng(0)
    if m <= MOST_DRAWN:
        return np.arange(m)
    order = np.concatenate([chance.permutation(group) for group in _by_size(labels)])
    return np.sort(order[np.arange(MOST_DRAWN) * m // MOST_DRAWN])


def _of_how_many(drawn: int, m: int) -> str:
    """Say that a picture does not have all clients."""
    if drawn == m:
        return ""
    return f"\nDrawn are {drawn:,} of the {m:,} clients, by chance, of each cluster its share."


def _by_size(labels: NDArray[Any]) -> list[NDArray[np.intp]]:
    """Return the clients of every cluster, largest cluster first, ties by first client."""
    groups = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    return sorted(groups, key=lambda group: (-len(group), group[0]))


def _classes(
    labels: NDArray[Any], choice: Sequence[str], other: str
) -> tuple[NDArray[Any], list[tuple[str, str]]]:
    """Give the largest clusters a look of their own and the rest one look; return it with its key.

    A cluster of one client is no group to look for, so it never has a look of its own.
    """
    looks = np.full(len(labels), other, dtype=object)
    groups = _by_size(labels)
    named = [group for group in groups if len(group) > 1][: len(choice)]
    key = []
    for k, group in enumerate(named):
        looks[group] = choice[k]
        key.append((f"cluster {k + 1} ({len(group)} clients)", choice[k]))
    rest = groups[len(named) :]
    clients = sum(len(group) for group in rest)
    if clients == 1:
        key.append(("1 client alone", other))
    elif clients == len(rest) > 0:
        key.append((f"{clients} clients, each alone", other))
    elif rest:
        others = "1 other" if len(rest) == 1 else f"{len(rest)} others"
        key.append((f"{others} ({clients} clients)", other))
    return looks, key


def _key(name: str, colour: str, marker: str) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D(
        [],
        [],
        linestyle="none",
        label=name,
        marker=marker,
        markersize=8,
        markerfacecolor=colour,
        markeredgecolor="black",
        markeredgewidth=0.6,
    )


def _square(picture: Picture, hint: str) -> tuple[Figure, Axes]:
    figure = picture.figure((8.0, 7.0))
    axes = figure.add_subplot()
    explain(axes, hint)
    return figure, axes


def explain(axes: Axes, hint: str) -> None:
    """Write above axes how they are to be read."""
    axes.set_title(hint, fontsize=10, color=GREY, loc="left")
