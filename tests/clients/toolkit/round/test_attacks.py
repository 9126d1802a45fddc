"""Malicious clients: what they upload, who they are, and that nothing else is changed by them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.server import ServerAppComponents, ServerConfig
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from numpy.testing import assert_allclose, assert_array_equal

from clients import (
    Attack,
    AttackingClient,
    FedADMMClient,
    FedGiAClient,
    FLAMEClient,
    FPFCClient,
    attacked_app,
    attacked_client_fn,
    client_app,
)
from clients.toolkit.round.attacks import random_labels
from fl_admm_strategies import (
    FLAME,
    FPFC,
    FedADMM,
    FedGiA,
    InProcessGrid,
    LegacyStrategy,
    SmoothedSCAD,
    run_in_process,
)
from tests.support.cases import CHEAP
from tests.support.federation import (
    Adding,
    Mean,
    assert_same_runs,
    client_fn_of,
    differs,
    initial_arrays,
)

# BASELINES: numpy's default_rng(7), sigma^2 = 0.1.
GOLDEN = {
    "same-value": [0.0003890086, 0.0003890086, 0.0003890086],
    "sign-flip": [-0.0001945043, 0.0003890086, -0.0007780173],
    "gaussian": [0.0003890086, 0.0944716339, -0.0866900016],
    "one-huge": [1e30, -1.0, 2.0],
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_what_is_uploaded(kind: Any) -> None:
    honest = {"w": np.array([0.5, -1.0, 2.0]), "steps": np.array(3)}
    attack = Attack(kind, 0.5, None if kind == "one-huge" else np.sqrt(0.1))
    sent = attack.draw(honest, np.random.default_rng(7))
    assert_allclose(sent["w"], GOLDEN[kind], atol=1e-10)
    assert sent["steps"] is honest["steps"]
    assert honest["w"][0] == 0.5


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_one_value_is_in_all_arrays_and_types_are_kept(dtype: Any) -> None:
    honest = {"w": np.ones((2, 3), dtype), "b": np.ones((), dtype), "none": np.ones(0, dtype)}
    for kind in GOLDEN:
        sent = Attack(kind, 0.5).draw(honest, np.random.default_rng(1))  # type: ignore[arg-type]
        assert {n: (a.shape, a.dtype) for n, a in sent.items()} == {
            n: (a.shape, a.dtype) for n, a in honest.items()
        }
    sent = Attack("same-value", 0.5).draw(honest, np.random.default_rng(1))
    assert len({*sent["w"].ravel().tolist(), float(sent["b"])}) == 1


def test_labels_are_drawn_once_from_seed_and_client() -> None:
    labels = np.arange(8, dtype=np.int32)
    drawn = random_labels(labels, 10, np.random.default_rng(7))
    assert drawn.tolist() == [9, 6, 6, 8, 5, 7, 8, 2]
    assert drawn.dtype == np.int32
    attack = Attack("random-labels", 0.5, seed=3)
    own = attack.poisoned(labels, 10, 4)
    assert_array_equal(attack.poisoned(labels, 10, 4), own)
    assert differs({"y": attack.poisoned(labels, 10, 5)}, {"y": own})
    assert differs({"y": Attack("random-labels", 0.5).poisoned(labels, 10, 4)}, {"y": own})
    # Of two classes the other: drawn at random half of them would be true.
    assert attack.poisoned(np.array([0, 1, 1]), 2, 4).tolist() == [1, 0, 0]
    many = attack.poisoned(np.zeros(9000, int), 3, 0)
    assert Counter(many.tolist()).keys() == {0, 1, 2}
    assert min(Counter(many.tolist()).values()) > 2850


def test_an_attack_on_labels_is_none_on_messages() -> None:
    attack = Attack("random-labels", 0.5)
    honest = {"w": np.ones(2)}
    assert_array_equal(attack.draw(honest, np.random.default_rng(7))["w"], [1, 1])
    fn = client_fn_of(Adding)
    for wrapped, inner in ((attacked_client_fn, fn), (attacked_app, client_app(fn))):
        with pytest.raises(ValueError, match=r"an attack on the data.*attack.poisoned\("):
            wrapped(inner, attack)  # type: ignore[operator]


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
    ("settings", "message"),
    [
        ({"kind": "zero", "ratio": 0.1}, "kind is 'zero', expected 'same-value' or 'sign-flip'"),
        ({"kind": "gaussian", "ratio": 1.0}, r"ratio is 1.0, expected a number in \[0, 1\)"),
        ({"kind": "gaussian", "ratio": 0.1, "sigma": 0}, "sigma is 0, expected a finite number"),
        (
            {"kind": "one-huge", "ratio": 0.1, "sigma": 2.0},
            "'one-huge' draws no such number",
        ),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Attack(**settings)


# --- In a run -------------------------------------------------------------------------------------

SIGNS = Attack("sign-flip", 0.5, seed=2)  # of four clients 0 and 1, say


def mean_run(app: ClientApp, nodes: int = 4, **settings: Any) -> Mean:
    strategy = Mean(seed=1, **settings)
    strategy.start(InProcessGrid(app, nodes), CHEAP.initial_arrays(), 3)
    return strategy


def test_a_ratio_of_0_changes_no_bit() -> None:
    none, fn = Attack("gaussian", 0.0), client_fn_of(Adding)
    plain = mean_run(client_app(fn))
    assert_same_runs(mean_run(client_app(attacked_client_fn(fn, none))), plain)
    assert_same_runs(mean_run(attacked_app(client_app(fn), none)), plain)


def test_a_client_and_an_app_are_attacked_alike_on_any_number_of_nodes() -> None:
    fn = client_fn_of(Adding)
    plain, wanted = mean_run(client_app(fn)), mean_run(client_app(attacked_client_fn(fn, SIGNS)))
    bad = SIGNS.malicious(4)
    assert len(bad) == 2
    assert sorted(wanted.evaluate_metrics[3]) == [c for c in range(4) if c not in bad]
    assert sorted(wanted.train_metrics[3]) == [0, 1, 2, 3]
    assert differs(wanted.state_dict(), plain.state_dict())
    for app, nodes in [
        (attacked_app(client_app(fn), SIGNS), 4),
        (client_app(attacked_client_fn(fn, SIGNS), num_clients=4), 1),
        (attacked_app(client_app(fn, num_clients=4), SIGNS, num_clients=4), 2),
        (attacked_app(client_app(fn, num_clients=4), SIGNS, num_clients=4), 4),
    ]:
        assert_same_runs(mean_run(app, nodes), wanted)


def test_clients_of_the_legacy_api_are_attacked_as_well() -> None:
    class Known(Adding):
        def get_properties(self, config: Any) -> Any:
            return {"client-id": self.client, "num-clients": 4}

    fn = client_fn_of(Known)
    found = []
    for app in (ClientApp(attacked_client_fn(fn, SIGNS)), attacked_app(ClientApp(fn), SIGNS)):
        strategy = Mean(seed=1)

        def server_fn(context: Context) -> ServerAppComponents:
            legacy = LegacyStrategy(strategy, CHEAP.initial_arrays())  # noqa: B023
            return ServerAppComponents(strategy=legacy, config=ServerConfig(num_rounds=3))

        run_in_process(ServerApp(server_fn=server_fn), app, 4)
        found.append(strategy)
    wanted = mean_run(client_app(attacked_client_fn(fn, SIGNS)))
    for strategy in found:
        assert_same_runs(strategy, wanted)


def test_an_app_of_ones_own_under_flowers_fedavg_is_attacked() -> None:
    class Ones(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            return [np.ones_like(array) for array in parameters], 1, {}

        def evaluate(self, parameters: Any, config: Any) -> Any:
            return 0.0, 1, {}

    app = attacked_app(client_app(lambda _: Ones().to_client()), Attack("one-huge", 0.25))
    result = FedAvg(fraction_evaluate=0).start(
        InProcessGrid(app, 4), CHEAP.initial_arrays(), num_rounds=1
    )
    assert result.arrays["w"].numpy().max() == pytest.approx(2.5e29)


def test_a_node_that_does_not_say_who_it_is_is_told() -> None:
    context = Context(0, 1, {}, ArrayRecord(), {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"node_config is \{\}, expected partition-id and"):
        attacked_client_fn(lambda _: Ones(), SIGNS)(context)  # type: ignore[name-defined]  # noqa: F821


# --- What of an upload is attacked ----------------------------------------------------------------


def upload_of(strategy: Any, client_class: Any) -> tuple[Any, dict[int, dict[str, Any]], Any]:
    """Return the strategy, the uploads of a round, and what the clients were sent."""
    seen: dict[int, dict[str, Any]] = {}
    update = strategy.update

    def watch(server_round: int, replies: Any) -> None:
        seen.update({client: dict(reply.arrays) for client, reply in replies.items()})
        update(server_round, replies)

    strategy.update = watch
    fn = attacked_client_fn(client_fn_of(client_class), Attack("same-value", 0.5, 0.1, seed=2))
    strategy.start(InProcessGrid(client_app(fn), 2), initial_arrays(), 1)
    (bad,) = Attack("same-value", 0.5, seed=2).malicious(2)
    return strategy, seen[bad], bad


def constant(array: Any) -> bool:
    return np.ptp(array) < 1e-6


def test_of_fpfc_the_clustered_block() -> None:
    fpfc = FPFC(SmoothedSCAD(0.5), clustered="^head", local_epochs=1, fraction_evaluate=0)
    _, upload, _ = upload_of(fpfc, FPFCClient)
    assert [name for name, array in upload.items() if constant(array)] == [
        "head.weight",
        "head.bias",
    ]


def test_of_fedadmm_the_message_that_the_mean_is_taken_of() -> None:
    fedadmm = FedADMM(local_epochs=1, fraction_evaluate=0)
    strategy, upload, bad = upload_of(fedadmm, FedADMMClient)
    assert not constant(upload["head.weight"])
    own = strategy.state.consensus.clients[bad]
    assert constant(own.u + own.pi / strategy.rho)
    changes = FedADMM(local_epochs=1, fraction_evaluate=0, duals="client")
    _, upload, _ = upload_of(changes, FedADMMClient)
    assert all(constant(array) for array in upload.values())


def test_of_flame_theta_and_of_fedgia_z() -> None:
    _, upload, _ = upload_of(FLAME(fraction_evaluate=0), FLAMEClient)
    assert all(constant(array) for array in upload.values())
    _, upload, _ = upload_of(FedGiA(curvature=2.0, fraction_evaluate=0), FedGiAClient)
    assert {name.partition("/")[0] for name, a in upload.items() if not constant(a)} == {"dual"}


def test_a_handshake_is_honest() -> None:
    class Curved(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            return [np.ones(2)], 3, {"curvature": 1.0}

    client = AttackingClient(Curved(), Attack("gaussian", 0.5), 0)
    (array,), _, _ = client.fit([], {"handshake": True})
    assert_array_equal(array, np.ones(2))
