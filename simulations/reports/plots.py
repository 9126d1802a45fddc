"""The pictures a run leaves behind: the metric over rounds, who is close to whom, and a map.

The heat map and the map of the client models are those of figure 3 of FPFC (Yu et al.,
arXiv:2211.04218). Everything is drawn through matplotlib's ``Figure`` objects: no ``pyplot``, so
no global state, no window and no display is needed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray
from scipy.spatial.distance import cdist
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE

DPI = 150

# Okabe and Ito's palette, which people with any of the common colour deficiencies tell apart;
# its black is kept for edges and text.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LINES = ("-", "--", "-.", ":")
_GREY = "#6B6B6B"
_OTHER_COLOUR, _OTHER_MARKER = "#BDBDBD", "*"

# Fewer clients than this have no neighbourhoods to speak of: t-SNE then draws noise.
_FEWEST_FOR_TSNE = 10


def metric_over_rounds(
    series: Mapping[str, Sequence[tuple[int, float]]],
    *,
    ylabel: str,
    title: str,
    path: str | Path,
    published: Mapping[str, float] | None = None,
) -> None:
    """Draw how a metric moved over the rounds, beside the published values.

    Parameters
    ----------
    series : Mapping[str, Sequence[tuple[int, float]]]
        For every line its name (such as "personal model") and its (round, value) pairs. A value
        that is not finite leaves a gap.
    ylabel : str
        Name and unit of the metric, such as "test accuracy (%)".
    title : str
        Title of the picture.
    path : str or Path
        The PNG file to write, 1200 x 750 pixels.
    published : Mapping[str, float], optional
        Published values by name, in the unit of ``ylabel``: a dashed horizontal line each.

    Raises
    ------
    ValueError
        If no series holds a finite value.
    """
    lines = {
        name: np.array(sorted(points), dtype=np.float64).reshape(-1, 2)
        for name, points in series.items()
    }
    if not any(np.isfinite(line[:, 1]).any() for line in lines.values()):
        raise ValueError(
            f"no finite value to draw in the series {list(series)}: evaluate at least once during "
            "the run, and look for a diverged model if every value is NaN or infinite."
        )
    figure, axes = _figure(title, "", (8.0, 5.0))
    for k, (name, line) in enumerate(lines.items()):
        finite = np.where(np.isfinite(line[:, 1]), line[:, 1], np.nan)
        axes.plot(
            line[:, 0],
            finite,
            label=name,
            color=_COLOURS[k % len(_COLOURS)],
            linestyle=_LINES[k % len(_LINES)],
            # A lone point draws no line, and a few points should be seen as what they are.
            marker=_MARKERS[k % len(_MARKERS)] if len(line) <= 25 else None,
            markersize=5,
            linewidth=2,
        )
    if published:
        _published_lines(axes, published)
    axes.set_xlabel("communication round")
    axes.set_ylabel(ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=_legend_columns(lines), frameon=False)
    _save(figure, path)


def _legend_columns(names: Collection[str]) -> int:
    """Return how many entries fit side by side under the picture."""
    longest = max(map(len, names))
    return max(1, min(len(names), int(7.8 / (0.65 + 0.085 * longest))))


def distance_heat_map(omega: ArrayLike, found: ArrayLike, *, path: str | Path, title: str) -> None:
    """Draw the Euclidean distance of every two client models, ordered by found cluster.

    The largest cluster comes first, clients that are alone in their cluster come last, as one
    block.

    Parameters
    ----------
    omega : array_like of shape (m, d)
        The client models omega_i, one per row.
    found : array_like of int, shape (m,)
        Label of the cluster that was found for each client.
    path : str or Path
        The PNG file to write, 1200 x 1050 pixels.
    title : str
        Title of the picture.

    Raises
    ------
    ValueError
        If the shapes do not fit or a model is not finite.
    """
    models, labels = _checked(omega, found, "found")
    m = len(models)
    groups = _by_size(labels)
    order = np.concatenate(groups)
    # Not by the expanded square: fused models differ by 1e-5, which its cancellation would hide.
    distances = cdist(models[order], models[order])

    blocks = [len(group) for group in groups if len(group) > 1]
    alone = m - sum(blocks)
    names = [f"cluster {k + 1} ({size})" for k, size in enumerate(blocks)]
    if alone:
        blocks.append(alone)
        names.append(f"alone ({alone})")

    figure, axes = _figure(
        title,
        "Dark: the two clients hold nearly the same model. Framed: the clusters found.",
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
        axes.hlines(edges[1:-1], 0, m, color=_GREY, linewidth=0.7)
        axes.vlines(edges[1:-1], 0, m, color=_GREY, linewidth=0.7)
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
        axes.set_xticks(np.arange(m) + 0.5, [str(i) for i in order], fontsize=9)
        axes.set_xlabel("client number")
    else:
        axes.set_xticks([])
        axes.set_xlabel(f"the same {m} clients, in the same order")
    _save(figure, path)


def embedding(
    omega: ArrayLike,
    found: ArrayLike,
    true: ArrayLike | None,
    *,
    path: str | Path,
    title: str,
    seed: int,
) -> None:
    """Draw the client models as points of a plane: colour is found cluster, marker is true one.

    The plane is t-SNE's, as in figure 3 of FPFC, or that of the two principal components where
    there are fewer than 10 clients. Models that are all equal are drawn in a row. The same
    models and seed give the same picture.

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
    path : str or Path
        The PNG file to write, 1200 x 1050 pixels.
    title : str
        Title of the picture.
    seed : int
        Seed of what is random in the two methods.

    Raises
    ------
    ValueError
        If the shapes do not fit or a model is not finite.
    """
    models, found_labels = _checked(omega, found, "found")
    true_labels = None if true is None else _checked(omega, true, "true")[1]
    points, axis_names = _plane(models, seed)
    figure, axes = _figure(title, "Each point is one client; close points hold similar models.")

    colours, colour_key = _classes(found_labels, _COLOURS, _OTHER_COLOUR)
    handles = [Line2D([], [], linestyle="none", label="Colour: found cluster")]
    handles += [_key(name, colour, "o") for name, colour in colour_key]
    if true_labels is None:
        markers = np.full(len(models), _MARKERS[0], dtype=object)
    else:
        markers, marker_key = _classes(true_labels, _MARKERS, _OTHER_MARKER)
        handles.append(Line2D([], [], linestyle="none", label="\nMarker: true cluster"))
        handles += [_key(name, "white", marker) for name, marker in marker_key]
    figure.legend(handles=handles, loc="outside right center", frameon=False)

    # The other clusters' points first, so that they hide no coloured one.
    for colour in (_OTHER_COLOUR, *_COLOURS):
        for marker in (_OTHER_MARKER, *_MARKERS):
            here = (colours == colour) & (markers == marker)
            axes.scatter(
                points[here, 0],
                points[here, 1],
                c=colour,
                marker=marker,
                s=70 if len(models) <= 200 else 20,
                edgecolors="black",
                linewidths=0.6,
                alpha=0.85,
            )
    axes.set_xlabel(axis_names[0])
    axes.set_ylabel(axis_names[1])
    axes.set_xticks([])
    axes.set_yticks([])
    axes.margins(0.08)
    # One scale for both axes: a distance means the same in every direction.
    axes.set_aspect("equal", adjustable="datalim")
    _save(figure, path)


def _plane(models: NDArray[np.float64], seed: int) -> tuple[NDArray[np.float64], tuple[str, str]]:
    """Return a place in the plane for every model, shape (m, 2), and the names of the axes."""
    m = len(models)
    centred = models - models.mean(axis=0)
    scale = float(np.abs(centred).max())
    if scale <= 1e-12 * max(1.0, float(np.abs(models).max())):
        # Neither method is defined here: both divide by the spread.
        row = np.column_stack((np.arange(m, dtype=np.float64), np.zeros(m)))
        return row, ("all client models are equal; drawn in a row to be seen", "")
    # Both methods want at least two columns; a column of zeros moves no point.
    centred = np.pad(centred / scale, ((0, 0), (0, max(0, 2 - centred.shape[1]))))
    if m < _FEWEST_FOR_TSNE:
        pca = PCA(n_components=2, random_state=seed)
        points = np.asarray(pca.fit_transform(centred), dtype=np.float64)
        return points, ("first principal component", "second principal component")
    # Fewer neighbours than a cluster has members, else t-SNE draws a fused cluster as one dot.
    perplexity = min(30.0, max(3.0, m / 10))
    # The approximate form gains nothing on few points, and waits for its threads on a busy machine.
    method = "exact" if m <= 200 else "barnes_hut"
    tsne = TSNE(perplexity=perplexity, init="pca", random_state=seed, method=method)
    points = np.asarray(tsne.fit_transform(centred), dtype=np.float64)
    return points, ("t-SNE, first axis (no unit)", "t-SNE, second axis (no unit)")


def _checked(
    omega: ArrayLike, labels: ArrayLike, name: str
) -> tuple[NDArray[np.float64], NDArray[Any]]:
    models = np.asarray(omega, dtype=np.float64)
    label_array = np.asarray(labels)
    if models.ndim != 2 or models.size == 0:
        raise ValueError(
            f"omega has shape {models.shape}; give one client model per row, shape (m, d)."
        )
    if label_array.shape != (len(models),):
        raise ValueError(
            f"{name} has shape {label_array.shape}; give one label for each of the "
            f"{len(models)} rows of omega."
        )
    diverged = np.flatnonzero(~np.isfinite(models).all(axis=1))
    if diverged.size:
        raise ValueError(
            f"the models of {diverged.size} of {len(models)} clients are not finite (first: client "
            f"{diverged[0]}): the run diverged; try a smaller learning rate."
        )
    return models, label_array


def _by_size(labels: NDArray[Any]) -> list[NDArray[np.intp]]:
    """Return the clients of every cluster, largest cluster first, ties by first client."""
    groups = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    return sorted(groups, key=lambda group: (-len(group), group[0]))


def _classes(
    labels: NDArray[Any], own: Sequence[str], other: str
) -> tuple[NDArray[Any], list[tuple[str, str]]]:
    """Give the largest clusters a look of their own and the rest one look; return it with its key.

    A cluster of one client is no group to look for, so it never has a look of its own.
    """
    looks = np.full(len(labels), other, dtype=object)
    groups = _by_size(labels)
    named = [group for group in groups if len(group) > 1][: len(own)]
    key = []
    for k, group in enumerate(named):
        looks[group] = own[k]
        key.append((f"cluster {k + 1} ({len(group)} clients)", own[k]))
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


def _published_lines(axes: Axes, published: Mapping[str, float]) -> None:
    """Draw the published values, their names spread to the right so that none covers another."""
    names = sorted(published, key=lambda name: published[name])
    for name in names:
        axes.axhline(published[name], color=_GREY, linestyle=(0, (5, 4)), linewidth=1.0)
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top)
    heights = [(published[name] - bottom) / (top - bottom) for name in names]
    # A line of text's share of the height. First upwards from the lowest, then back down from the
    # top edge, so that the names leave the axes at neither end while there is room.
    gap = 0.052
    places = list(heights)
    for k in range(1, len(places)):
        places[k] = max(places[k], places[k - 1] + gap)
    places[-1] = min(places[-1], 1.0)
    for k in range(len(places) - 2, -1, -1):
        places[k] = min(places[k], places[k + 1] - gap)
    for name, height, place in zip(names, heights, places, strict=True):
        axes.annotate(
            f"published {name}: {published[name]:g}",
            xy=(1.0, height),
            xytext=(1.04, place),
            xycoords="axes fraction",
            fontsize=8.5,
            color=_GREY,
            verticalalignment="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": _GREY,
                "linewidth": 0.6,
                "relpos": (0.0, 0.5),
                "shrinkA": 1,
                "shrinkB": 0,
            },
        )


def _figure(title: str, hint: str, inches: tuple[float, float] = (8.0, 7.0)) -> tuple[Figure, Axes]:
    figure = Figure(figsize=inches, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(textwrap.fill(title, 78), x=0.02, ha="left", fontsize=13, fontweight="bold")
    axes = figure.add_subplot()
    if hint:
        axes.set_title(hint, fontsize=10, color=_GREY, loc="left")
    return figure, axes


def _save(figure: Figure, path: str | Path) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    # Without the version of matplotlib in the file: the same run leaves the same bytes.
    figure.savefig(path, format="png", metadata={"Software": None})
