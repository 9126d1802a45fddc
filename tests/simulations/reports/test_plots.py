"""The pictures: valid, the promised size, holding what they should, the same at every call."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from scipy.spatial.distance import cdist

from simulations.reports import plots
from simulations.reports.plots import Picture, curves, distance_heat_map, embedding


def picture(path: Path, width: int, height: int) -> np.ndarray:
    """Read a PNG as RGB bytes, and check that it is one, of that size and not blank."""
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    image = (imread(path)[:, :, :3] * 255).round().astype(np.uint8)
    assert image.shape == (height, width, 3)
    assert (image != 255).any(axis=2).mean() > 0.005
    return image


def share(image: np.ndarray, colour: str) -> float:
    """Return the share of pixels that have exactly this colour."""
    rgb = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
    return float((image == rgb).all(axis=2).mean())


def clustered(sizes: list[int], dim: int = 8, spread: float = 1e-3, seed: int = 0):
    """Return models in tight groups of these sizes, and the group of each."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    centres = 10 * rng.normal(size=(len(sizes), dim))
    return centres[groups] + spread * rng.normal(size=(len(groups), dim)), groups


def axes_drawn(monkeypatch: pytest.MonkeyPatch):
    """Keep the figures instead of letting them go once they are saved."""
    figures = []
    save = Picture.save
    monkeypatch.setattr(
        Picture, "save", lambda self, figure: (figures.append(figure), save(self, figure))
    )
    return figures


def test_metric_draws_every_line_and_every_level(tmp_path, monkeypatch):
    figures = axes_drawn(monkeypatch)
    curves(
        {"personal model": [(2, 0.7), (1, 0.5)], "one global model": [(1, 0.4), (2, np.inf)]},
        ylabel="test accuracy",
        picture=Picture(tmp_path / "metric.png", "A run", "lr=0.1"),
        compared=["one global model"],
        levels={"FPFC, published": 0.8946, "LOCAL": 0.8497},
    )
    picture(tmp_path / "metric.png", 1200, 750)
    axes = figures[0].axes[0]
    personal, one, *flat = [line for line in axes.get_lines() if len(line.get_xdata())]
    # By round, whatever the order they were given in; an infinite value is left out.
    np.testing.assert_array_equal(personal.get_xydata(), [[1, 0.5], [2, 0.7]])
    np.testing.assert_array_equal(one.get_xydata(), [[1, 0.4]])
    assert personal.get_linewidth() > one.get_linewidth()
    assert {line.get_label(): line.get_ydata()[0] for line in flat} == {
        "FPFC, published": 0.8946,
        "LOCAL": 0.8497,
    }
    assert len({line._unscaled_dash_pattern for line in flat}) == 2  # which is which
    assert [text.get_text() for text in figures[0].texts] == ["A run", "lr=0.1"]


def boxes(figure, *artists):
    """Return the boxes of artists as shares of the picture."""
    figure.draw_without_rendering()
    found = [
        artist.get_window_extent().transformed(figure.transFigure.inverted()) for artist in artists
    ]
    return [[*box.intervalx, *box.intervaly] for box in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ["one"],
        # What FLAME's run shows beside its baselines, whose legend was cut.
        [f"FLAME: hybrid, chosen on the test data {k}" for k in range(8)],
        ["a name of more words than there is room for in the width of a picture, " * 3, "two"],
    ],
    ids=["one", "eight", "longer-than-the-picture"],
)
def test_title_setting_axes_and_legend_are_inside_and_apart(names, tmp_path, monkeypatch):
    figures = axes_drawn(monkeypatch)
    setting = ", ".join(f"setting-{k}=0.{k}" for k in range(20))
    curves(
        {name: [(1, 0.3), (9, 0.9)] for name in names},
        ylabel="test accuracy",
        picture=Picture(tmp_path / "metric.png", "A method on data " * 6, setting),
    )
    (figure,) = figures
    parts = [*figure.texts, figure.axes[0], figure.legends[0]]  # from the top down
    places = boxes(figure, *parts)
    assert np.min(places) >= 0
    assert np.max(places) <= 1
    for above, below in itertools.pairwise(places):
        assert below[3] <= above[2]
    assert places[2][3] - places[2][2] > 0.35  # the axes keep their room


