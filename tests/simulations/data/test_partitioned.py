"""FLAME's image data sets: sources, splits, noise, subsets and files."""

import io
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from simulations.data import ClientData, FederatedData, load
from simulations.data.images import Pool
from simulations.data.partitioned import partitioned
from tests.support.refusals import refused

ROOT = Path(os.environ.get("FL_ADMM_DATA", ""))


def parts(client: ClientData) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [p for p in (client.train, client.validation, client.test) if p is not None]


def inputs(data: FederatedData) -> torch.Tensor:
    return torch.cat([x for client in data.clients for x, _ in parts(client)])


def test_noise_has_variance_sigma_i_over_m_in_training_and_test() -> None:
    """Against the same data without noise. sigma = 0.4, m = 4: variances 0.1, 0.2, 0.3, 0.4.

    A part has at least 72 samples (a fifth of the 359 training samples) of 64 pixels: the sample
    variance has a relative s.d. of at most sqrt(2 / 4600) = 2.1 %, the mean one of 0.0094.
    """
    clean, noisy = (
        load("digits", 0, clients=4, partition="noise", sigma=s, validation=True)
        for s in (0.0, 0.4)
    )
    seen = []
    for i, (a, b) in enumerate(zip(clean.clients, noisy.clients, strict=True)):
        for (x, y), (noisy_x, noisy_y) in zip(parts(a), parts(b), strict=True):
            noise = noisy_x - x
            seen.append(noise[0])
            assert torch.equal(y, noisy_y)
            assert noise.var().item() == pytest.approx(0.1 * (i + 1), rel=0.1)
            assert noise.mean().item() == pytest.approx(0, abs=0.05)
    # Its own for every sample and client. Scaled to variance 1, two samples of 64 pixels that share
    # their noise would be equal.
    scaled = torch.stack([n / n.std() for n in seen])
    assert torch.pdist(scaled).min() > 5  # about sqrt(2 * 64) = 11


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"clients": 0}, ["clients", 0]),
        ({"clients": 10, "samples": 9}, ["samples", 9]),
        ({"partition": "dirichlet-label", "beta": 0}, ["beta", 0]),
        ({"partition": "noise", "overlap": True}, ["overlap", "noise"]),
        ({"partition": "noise", "clients": 1000}, ["1 sample(s)", "clients"]),
        ({"partition": "rotation", "groups": 3}, ["groups", 3]),
    ],
)
def test_bad_options(options: dict, named: list[Any]) -> None:
    with refused(ValueError, *named):
        load("digits", 0, **options)


# MNIST


# CIFAR-10


def write_packed(root: Path, images: np.ndarray, labels: np.ndarray) -> Path:
    path = root / "cifar10" / "cifar10_jpeg_q75.npz"
    jpegs = []
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=95)
        jpegs.append(np.frombuffer(buffer.getvalue(), np.uint8))
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path,
        data=np.concatenate(jpegs),
        offset=np.cumsum([0, *map(len, jpegs)]),
        label=labels.astype(np.uint8),
    )
    return path


def colours(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Images of one colour: red = 20 label, green = 200, blue = 60."""
    labels = np.arange(n) % 10
    images = np.full((n, 32, 32, 3), (0, 200, 60), np.uint8)
    images[..., 0] = 20 * labels[:, None, None]
    return images, labels


def assert_colours(data: FederatedData, n: int, atol: float) -> None:
    x = inputs(data)
    y = torch.cat([y for client in data.clients for _, y in parts(client)])
    assert x.shape == (n, 3, 32, 32)
    assert x.is_contiguous()
    rgb = 255 * (x * 0.5 + 0.5)  # docs/methods/flame-notes.md, P12
    assert torch.allclose(rgb[:, 0], 20.0 * y[:, None, None].expand(-1, 32, 32), atol=atol)
    assert torch.allclose(rgb[:, 1], torch.tensor(200.0), atol=atol)
    assert torch.allclose(rgb[:, 2], torch.tensor(60.0), atol=atol)


def test_packed_cifar10_is_read_and_says_that_it_is_lossy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)  # not needed
    write_packed(tmp_path, *colours(60))
    data = load("cifar10", 0, tmp_path, clients=2, partition="noise", sigma=0.0)
    assert data.name == "cifar10 (lossy stand-in: JPEG of quality 75)"
    assert_colours(data, 60, atol=4)  # JPEG moves a colour by a few levels


# The real files


@pytest.mark.parametrize("shape", [(1, 3, 3), (9,)])
def test_rotation_turns_the_pictures_of_a_group(shape: tuple[int, ...]) -> None:
    pictures = torch.arange(40 * 9.0).reshape(40, 1, 3, 3)  # of which no two are alike
    labels = np.arange(40) % 10
    pool = Pool(labels, 10, lambda index: pictures[torch.from_numpy(index)].reshape(-1, *shape))
    data = partitioned(lambda seed, root: pool, "x", 0, ROOT, partition="rotation", clients=4)
    assert data.true_clusters.tolist() == [0, 1, 2, 3]
    for turns, client in enumerate(data.clients):
        seen = []
        for x, y in parts(client):
            assert x.shape[1:] == shape
            back = torch.rot90(x.reshape(-1, 1, 3, 3), -turns, (-2, -1))
            which = (back[:, 0, 0, 0] / 9).long()
            assert torch.equal(back, pictures[which])
            assert y.tolist() == labels[which].tolist()
            seen += which.tolist()
        assert sorted(seen) == list(range(40))
