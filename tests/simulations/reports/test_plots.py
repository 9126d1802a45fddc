"""The pictures hold what they should."""

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from simulations.reports import plots
from simulations.reports.plots import Picture, curves, distance_heat_map, embedding


def clustered(sizes: list[int], dim: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Return models in tight groups of these sizes, and the group of each."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    centres = 10 * rng.normal(size=(len(sizes), dim))
    return centres[groups] + 1e-3 * rng.normal(size=(len(groups), dim)), groups


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list:
    """Keep the figures instead of letting them go once they are saved."""
    kept: list = []
    save = Picture.save
    monkeypatch.setattr(
        Picture, "save", lambda self, figure: (kept.append(figure), save(self, figure))
    )
    return kept


def test_metric_draws_every_line_and_every_level(tmp_path, figures):
    curves(
        {"personal model": [(2, 0.7), (1, 0.5)], "one global model": [(1, 0.4), (2, np.inf)]},
        ylabel="test accuracy",
        picture=Picture(tmp_path / "metric.png", "A run"),
        compared=["one global model"],
        levels={"FPFC, published": 0.8946, "LOCAL": 0.8497},
        marks={"groups found": 2},
    )
    axes = figures[0].axes[0]
    personal, one, *flat, mark = [line for line in axes.get_lines() if len(line.get_xdata())]
    # By round, whatever the order they were given in; an infinite value is left out.
    np.testing.assert_array_equal(personal.get_xydata(), [[1, 0.5], [2, 0.7]])
    np.testing.assert_array_equal(one.get_xydata(), [[1, 0.4]])
    assert personal.get_linewidth() > one.get_linewidth()
    levels = {line.get_label(): line.get_ydata()[0] for line in flat}
    assert levels == {"FPFC, published": 0.8946, "LOCAL": 0.8497}
    assert (mark.get_label(), list(mark.get_xdata())) == ("groups found", [2, 2])
    assert figures[0].get_suptitle() == "A run"


def test_of_several_values_at_one_place_the_mean_and_the_deviation_are_drawn(tmp_path, figures):
    line = [("0.1", 1.0), ("0.1", 3.0), ("0.5", 5.0), ("0.5", 5.0)]
    curves({"a": line}, ylabel="y", xlabel="nu", picture=Picture(tmp_path / "m.png", "t"))
    axes = figures[0].axes[0]
    np.testing.assert_array_equal(axes.get_lines()[0].get_ydata(), [2.0, 5.0])
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    # Of 1 and 3: 2, deviation sqrt(2); of 5 and 5: 5, none.
    assert (band.min(), band.max()) == pytest.approx((2 - np.sqrt(2), 5))


@pytest.mark.slow
def test_heat_map_orders_the_clients_by_cluster(tmp_path, figures):
    omega = np.array([[0.0], [5.0], [0.0], [9.0], [5.0], [5.0]])
    # Clusters {1, 4, 5}, {0, 2} and client 3 alone: by size.
    clients = [0, 2, 3, 5, 7, 8]  # 1, 4 and 6 are malicious
    picture = Picture(tmp_path / "heat.png", "Heat")
    distance_heat_map(omega, [0, 1, 0, 2, 1, 1], clients, picture=picture)
    axes = figures[0].axes[0]
    order = [1, 4, 5, 0, 2, 3]
    expected = cdist(omega[order], omega[order])
    np.testing.assert_array_equal(np.asarray(axes.images[0].get_array()), expected)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "7", "8", "0", "3", "5"]
    boxes = sorted((box.get_x(), box.get_y(), box.get_width()) for box in axes.patches)
    assert boxes == [(-0.5, -0.5, 3), (2.5, 2.5, 2)]


@pytest.mark.slow
def test_embedding_colours_by_found_and_marks_by_true(tmp_path, figures):
    omega, true = clustered([6, 5, 4])
    found = true.copy()
    found[14] = 7  # the last client of the third group was left alone
    embedding(omega, found, true, picture=Picture(tmp_path / "e.png", "Map"))
    (points,) = figures[0].axes[0].collections
    colours = [tuple((face[:3] * 255).round().astype(int)) for face in points.get_facecolors()]
    third, grey = (0x00, 0x9E, 0x73), (0xBD, 0xBD, 0xBD)
    assert (colours.count(third), colours.count(grey), len(set(colours))) == (3, 1, 4)
    names = [text.get_text().strip() for text in figures[0].axes[0].get_legend().get_texts()]
    assert names == [
        "Colour: found cluster",
        "cluster 1 (6 clients)",
        "cluster 2 (5 clients)",
        "cluster 3 (3 clients)",
        "others",
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