def test_a_setting_is_not_cut_at_its_hyphen(tmp_path):
    names = [f"{'x' * k}, on-excess=clip" for k in range(60, 120)]
    for name in names:
        figure = Picture(tmp_path / "metric.png", "FPFC", name).figure((8, 5))
        assert "on-excess=clip" in figure.texts[1].get_text()


@pytest.mark.slow
def test_the_picture_grows_with_its_legend(tmp_path, monkeypatch):
    # Of thirty methods, each with a long name: one column.
    figures = axes_drawn(monkeypatch)
    names = [f"Method {k}: a kind of model with a name of some length" for k in range(30)]
    curves(
        {name: [(1, 0.3), (9, 0.9)] for name in names},
        ylabel="y",
        picture=Picture(tmp_path / "m.png", "t"),
        compared=names[1:],
    )
    (figure,) = figures
    axes, legend = boxes(figure, figure.axes[0], figure.legends[0])
    assert legend[2] >= 0
    assert legend[3] <= axes[2]
    assert (axes[3] - axes[2]) * figure.get_figheight() > 0.35 * 5


def test_a_logarithmic_axis_leaves_out_what_it_cannot_show(tmp_path, monkeypatch):
    figures = axes_drawn(monkeypatch)
    curve = [(1, 1.0), (2, 1e-9), (3, 0.0)]
    curves({"a": curve}, ylabel="y", picture=Picture(tmp_path / "m.png", "t"), log=True)
    axes = figures[0].axes[0]
    assert axes.get_yscale() == "log"
    np.testing.assert_array_equal(axes.get_lines()[0].get_ydata(), [1.0, 1e-9])


def test_of_several_values_at_one_place_the_mean_and_the_deviation_are_drawn(tmp_path, monkeypatch):
    figures = axes_drawn(monkeypatch)
    line = [("0.1", 1.0), ("0.1", 3.0), ("0.5", 5.0), ("0.5", 5.0)]
    curves({"a": line}, ylabel="y", xlabel="nu", picture=Picture(tmp_path / "m.png", "t"))
    axes = figures[0].axes[0]
    np.testing.assert_array_equal(axes.get_lines()[0].get_ydata(), [2.0, 5.0])
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    # Of 1 and 3: 2, deviation sqrt(2); of 5 and 5: 5, none.
    assert (band.min(), band.max()) == pytest.approx((2 - np.sqrt(2), 5))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.1", "0.5"]


@pytest.mark.slow  # fonts
def test_a_pdf_beside_the_png_on_request(tmp_path):
    for name, pdf in (("a", True), ("b", True), ("c", False)):
        curves(
            {"a": [(1, 1.0)]}, ylabel="y", picture=Picture(tmp_path / f"{name}.png", "t", pdf=pdf)
        )
    first, second = ((tmp_path / name).read_bytes() for name in ("a.pdf", "b.pdf"))
    assert first.startswith(b"%PDF")
    assert first == second
    assert b"/Type3" not in first
    assert not (tmp_path / "c.pdf").exists()


def test_metric_draws_a_single_round(tmp_path, monkeypatch):
    figures = axes_drawn(monkeypatch)
    curves(
        {"personal model": [(600, 4.2)], "one global model": [(600, 5.0)]},
        ylabel="RMSE",
        picture=Picture(tmp_path / "a" / "m.png", "A run"),
    )
    image = picture(tmp_path / "a" / "m.png", 1200, 750)
    assert share(image, "#0072B2") > 0  # the lone point has a marker, a line would not show
    assert figures[0].axes[0].get_xticks().tolist() == [600]  # rounds that there were


@pytest.mark.parametrize("series", [{}, {"personal model": []}, {"personal model": [(1, np.nan)]}])
def test_metric_without_a_finite_value_is_refused(series, tmp_path):
    with pytest.raises(ValueError, match="no finite value to draw"):
        curves(series, ylabel="y", picture=Picture(tmp_path / "m.png", "t"))


