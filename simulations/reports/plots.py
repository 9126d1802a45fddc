"""The pictures a run leaves behind: the metric over rounds, who is close to whom, and a map.

The heat map and the map of the client models are those of figure 3 of FPFC (Yu et al.,
arXiv:2211.04218), but the plane of the map is that of classical scaling, which keeps the distances
of the models, where the paper has t-SNE's, which does not. Everything is drawn through matplotlib's
``Figure`` objects: no ``pyplot``, so no global state, no window and no display is needed. It
and SciPy are imported when something is drawn: commands that draw nothing import this module, too.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150  # 8 inches become 1200 pixels

# Okabe and Ito's palette, which people with any of the common colour deficiencies tell apart;
# its black is kept for edges and text, and in the place of its yellow, weak on white, is wine.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255")
LINES = (*COLOURS, "black")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#6B6B6B"
_STYLE: dict[Any, Any] = {
    **{"axes.grid": True, "axes.grid.axis": "y", "grid.color": "#E6E6E6"},
    **{"axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False},
}
_OTHERS = "others"

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
    """

    path: Path
    title: str

    def axes(self, inches: tuple[float, float], hint: str = "") -> tuple[Figure, Axes]:
        """Return a figure with axes, above which stand the title and how they are read."""
        import matplotlib
        from matplotlib.figure import Figure

        with matplotlib.rc_context(_STYLE):
            figure = Figure(figsize=inches, dpi=DPI, layout="constrained")
            axes = figure.subplots()
        title = textwrap.fill(self.title, 68)
        figure.suptitle(title, x=0.02, horizontalalignment="left", fontweight="bold")
        axes.set_title(hint, fontsize=8.5, color=GREY, loc="left")
        return figure, axes

    def save(self, figure: Figure) -> None:
        """Write the file, as a whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        # Without a version in the file: the same run leaves the same bytes.
        figure.savefig(content, format="png", metadata={"Software": None})
        write_bytes(self.path, content.getvalue())


def curves(
    series: Mapping[str, Sequence[tuple[float | str, float]]],
    *,
    ylabel: str,
    xlabel: str = "communication round",
    picture: Picture,
    compared: Collection[str] = (),
    levels: Mapping[str, float] | None = None,
    marks: Mapping[str, float] | None = None,
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
    marks : Mapping[str, float], optional
        Values of x where something happened, by name: a grey vertical line each.
    log : bool
        Whether the axis of the metric is logarithmic.
    """
    import pandas as pd
    import seaborn as sns
    from matplotlib.ticker import MaxNLocator

    figure, axes = picture.axes((8.0, 5.0))
    for k, (name, line) in enumerate(series.items()):
        points = pd.DataFrame(line, columns=["x", "y"]).astype({"y": float})
        points = points[np.isfinite(points["y"]) & ((points["y"] > 0) | (not log))]
        numbers = points["x"].dtype.kind in "if"
        sns.lineplot(
            points,
            x="x",
            y="y",
            ax=axes,
            errorbar="sd",
            sort=numbers,  # words stay in their order
            label=name,
            color=LINES[k % len(LINES)],
            # A lone point draws no line, and a few points should be seen as what they are.
            marker=MARKERS[k % len(MARKERS)] if points["x"].nunique() <= 25 else None,
            linestyle="--" if name in compared else "-",
            linewidth=1.5 if k else 3.0,  # the main metric can be seen below a line on top of it
        )
        if numbers:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for name, value in (levels or {}).items():
        axes.axhline(value, label=name, color=GREY, linestyle=":", zorder=1)
    for name, x in (marks or {}).items():
        axes.axvline(x, label=name, color=GREY, linestyle="--", zorder=1)
    if log:
        axes.set_yscale("log")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    legend_below(figure, axes)
    picture.save(figure)


def legend_below(figure: Figure, axes: Any) -> None:
    """Put the legend that axes have under them; the picture grows by what is beyond eight rows."""
    handles, names = axes.get_legend_handles_labels()
    if (beside := axes.get_legend()) is not None:  # seaborn's
        beside.remove()
    names = [textwrap.fill(name, 90) for name in names]
    columns = 2 if max(map(len, names)) <= 45 else 1
    rows = math.ceil(len(names) / columns)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.21 * max(0, rows - 8))
    styles: dict[str, Any] = {"ncols": columns, "frameon": False, "fontsize": 9}
    figure.legend(handles, names, loc="outside lower center", **styles)


