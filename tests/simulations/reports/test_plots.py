"""The pictures: valid, the promised size, holding what they should, the same at every call."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from scipy.spatial.distance import cdist

from simulations.reports import plots
from simulations.reports.plots import distance_heat_map, embedding, metric_over_rounds


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
    save = plots._save
    monkeypatch.setattr(
        plots, "_save", lambda figure, path: (figures.append(figure), save(figure, path))
    )
    return figures


def test_metric_draws_every_line_and_every_published_value(tmp_path, monkeypatch):
    figures = axes_drawn(monkeypatch)
    metric_over_rounds(
        {"personal model": [(2, 0.7), (1, 0.5)], "one global model": [(1, 0.4), (2, np.inf)]},
        ylabel="test accuracy",
        title="A run",
        path=tmp_path / "metric.png",
        published={"FPFC": 0.8946, "LOCAL": 0.8497, "CFL": 0.866},
    )
    picture(tmp_path / "metric.png", 1200, 750)
    axes = figures[0].axes[0]
    personal, one, *dashed = axes.get_lines()
    # By round, whatever the order they were given in; an infinite value is a gap.
    np.testing.assert_array_equal(personal.get_xydata(), [[1, 0.5], [2, 0.7]])
    np.testing.assert_array_equal(one.get_xydata(), [[1, 0.4], [2, np.nan]])
    assert sorted(line.get_ydata()[0] for line in dashed) == [0.8497, 0.866, 0.8946]
    texts = axes.texts
    assert {text.get_text() for text in texts} == {
        "published FPFC: 0.8946",
        "published LOCAL: 0.8497",
        "published CFL: 0.866",
    }
    # Names stay in the order of their values, and 0.05 of the height apart at least: a line of
    # text is 8.5 pt of the roughly 300 pt high axes.
    places = [text.get_position()[1] for text in sorted(texts, key=lambda text: text.xy[1])]
    assert min(np.diff(places)) >= 0.05


@pytest.mark.parametrize("value", [0.3, 0.9])
def test_names_of_close_published_values_stay_inside(value, tmp_path, monkeypatch):
    figures = axes_drawn(monkeypatch)
    metric_over_rounds(
        {"personal model": [(1, 0.3), (9, 0.9)]},
        ylabel="test accuracy",
        title="A run",
        path=tmp_path / "metric.png",
        published={f"method {k}": value + k / 10_000 for k in range(9)},
    )
    places = [text.get_position()[1] for text in figures[0].axes[0].texts]
    assert min(places) >= 0
    assert max(places) <= 1
    assert min(np.diff(places)) >= 0.05


def test_metric_draws_a_single_round(tmp_path):
    metric_over_rounds(
        {"personal model": [(1, 4.2)]}, ylabel="RMSE", title="A run", path=tmp_path / "a" / "m.png"
    )
    image = picture(tmp_path / "a" / "m.png", 1200, 750)
    assert share(image, "#0072B2") > 0  # the lone point has a marker, a line would not show


@pytest.mark.parametrize("series", [{}, {"personal model": []}, {"personal model": [(1, np.nan)]}])
def test_metric_without_a_finite_value_is_refused(series, tmp_path):
    with pytest.raises(ValueError, match="no finite value to draw"):
        metric_over_rounds(series, ylabel="y", title="t", path=tmp_path / "m.png")


def test_heat_map_orders_the_clients_by_cluster(tmp_path, monkeypatch):
    figures = axes_drawn(monkeypatch)
    omega = np.array([[0.0], [5.0], [0.0], [9.0], [5.0], [5.0]])
    # Clusters {1, 4, 5}, {0, 2} and client 3 alone: by size, then the one alone.
    distance_heat_map(omega, [0, 1, 0, 2, 1, 1], path=tmp_path / "heat.png", title="Heat")
    picture(tmp_path / "heat.png", 1200, 1050)
    axes = figures[0].axes[0]
    order = [1, 4, 5, 0, 2, 3]
    expected = cdist(omega[order], omega[order])
    np.testing.assert_array_equal(np.asarray(axes.images[0].get_array()), expected)
    assert [label.get_text() for label in axes.get_xticklabels()] == [str(i) for i in order]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "cluster 1 (3)",
        "cluster 2 (2)",
        "alone (1)",
    ]
    boxes = [(box.get_x(), box.get_y(), box.get_width()) for box in axes.patches]
    assert boxes == [(0, 0, 3), (3, 3, 2)]
    assert "‖ω" in figures[0].axes[1].get_ylabel()


def test_heat_map_of_equal_models(tmp_path, monkeypatch):
    figures = axes_drawn(monkeypatch)
    distance_heat_map(np.ones((5, 3)), np.zeros(5, int), path=tmp_path / "h.png", title="Equal")
    picture(tmp_path / "h.png", 1200, 1050)
    assert figures[0].axes[0].images[0].get_clim() == (0, 1)


def test_embedding_colours_by_found_and_marks_by_true(tmp_path, monkeypatch):
    figures = axes_drawn(monkeypatch)
    omega, true = clustered([6, 5, 4])
    found = true.copy()
    found[14] = 7  # the last client of the third group was left alone
    embedding(omega, found, true, path=tmp_path / "e.png", title="Map", seed=1)
    image = picture(tmp_path / "e.png", 1200, 1050)
    for colour in ("#0072B2", "#D55E00", "#009E73"):
        assert share(image, colour) > 1e-5
    counts = {}
    for points in figures[0].axes[0].collections:
        if len(points.get_offsets()):
            colour = tuple((points.get_facecolor()[0][:3] * 255).round().astype(int))
            corners = len(points.get_paths()[0].vertices)
            counts[colour, corners] = len(points.get_offsets())
    assert sorted(counts.values()) == [1, 3, 5, 6]
    # The client alone is grey, and has the marker of its true cluster.
    grey, third = (0xBD, 0xBD, 0xBD), (0x00, 0x9E, 0x73)
    (corners,) = [corners for colour, corners in counts if colour == third]
    assert counts[grey, corners] == 1
    names = [text.get_text().strip() for text in figures[0].legends[0].get_texts()]
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


@pytest.mark.parametrize("m", [4, pytest.param(24, marks=pytest.mark.slow)])
def test_embedding_is_deterministic(m, tmp_path):
    omega, groups = clustered([m // 2, m // 2], spread=0.5)
    for name in ("a.png", "b.png"):
        embedding(omega, groups, groups, path=tmp_path / name, title="Map", seed=3)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize(("m", "method"), [(2, "principal"), (9, "principal"), (10, "t-SNE")])
def test_embedding_method_goes_by_the_number_of_clients(m, method):
    points, names = plots._plane(clustered([m], spread=1.0)[0], 1)
    assert points.shape == (m, 2)
    assert np.isfinite(points).all()
    assert method in names[0]


@pytest.mark.slow
def test_embedding_keeps_fused_clusters_apart():
    # Every client lies nearer to all of its own cluster than to any other client.
    points, _ = plots._plane(clustered([25, 25, 25, 25], dim=610, spread=1e-5)[0], 1)
    groups = np.repeat(np.arange(4), 25)
    distances, same = cdist(points, points), groups[:, None] == groups[None, :]
    assert distances[same].max() < distances[~same].min()
    # Nor are they single dots: a marker is 8 pt of the 400 pt wide axes, one fiftieth.
    assert distances[same].max() > np.ptp(points, axis=0).max() / 20


@pytest.mark.parametrize("omega", [np.ones((12, 3)), np.ones((1, 3)), np.ones((12, 1))])
def test_embedding_of_equal_models(omega, tmp_path):
    found = np.zeros(len(omega), int)
    embedding(omega, found, None, path=tmp_path / "e.png", title="Map", seed=1)
    picture(tmp_path / "e.png", 1200, 1050)


def test_embedding_of_one_parameter():
    points, _ = plots._plane(np.array([[0.0], [3.0], [1.0]]), 1)
    # Centred at 4/3 and divided by the largest entry 5/3, along one axis of either direction.
    np.testing.assert_allclose(np.abs(np.diff(points[:, 0])), [9 / 5, 6 / 5])


@pytest.mark.slow
def test_a_hundred_clients_alone(tmp_path, monkeypatch):
    figures = axes_drawn(monkeypatch)
    omega, alone = clustered([1] * 100)
    distance_heat_map(omega, alone, path=tmp_path / "h.png", title="Heat")
    embedding(omega, alone, alone, path=tmp_path / "e.png", title="Map", seed=1)
    picture(tmp_path / "h.png", 1200, 1050)
    image = picture(tmp_path / "e.png", 1200, 1050)
    assert share(image, "#0072B2") == 0
    heat, plane = figures
    assert [label.get_text() for label in heat.axes[0].get_yticklabels()] == ["alone (100)"]
    assert "100 clients, each alone" in [text.get_text() for text in plane.legends[0].get_texts()]


@pytest.mark.slow
def test_more_clusters_than_colours(tmp_path, monkeypatch):
    figures = axes_drawn(monkeypatch)
    omega, groups = clustered([3] * 9 + [1] * 4)
    embedding(omega, groups, None, path=tmp_path / "e.png", title="Map", seed=1)
    names = [text.get_text() for text in figures[0].legends[0].get_texts()]
    # Seven colours; what is left is two clusters of 3 and four of 1.
    assert names[1:8] == [f"cluster {k} (3 clients)" for k in range(1, 8)]
    assert names[8:] == ["6 others (10 clients)"]


@pytest.mark.parametrize("draw", [distance_heat_map, embedding])
@pytest.mark.parametrize(
    ("omega", "found", "message"),
    [
        (np.ones(3), [0, 0, 0], r"omega has shape \(3,\)"),
        (np.ones((3, 2)), [0, 0], r"found has shape \(2,\).*3 rows"),
        ([[1.0], [np.nan]], [0, 1], "1 of 2 clients are not finite .first: client 1"),
    ],
)
def test_bad_arrays_are_refused(draw, omega, found, message, tmp_path):
    more = {"true": None, "seed": 1} if draw is embedding else {}
    with pytest.raises(ValueError, match=message):
        draw(omega, found, path=tmp_path / "p.png", title="t", **more)
    assert not (tmp_path / "p.png").exists()