@pytest.mark.slow
def test_heat_map_orders_the_clients_by_cluster(tmp_path, monkeypatch):
    figures = axes_drawn(monkeypatch)
    omega = np.array([[0.0], [5.0], [0.0], [9.0], [5.0], [5.0]])
    # Clusters {1, 4, 5}, {0, 2} and client 3 alone: by size, then the one alone.
    clients = [0, 2, 3, 5, 7, 8]  # 1, 4 and 6 are malicious
    distance_heat_map(
        omega, [0, 1, 0, 2, 1, 1], clients, picture=Picture(tmp_path / "heat.png", "Heat")
    )
    picture(tmp_path / "heat.png", 1200, 1050)
    axes = figures[0].axes[0]
    order = [1, 4, 5, 0, 2, 3]
    expected = cdist(omega[order], omega[order])
    np.testing.assert_array_equal(np.asarray(axes.images[0].get_array()), expected)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "7", "8", "0", "3", "5"]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "cluster 1 (3)",
        "cluster 2 (2)",
        "alone (1)",
    ]
    boxes = [(box.get_x(), box.get_y(), box.get_width()) for box in axes.patches]
    assert boxes == [(0, 0, 3), (3, 3, 2)]
    assert "‖ω" in figures[0].axes[1].get_ylabel()


@pytest.mark.slow
def test_embedding_colours_by_found_and_marks_by_true(tmp_path, monkeypatch):
    figures = axes_drawn(monkeypatch)
    omega, true = clustered([6, 5, 4])
    found = true.copy()
    found[14] = 7  # the last client of the third group was left alone
    embedding(omega, found, true, picture=Picture(tmp_path / "e.png", "Map"))
    image = picture(tmp_path / "e.png", 1200, 1050)
    for colour in ("#0072B2", "#D55E00", "#009E73"):
        assert share(image, colour) > 1e-5
    (points,) = figures[0].axes[0].collections
    colours = [tuple((face[:3] * 255).round().astype(int)) for face in points.get_facecolors()]
    counts = Counter(zip(colours, [len(path.vertices) for path in points.get_paths()], strict=True))
    assert sorted(counts.values()) == [1, 3, 5, 6]
    # The client alone is grey, and has the marker of its true cluster.
    grey, third = (0xBD, 0xBD, 0xBD), (0x00, 0x9E, 0x73)
    (corners,) = [corners for colour, corners in counts if colour == third]
    assert counts[grey, corners] == 1
    names = [text.get_text().strip() for text in figures[0].axes[0].get_legend().get_texts()]
    assert names == [
        "Colour: found cluster",
        "cluster 1 (6 clients)",
        "cluster 2 (5 clients)",
        "cluster 3 (3 clients)",
        "1 client alone",
        "Marker: true cluster",
        "cluster 1 (6 clients)",
        "cluster 2 (5 clients)",
        "cluster 3 (4 clients)",
    ]


def test_distances_of_the_plane_are_those_of_the_models():
    # A triangle of sides 3, 4 and 5 in 50 dimensions, far from 0: a plane has room for all of it.
    rng = np.random.default_rng(0)
    corners = np.zeros((3, 50))
    corners[1, 0], corners[2, 1] = 3, 4
    turned = 7 + corners @ np.linalg.qr(rng.normal(size=(50, 50)))[0]
    points, share = plots._plane(turned)
    np.testing.assert_allclose(cdist(points, points), cdist(corners, corners), atol=1e-9)
    assert share == pytest.approx(1)
    # Of the corners of a cube it shows two of three dimensions.
    cube = np.stack(np.meshgrid([0, 1], [0, 1], [0, 1]), axis=-1).reshape(8, 3)
    assert plots._plane(cube.astype(float))[1] == pytest.approx(2 / 3)


