"""digits-swap: every digit dealt once, labels shifted by 3 per group."""

import numpy as np
from sklearn.datasets import load_digits

from simulations.data import load
from tests.support.refusals import refused


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


def test_clients_that_do_not_fit_are_refused() -> None:
    with refused(ValueError, "clients", 10, 3):
        load("digits-swap", 0, clients=10)
    with refused(ValueError, "1 training sample(s)", "validation"):
        load("digits-swap", 0, clients=897, validation=True)
