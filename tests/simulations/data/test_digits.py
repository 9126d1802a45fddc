"""digits-swap: every digit dealt once, labels shifted by 3 per group."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from simulations.data import load


@pytest.mark.parametrize("clients", [3, 12, 30])
def test_all_digits_are_dealt_evenly_in_three_groups(clients: int) -> None:
    data = load("digits-swap", 0, clients=clients)
    sizes = [len(c.train[1]) + len(c.test[1]) for c in data.clients]
    assert len(data.clients) == clients
    assert sum(sizes) == 1797
    assert max(sizes) - min(sizes) <= 1
    for client, size in zip(data.clients, sizes, strict=True):
        assert len(client.test[1]) == round(size / 5)
    assert data.true_clusters is not None
    assert data.true_clusters.tolist() == sorted([0, 1, 2] * (clients // 3))


def test_group_g_holds_each_digit_with_its_label_plus_3g() -> None:
    images, labels = load_digits(return_X_y=True)
    label_of = {
        image.tobytes(): int(y)
        for image, y in zip((images / 16).astype(np.float32), labels, strict=True)
    }
    assert len(label_of) == 1797  # no two digits are equal, so pixels identify a digit
    data = load("digits-swap", 5)
    seen = set()
    for g, client in zip([0] * 4 + [1] * 4 + [2] * 4, data.clients, strict=True):
        for x, y in (client.train, client.test):
            for image, label in zip(x.numpy(), y.tolist(), strict=True):
                assert label == (label_of[image.tobytes()] + 3 * g) % 10
                seen.add(image.tobytes())
    assert len(seen) == 1797


def test_pixels_lie_between_0_and_1() -> None:
    x = torch.cat([c.train[0] for c in load("digits-swap", 0).clients])
    assert (x.min(), x.max()) == (0, 1)


@pytest.mark.parametrize("clients", [0, -3, 10])
def test_clients_must_be_a_multiple_of_three(clients: int) -> None:
    with pytest.raises(ValueError, match=f"clients is {clients}, .*multiple of 3"):
        load("digits-swap", 0, clients=clients)


def test_too_many_clients() -> None:
    with pytest.raises(ValueError, match=r"1 sample\(s\).*Use fewer clients"):
        load("digits-swap", 0, clients=1797)
    with pytest.raises(ValueError, match=r"1 training sample\(s\).*validation=false"):
        load("digits-swap", 0, clients=897, validation=True)  # 2 or 3 samples each