def test_every_client_is_next_to_its_own_cluster_and_is_seen():
    # Fused models, such as the twelve of digits-fpfc: t-SNE put one of them among the others.
    omega, groups = clustered([4, 4, 4], dim=650, spread=1e-4)
    points = plots._side_by_side(plots._plane(omega)[0], 1 / 40)
    distances, same = cdist(points, points), groups[:, None] == groups[None, :]
    np.fill_diagonal(same, False)
    others = distances[~same & (distances > 0)]
    assert distances[same].max() < others.min() / 5
    assert distances[same].min() > 0.9 * np.ptp(points, axis=0).max() / 40  # one marker
    # Points that are apart stay where they are.
    grid = np.stack(np.meshgrid(range(5), range(5)), axis=-1).reshape(-1, 2).astype(float)
    np.testing.assert_array_equal(plots._side_by_side(grid, 1 / 40), grid)


@pytest.mark.slow
def test_a_hundred_clients_alone(tmp_path, monkeypatch):
    figures = axes_drawn(monkeypatch)
    omega, alone = clustered([1] * 100)
    distance_heat_map(omega, alone, range(100), picture=Picture(tmp_path / "h.png", "Heat"))
    embedding(omega, alone, alone, picture=Picture(tmp_path / "e.png", "Map"))
    picture(tmp_path / "h.png", 1200, 1050)
    image = picture(tmp_path / "e.png", 1200, 1050)
    assert share(image, "#0072B2") == 0
    heat, plane = figures
    assert [label.get_text() for label in heat.axes[0].get_yticklabels()] == ["alone (100)"]
    assert "Framed" not in heat.axes[0].get_title(loc="left")  # nothing is
    assert "100 clients, each alone" in [
        text.get_text() for text in plane.axes[0].get_legend().get_texts()
    ]


@pytest.mark.slow
def test_more_clusters_than_colours(tmp_path, monkeypatch):
    figures = axes_drawn(monkeypatch)
    omega, groups = clustered([3] * 9 + [1] * 4)
    embedding(omega, groups, None, picture=Picture(tmp_path / "e.png", "Map"))
    names = [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()]
    # Seven colours; what is left is two clusters of 3 and four of 1.
    assert names[:7] == [f"cluster {k} (3 clients)" for k in range(1, 8)]
    assert names[7:] == ["6 others (10 clients)"]


@pytest.mark.slow
def test_equal_models(tmp_path, monkeypatch):
    figures = axes_drawn(monkeypatch)
    for m in (1, 5):
        omega, found = np.ones((m, 3)), np.zeros(m, int)
        distance_heat_map(omega, found, range(m), picture=Picture(tmp_path / "h.png", "Equal"))
        embedding(omega, found, None, picture=Picture(tmp_path / "e.png", "Map"))
        assert figures[-2].axes[0].images[0].get_clim() == (0, 1)


@pytest.mark.slow
def test_of_very_many_clients_each_cluster_has_its_share_in_a_picture(tmp_path, monkeypatch):
    figures = axes_drawn(monkeypatch)
    omega, found = clustered([1500, 600, 300] + [1] * 100)
    mixed = np.random.default_rng(0).permutation(len(omega))
    omega, found = omega[mixed], found[mixed]
    for name in ("h.png", "i.png"):
        distance_heat_map(omega, found, range(2500), picture=Picture(tmp_path / name, "Heat"))
    embedding(omega, found, found, picture=Picture(tmp_path / "e.png", "Map"))
    assert (tmp_path / "h.png").read_bytes() == (tmp_path / "i.png").read_bytes()
    heat, _, plane = (figure.axes[0] for figure in figures)
    assert heat.images[0].get_array().shape == (1000, 1000)
    assert [box.get_width() for box in heat.patches] == [600, 240, 120]  # and 40 alone
    names = ["cluster 1 (1500)", "cluster 2 (600)", "cluster 3 (300)", "alone (100)"]
    assert [label.get_text() for label in heat.get_yticklabels()] == names
    assert sum(len(points.get_offsets()) for points in plane.collections) == 1000
    said = "1,000 of the 2,500 clients"
    assert all(said in axes.get_title(loc="left") for axes in (heat, plane))