def distance_heat_map(
    omega: ArrayLike, found: ArrayLike, clients: Sequence[int], *, picture: Picture
) -> None:
    """Draw the Euclidean distance of every two client models, ordered by found cluster.

    The largest cluster comes first. Of more than `MOST_DRAWN` clients each cluster's share is
    drawn.

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

    models, labels = np.asarray(omega, dtype=np.float64), np.asarray(found)
    order = _by_cluster(labels)
    # Not by the expanded square: fused models differ by 1e-5, which its cancellation would hide.
    distances = cdist(models[order], models[order])
    hint = "Dark: the two clients hold nearly the same model. Framed: the clusters found."
    figure, axes = picture.axes((8.0, 7.0), hint)
    # Where all models are equal the colour bar would otherwise show negative distances.
    largest = float(distances.max()) or 1.0
    image = axes.imshow(distances, cmap="YlGnBu_r", interpolation="nearest", vmin=0.0, vmax=largest)
    label = "distance of two client models, ‖ω$_i$ − ω$_j$‖"
    figure.colorbar(image, ax=axes, shrink=0.85, label=label)
    for cluster in np.unique(labels):
        places = np.flatnonzero(labels[order] == cluster)
        if len(places) > 1:
            corner, size = (places[0] - 0.5, places[0] - 0.5), len(places)
            axes.add_patch(Rectangle(corner, size, size, fill=False, edgecolor="#D55E00", lw=2))
    names = [str(clients[i]) for i in order] if len(order) <= 25 else []
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel(f"{len(order):,} of {len(models):,} clients, by found cluster")
    axes.grid(visible=False)
    picture.save(figure)


def embedding(
    omega: ArrayLike, found: ArrayLike, true: ArrayLike | None, *, picture: Picture
) -> None:
    """Draw the client models as points of a plane: colour is found cluster, marker is true one.

    The plane is that of classical scaling, in which the distances of the points come nearest to
    those of the models. Points are moved by about a hundredth of the picture, at random, so that
    equal models do not hide each other. Of more than `MOST_DRAWN` clients each cluster's share is
    drawn.

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

    models, labels = np.asarray(omega, dtype=np.float64), np.asarray(found)
    drawn = _by_cluster(labels)[::-1]  # small clusters first, so that they hide no large one
    points, share = _plane(models[drawn])
    width = float(np.ptp(points, axis=0).max()) or 1.0
    points = points + 0.01 * width * np.random.default_rng(0).standard_normal(points.shape)
    figure, axes = picture.axes(
        (8.0, 7.0),
        "Each point is one client, close points hold similar models. The plane shows "
        f"{share:.0%} of the squared distances.",
    )
    x = "first principal coordinate, in the unit of ‖ω$_i$ − ω$_j$‖"
    y = "second principal coordinate"
    colour, marker = "Colour: found cluster", "Marker: true cluster"
    frame = pd.DataFrame({x: points[:, 0], y: points[:, 1], colour: _named(labels)[drawn]})
    styles: dict[str, Any] = {"hue": colour, "palette": _styles(frame[colour], COLOURS, "#BDBDBD")}
    styles["hue_order"] = [*styles["palette"]]
    if true is not None:
        frame[marker] = _named(np.asarray(true))[drawn]
        styles |= {"style": marker, "markers": _styles(frame[marker], MARKERS, "*")}
        styles["style_order"] = [*styles["markers"]]
    sns.scatterplot(frame, x=x, y=y, ax=axes, edgecolor="black", linewidth=0.6, **styles)
    sns.move_legend(axes, "center left", bbox_to_anchor=(1, 0.5), frameon=False)
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


def _by_cluster(labels: NDArray[Any]) -> NDArray[np.intp]:
    """Return the clients to draw by cluster, the largest first; of too many every k-th."""
    _, place, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.lexsort((place, -sizes[place]))
    return order[:: math.ceil(len(order) / MOST_DRAWN)]


def _named(labels: NDArray[Any]) -> NDArray[Any]:
    """Return the name of every client's cluster, one for all beyond the largest and those of one.

    A cluster of one client is no group to look for.
    """
    values, sizes = np.unique(labels, return_counts=True)
    order = np.argsort(-sizes, kind="stable")
    names = np.full(len(labels), _OTHERS, dtype=object)
    for k, label in enumerate(order[: len(COLOURS)]):
        if sizes[label] > 1:
            names[labels == values[label]] = f"cluster {k + 1} ({sizes[label]} clients)"
    return names


def _styles(names: Any, choice: Sequence[str], other: str) -> dict[str, str]:
    """Return a colour or marker for every name, the largest cluster's first."""
    clusters = sorted(set(names) - {_OTHERS})
    styles = dict(zip(clusters, choice, strict=False))
    return styles | ({_OTHERS: other} if _OTHERS in set(names) else {})
