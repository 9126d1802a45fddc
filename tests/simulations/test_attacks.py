"""Malicious clients: what they upload, who they are, and that nothing else changes by them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from numpy.testing import assert_allclose, assert_array_equal

from clients import client_app
from fl_admm_strategies import InProcessGrid
from simulations.attacks import (
    Attack,
    AttackingClient,
    attacked_client_fn,
)
from tests.support.cases import CHEAP
from tests.support.federation import (
    Adding,
    Mean,
    assert_same_runs,
    client_fn_of,
    differs,
)

# BASELINES: numpy's default_rng(7), sigma^2 = 0.1.
GOLDEN = {
    "same-value": [0.0003890086, 0.0003890086, 0.0003890086],
    "sign-flip": [-0.0001945043, 0.0003890086, -0.0007780173],
    "gaussian": [0.0003890086, 0.0944716339, -0.0866900016],
    "one-huge": [1e9, -1.0, 2.0],
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_what_is_uploaded(kind: Any) -> None:
    honest = {"w": np.array([0.5, -1.0, 2.0]), "steps": np.array(3)}
    attack = Attack(kind, 0.5, None if kind == "one-huge" else np.sqrt(0.1))
    sent = attack.draw(honest, np.random.default_rng(7))
    assert_allclose(sent["w"], GOLDEN[kind], atol=1e-10)
    assert sent["steps"] is honest["steps"]
    assert honest["w"][0] == 0.5


def test_labels_are_drawn_once_from_seed_and_client() -> None:
    labels = np.arange(8, dtype=np.int32)
    attack = Attack("random-labels", 0.5, seed=3)
    own = attack.poisoned(labels, 10, 4)
    drawn = np.random.default_rng([3, 4, *b"labels"]).integers(0, 10, 8)
    assert_array_equal(own, drawn)
    assert own.dtype == np.int32
    assert_array_equal(attack.poisoned(labels, 10, 4), own)
    assert differs({"y": attack.poisoned(labels, 10, 5)}, {"y": own})
    assert differs({"y": Attack("random-labels", 0.5).poisoned(labels, 10, 4)}, {"y": own})
    # Of two classes the other: drawn at random half of them would be true.
    assert attack.poisoned(np.array([0, 1, 1]), 2, 4).tolist() == [1, 0, 0]


def test_an_attack_on_labels_is_none_on_messages() -> None:
    attack = Attack("random-labels", 0.5)
    honest = {"w": np.ones(2)}
    assert_array_equal(attack.draw(honest, np.random.default_rng(7))["w"], [1, 1])
    with pytest.raises(ValueError, match="random-labels"):
        attacked_client_fn(client_fn_of(Adding), attack)


def test_who_is_malicious_follows_from_the_seed() -> None:
    assert Attack("gaussian", 0.29).malicious(100) == Attack("one-huge", 0.29).malicious(100)
    assert len(Attack("gaussian", 0.29).malicious(100)) == 29
    assert Attack("gaussian", 0.04).malicious(20) == frozenset()
    drawn = Counter(
        c for seed in range(300) for c in Attack("gaussian", 0.25, None, seed).malicious(8)
    )
    assert min(drawn.values()) > 45  # of 75
    assert max(drawn.values()) < 105


def test_every_upload_is_drawn_anew() -> None:
    attack, honest = Attack("same-value", 0.5, seed=3), {"w": np.ones(1)}
    values = [float(attack.replace(honest, c, r)["w"][0]) for c in range(3) for r in range(3)]
    assert len(set(values)) == 9
    assert attack.replace(honest, 1, 1)["w"][0] == values[4]


@pytest.mark.parametrize(
    ("setting", "settings"),
    [
        ("kind", {"kind": "zero", "ratio": 0.1}),
        ("ratio", {"kind": "gaussian", "ratio": 1.0}),
        ("sigma", {"kind": "one-huge", "ratio": 0.1, "sigma": 2.0}),
    ],
)
def test_settings_are_checked(setting: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=setting):
        Attack(**settings)


# --- In a run -------------------------------------------------------------------------------------

SIGNS = Attack("sign-flip", 0.5, seed=2)  # of four clients 0 and 1, say


def mean_run(app: ClientApp, nodes: int = 4, **settings: Any) -> Mean:
    strategy = Mean(seed=1, **settings)
    strategy.start(InProcessGrid(app, nodes), CHEAP.initial_arrays(), 3)
    return strategy


def test_clients_are_attacked_alike_on_any_number_of_nodes() -> None:
    fn = client_fn_of(Adding)
    plain, wanted = mean_run(client_app(fn)), mean_run(client_app(attacked_client_fn(fn, SIGNS)))
    bad = SIGNS.malicious(4)
    assert len(bad) == 2
    assert sorted(wanted.evaluate_metrics[3]) == [c for c in range(4) if c not in bad]
    assert sorted(wanted.train_metrics[3]) == [0, 1, 2, 3]
    assert differs(wanted.state_dict(), plain.state_dict())
    on_one = mean_run(client_app(attacked_client_fn(fn, SIGNS), num_clients=4), 1)
    assert_same_runs(on_one, wanted)


def test_a_handshake_is_honest() -> None:
    class Curved(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            return [np.ones(2)], 3, {"curvature": 1.0}

    client = AttackingClient(Curved(), Attack("gaussian", 0.5), 0)
    (array,), _, _ = client.fit([], {"handshake": True})
    assert_array_equal(array, np.ones(2))
