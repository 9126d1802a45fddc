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

DPI = 150  # 8 inches become 1200 pixels

# Okabe and Ito's palette, which people with any of the common colour deficiencies tell apart;
# its black is kept for edges and text, and in the place of its yellow, weak on white, is wine.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255")
LINES = (*COLOURS, "black")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES: tuple[Any, ...] = ((0, (5, 4)), (0, (1, 2)), (0, (8, 2, 1, 2)))
GREY = "#6B6B6B"
_STYLE: dict[Any, Any] = {
    **{"axes.grid": True, "axes.grid.axis": "y", "grid.color": "#E6E6E6"},
    **{"axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False},
}
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

    def axes(self, inches: tuple[float, float]) -> tuple[Figure, Axes]:
        """Return a figure with axes for curves."""
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            figure = self.figure(inches)
            return figure, figure.subplots()

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


def curves(
    series: Mapping[str, Sequence[tuple[float | str, float]]],
    *,
    ylabel: str,
    xlabel: str = "communication round",
    picture: Picture,
    compared: Collection[str] = (),
    levels: Mapping[str, float] | None = None,
    log: bool = False,
) -> None:
    """Draw lines, 1200 x 750 pixels, or higher for a long legend.

    Parameters
    ----------
    series : Mapping[str, Sequence[tuple[float or str, float]]]
        For every line its name (such as "personal model") and its (x, value) pairs: of several
        with the same x their mean is drawn, and a band of one standard deviation to both sides. A
        value that is not finite, or on a logarithmic axis not positive, is left out.
    ylabel : str
        Name and unit of the metric, such as "test accuracy (%)".
    xlabel : str
        What x is.
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
    import pandas as pd
    import seaborn as sns
    from matplotlib.ticker import MaxNLocator

    points = [(name, x, y) for name, line in series.items() for x, y in line]
    frame = pd.DataFrame(points, columns=["name", xlabel, ylabel]).astype({ylabel: float})
    frame = frame[np.isfinite(frame[ylabel]) & ((frame[ylabel] > 0) | (not log))]
    if frame.empty:
        raise ValueError(
            f"no finite value to draw in the series {list(series)}: evaluate at least once during "
            "the run, and look for a diverged model if every value is NaN or infinite."
        )
    names, places = frame["name"].unique(), frame[xlabel].unique()
    looks = {name: (LINES[k % len(LINES)], _MARKERS[k % 7]) for k, name in enumerate(names)}
    # The headline can be seen below a line on top of it.
    widths = {name: 1.2 if name in compared else 1.8 for name in names}
    if len(names) > 1:
        widths[names[0]] = 3.5
    figure, axes = picture.axes((8.0, 5.0))
    sns.lineplot(
        frame,
        **{"x": xlabel, "y": ylabel, "hue": "name", "style": "name", "size": "name"},
        palette={name: colour for name, (colour, _) in looks.items()},
        # A lone point draws no line, and a few points should be seen as what they are.
        markers={name: mark for name, (_, mark) in looks.items()} if len(places) <= 25 else False,
        dashes={name: (4, 2) if name in compared else "" for name in names},
        sizes=widths,
        errorbar="sd",
        ax=axes,
    )
    for k, (name, value) in enumerate((levels or {}).items()):
        dashes = _DASHES[k % len(_DASHES)]
        axes.axhline(value, label=name, color=GREY, linestyle=dashes, linewidth=1.2, zorder=1)
    if log:
        axes.set_yscale("log")
    if not isinstance(places[0], str):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if len(places) == 1:
        axes.set_xticks(places)
    legend_below(figure, axes)
    picture.save(figure)


def legend_below(figure: Figure, axes: Any) -> None:
    """Put the legend that axes have under them, in as many columns as fit the width of the picture.

    The picture grows by what the legend has beyond eight rows, so that the axes stay as they are.
    """
    handles, names = axes.get_legend_handles_labels()
    axes.get_legend().remove()
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
    """
    from matplotlib.patches import Rectangle
    from scipy.spatial.distance import cdist

    models, drawn = np.asarray(omega, dtype=np.float64), _drawn(np.asarray(found))
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
    """
    import pandas as pd
    import seaborn as sns

    models, drawn = np.asarray(omega, dtype=np.float64), _drawn(np.asarray(found))
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
    x = "first principal coordinate, in the unit of ‖ω$_i$ − ω$_j$‖"
    y = "second principal coordinate"
    colour, marker = "Colour: found cluster", "Marker: true cluster"
    names, colours = _classes(np.asarray(found), COLOURS, _OTHER_COLOUR)
    frame = pd.DataFrame({x: points[:, 0], y: points[:, 1], colour: names[drawn]})
    looks: dict[str, Any] = {"hue": colour, "palette": colours, "hue_order": [*colours]}
    if true is not None:
        names, markers = _classes(np.asarray(true), _MARKERS, _OTHER_MARKER)
        frame[marker] = names[drawn]
        looks |= {"style": marker, "markers": markers, "style_order": [*markers]}
    # The other clusters' points first, so that they hide no coloured one.
    frame = frame.sort_values(colour, key=lambda names: names.map(colours) != _OTHER_COLOUR)
    edges = {"edgecolor": "black", "linewidth": 0.6}
    sns.scatterplot(frame, x=x, y=y, s=70 if large else 20, ax=axes, **edges, **looks)
    sns.move_legend(axes, "center left", bbox_to_anchor=(1, 0.5), frameon=False)
    axes.margins(0.08)
    # One scale for both axes: a distance means the same in every direction.
    axes.set_aspect("equal", adjustable="datalim")
    picture.save(figure)


def _plane(models: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Return classical scaling's place in the plane for every model, shape (m, 2).

    And what share of the squared distances between the models those between the places have.
    (Of Euclidean distances the principal coordinates are the scores of the principal components.)
    """
    from sklearn.decomposition import PCA

    if not np.ptp(models, axis=0).any():
        return np.zeros((len(models), 2)), 1.0
    found = PCA(min(2, models.shape[1]), random_state=0)
    points = found.fit_transform(models)
    points = np.pad(points, ((0, 0), (0, 2 - points.shape[1])))
    return points, float(found.explained_variance_ratio_.sum())


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
) -> tuple[NDArray[Any], dict[str, str]]:
    """Name every client's cluster, and give the names of the largest a look of their own.

    A cluster of one client is no group to look for, so it never has a look of its own.
    """
    names, looks = np.full(len(labels), "", dtype=object), {}
    groups = _by_size(labels)
    named = [group for group in groups if len(group) > 1][: len(choice)]
    for k, group in enumerate(named):
        name = f"cluster {k + 1} ({len(group)} clients)"
        names[group], looks[name] = name, choice[k]
    rest = groups[len(named) :]
    clients = sum(len(group) for group in rest)
    if rest:
        others = "1 other" if len(rest) == 1 else f"{len(rest)} others"
        alone = "1 client alone" if clients == 1 else f"{clients} clients, each alone"
        name = alone if clients == len(rest) else f"{others} ({clients} clients)"
        names[np.concatenate(rest)], looks[name] = name, other
    return names, looks


def _square(picture: Picture, hint: str) -> tuple[Figure, Axes]:
    """Return a figure and axes, above which stands how they are to be read."""
    figure = picture.figure((8.0, 7.0))
    axes = figure.add_subplot()
    axes.set_title(hint, fontsize=10, color=GREY, loc="left")
    return figure, axes
