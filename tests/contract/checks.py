"""What every method promises, one check a promise: ``check_strategy(case)`` runs them all.

A check raises `AssertionError` where the method breaks its promise. It looks at a method as its
users do: the strategy, its clients, the messages between them and the result.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    Context,
    Message,
    MessageType,
    RecordDict,
)
from flwr.client import NumPyClient

from clients import client_app
from fl_admm_strategies import FPFC, ClientDP, StatefulStrategy, StepDecay, load_models, made_by
from fl_admm_strategies.runtime.uploads import GOES_WITH
from tests.support.cases import (
    NUM_CLIENTS,
    Case,
    case_of,
    grid_of,
    plain,
    run,
    sampling,
)
from tests.support.federation import (
    AWAY,
    FAULTS,
    FROM_ROUND_3,
    GONE_AND_BACK,
    INITIAL,
    JOINING,
    PARTITIONS,
    Federation,
    assert_close,
    assert_equal_to_rounding,
    assert_same_bits,
    assert_same_runs,
    client_fn_of,
    differs,
    make_client,
    method_state,
    node_of,
    not_asking,
    trained,
)
from tests.support.refusals import names, refused, warnings_in

TRAIN, EVALUATE = MessageType.TRAIN, MessageType.EVALUATE
EVERYBODY = list(range(NUM_CLIENTS))
VICTIM = 3

Check = Callable[[Case, Path], None]


@contextmanager
def logged() -> Iterator[Callable[..., list[str]]]:
    """Give what returns the warnings so far that name some words, as the fixture `warned`."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("flwr")
    logger.addHandler(handler)
    try:
        yield lambda *named: warnings_in(records, *named)
    finally:
        logger.removeHandler(handler)


# --- Rounds ---------------------------------------------------------------------------------------


def check_a_seed_repeats_a_run(case: Case, folder: Path) -> None:
    """In whatever order nodes and replies come; another seed gives another run."""
    first, _ = plain(case)
    assert_same_runs(run(case, grid_of(case, shuffled=1), strategy=sampling(case)), first)
    other = run(case, grid_of(case), strategy=sampling(case, seed=2))
    if case.everybody_trains:
        assert differs(method_state(other), method_state(first))
    else:
        assert trained(other) != trained(first)


def check_partial_participation(case: Case, folder: Path) -> None:
    """Only the sampled clients take part, in messages with the layout of Flower's FedAvg."""
    strategy, grid = plain(case)
    assert sorted(trained(strategy)) == [1, 2, 3]
    if not case.everybody_trains:
        assert len(set(map(tuple, trained(strategy).values()))) > 1  # drawn anew each round
    for server_round, clients in trained(strategy).items():
        assert len(clients) == (NUM_CLIENTS if case.everybody_trains else 3)  # 0.5 of 6
        asked = [m.metadata.dst_node_id for m in grid.phase(TRAIN, server_round)]
        assert sorted(asked) == [node_of(client) for client in clients]
        assert len(strategy.evaluate_metrics[server_round]) == 2  # int(0.34 * 6)
    for message in grid.phase(TRAIN, 2):
        assert next(iter(message.content)) == "arrays"
        assert isinstance(message.content["arrays"], ArrayRecord)
        assert message.content["config"]["server-round"] == 2
    for kind, keys in ((TRAIN, {"arrays", "metrics"}), (EVALUATE, {"metrics"})):
        for reply in grid.replies(kind, 2):
            assert set(reply.content) == keys
            assert reply.content["metrics"]["num-examples"] > 0


def check_empty_round(case: Case, folder: Path) -> None:
    """A round without a usable reply changes nothing, and the run goes on."""
    states: list[Any] = []
    strategy = case.strategy(seed=1)

    def on_round(server_round: int, metrics: Any) -> None:
        states.append(copy.deepcopy(method_state(strategy)))

    grid = grid_of(case, raises={client: [2] for client in EVERYBODY})
    with logged() as warned:
        strategy.start(grid, case.initial_arrays(), 3, on_round=on_round)
    assert_same_bits(states[1], states[0])
    assert differs(states[2], states[1]) == (case.server_learns and not case.uploads_once)
    assert len(warned("round 2", f"clients {EVERYBODY}", "refused")) == 1
    assert trained(strategy) == {1: EVERYBODY, 3: EVERYBODY}


def check_failing_clients_fail_alone(case: Case, folder: Path) -> None:
    """A run in which clients fail in every way is the run in which they were not asked."""
    rng = np.random.default_rng(7)
    kinds = ["raises", AWAY, *FAULTS]
    faults: dict[int, dict[int, str]] = {
        client: {r: str(rng.choice(kinds)) for r in range(1, 6) if rng.random() < 0.3}
        for client in EVERYBODY
    }
    raises = {c: [r for r, kind in own.items() if kind == "raises"] for c, own in faults.items()}
    settings = {"seed": 1, "fraction_train": 0.67, "fraction_evaluate": 0.17}
    strategy = case.strategy(**settings)
    with logged() as warned:
        run(case, grid_of(case, faults=faults, raises=raises), 5, strategy)
    absent = {r: [c for c in EVERYBODY if r in faults[c]] for r in range(1, 6)}
    expected = run(case, grid_of(case), 5, not_asking(case.strategy(**settings), absent))
    assert_equal_to_rounding(strategy, expected)
    for client, own in faults.items():
        for kind in own.values():
            if kind in ("raises", "NaN", "wrong shape", "too large") and case.everybody_trains:
                assert warned("refused", f"{client}")


# --- Whose replies --------------------------------------------------------------------------------


class Plain(NumPyClient):
    """A client that sends back what a strategy expects, but trains nothing and knows no method."""

    def __init__(self, context: Context, strategy: StatefulStrategy, stamp: dict[str, int]) -> None:
        self.strategy, self.stamp = strategy, stamp

    def fit(self, parameters: Any, config: Any) -> Any:
        spec = self.strategy.upload_spec()
        if config.get("handshake"):
            asked = self.strategy.handshake([0])
            spec = {} if asked is None else asked.spec
        # A length of -1 may be any.
        arrays = [np.zeros(np.maximum(shape, 1), dtype) for shape, dtype in spec.values()]
        return arrays, 10, {"loss": 1.0, "curvature": 1.0, **self.stamp}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return 1.0, 10, {"accuracy": 0.5, **self.stamp}


def check_other_methods_clients_are_refused(case: Case, folder: Path) -> None:
    """A run with them ends with a sentence, and clients refuse another method's messages."""
    strategy = case.strategy(seed=1)
    name = type(strategy).__name__
    if strategy.method is None:
        return

    def all_plain(context: Context) -> Any:
        return Plain(context, strategy, {}).to_client()

    with refused(RuntimeError, f"{name}Client"):
        run(case, Federation(client_app(all_plain), NUM_CLIENTS), 2, strategy)
    assert strategy.train_metrics == {}

    client: Any = make_client(case.client_class, Context(1, 2, {}, RecordDict(), {}))
    other = "FPFC" if name == "Ditto" else "Ditto"
    for call in (client.fit, client.evaluate):
        for stamp, wanted in ((made_by(other), f"{other}Client"), ({"lr": 0.1}, "FedAvg")):
            with refused(ValueError, type(client).__name__, name, wanted):
                call([], stamp)


def extreme(rng: np.random.Generator, array: Array) -> Array:
    """Return numbers of an array's type and of any size; some arrays hold a NaN."""
    honest = array.numpy()
    if honest.dtype.kind != "f":
        return array
    most = np.log10(float(np.finfo(honest.dtype).max))
    exponents = rng.choice([rng.uniform(-2, 2), rng.uniform(-most, most)], p=[0.6, 0.4])
    with np.errstate(all="ignore"):
        found = rng.choice([-1, 1], honest.shape) * 10.0**exponents
    if rng.random() < 0.1 and found.size:
        found.reshape(-1)[0] = rng.choice([np.nan, np.inf])
    return Array(found.astype(honest.dtype))


def check_extreme_replies_leave_a_finite_state(case: Case, folder: Path) -> None:
    """Any numbers in any reply, while nodes come and go: no exception, and a state to be saved."""
    rng = np.random.default_rng(len(case.name))
    numbers = [0, -1, 2**53, 5e-324, 1e300, np.inf, np.nan]

    def spoil(replies: list[Message]) -> list[Message]:
        for reply in replies:
            if reply.has_error() or rng.random() < 0.3:
                continue
            for key, record in reply.content.array_records.items():
                changed = {
                    name: extreme(rng, array) if rng.random() < 0.6 else array
                    for name, array in record.items()
                }
                reply.content[key] = ArrayRecord(changed)
            for record in reply.content.metric_records.values():
                for name, value in record.items():
                    if isinstance(value, float) and rng.random() < 0.1:
                        record[name] = float(rng.choice(numbers))
        return [reply for reply in replies if rng.random() < 0.9]

    def new() -> StatefulStrategy:
        return case.strategy(seed=1, max_missed_rounds=2, node_timeout=0.3)

    online = {0: [2, 3, 4], 2: [2, 3, 4, 5], 4: [2, 4, 5]}
    grid = grid_of(case, PARTITIONS, online, spoil=dict.fromkeys(range(2, 9), spoil))
    strategy = run(case, grid, 8, new())
    for name, array in method_state(strategy).items():
        # A single number may be measured by clients, as FedGiA's objective.
        assert not array.ndim or array.dtype.kind != "f" or not np.isinf(array).any(), name
    json.dumps([dict(m) for found in strategy.train_metrics.values() for m in found.values()])
    again = new()
    again.load_state_dict(strategy.state_dict())
    again.start(grid, case.initial_arrays(), 8)  # which it has already had
    assert_same_bits(method_state(again), method_state(strategy))


# --- Continuing -----------------------------------------------------------------------------------

ROUNDS, SAVED = 6, 3


@cache
def whole(case: Case) -> tuple[StatefulStrategy, dict[str, Any]]:
    """Return a run that was never interrupted, and its state after round `SAVED`; only to read."""
    strategy, states = sampling(case), {}

    def on_round(server_round: int, metrics: Any) -> None:
        states[server_round] = strategy.state_dict()

    strategy.start(grid_of(case), case.initial_arrays(), ROUNDS, on_round=on_round)
    return strategy, states[SAVED]


def resumed(case: Case, folder: Path, **settings: Any) -> StatefulStrategy:
    """Return a run that ended in a round, which was trained but not saved, and went on."""

    def start(**options: Any) -> StatefulStrategy:
        strategy = sampling(case, **settings)
        client_class = partial(case.client_class, state_dir=folder / "clients")
        grid = Federation(client_app(client_fn_of(client_class)), NUM_CLIENTS)
        strategy.start(grid, case.initial_arrays(), ROUNDS, checkpoint_dir=folder, **options)
        return strategy

    def interrupt(server_round: int, metrics: Any) -> None:
        if server_round == SAVED + 1:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        start(on_round=interrupt)
    return start(resume=True)


def check_a_resumed_run_is_the_whole_run(case: Case, folder: Path) -> None:
    """To the same bits, from a folder."""
    assert_same_runs(resumed(case, folder), whole(case)[0])


def check_clients_that_lost_their_state_take_part_again(case: Case, folder: Path) -> None:
    """At once, where the server can make up for it; else a client sits out once, and says so."""
    expected, saved = whole(case)
    strategy = sampling(case)
    for array in saved.values():
        assert type(array) is np.ndarray
        assert array.dtype.kind in "biuf"  # numeric, so that numpy and safetensors take it
    strategy.load_state_dict(saved)
    with logged() as warned:
        run(case, grid_of(case), ROUNDS, strategy)
    if not case.keeps:
        assert_close(method_state(strategy), method_state(expected))
        return
    missing: set[int] = set()
    for server_round in range(SAVED + 1, ROUNDS + 1):
        sampled = set(expected.train_metrics[server_round])
        sat_out = sampled - set(strategy.train_metrics.get(server_round, ()))
        assert not sat_out & missing  # no client sits out twice
        missing |= sat_out
        if sat_out:
            assert any(f"round {server_round}" in line for line in warned())


def check_clients_join(case: Case, folder: Path) -> None:
    """A client that joins belongs from its first usable reply on; without one it has no trace."""
    grid = grid_of(case, PARTITIONS, FROM_ROUND_3, raises={1: [3, 4], 4: [3, 4]})
    strategy = run(case, grid, 4)
    assert strategy.client_ids == [0, 1, 2, 4]
    assert trained(strategy) == {1: INITIAL, 2: INITIAL, 3: [0, 2], 4: [0, 2]}
    assert JOINING not in strategy.evaluate_metrics[2]
    assert JOINING in strategy.evaluate_metrics[3]

    never = grid_of(case, PARTITIONS, FROM_ROUND_3, raises={JOINING: range(1, 9)})
    strategy = run(case, never, 4)
    assert strategy.client_ids == INITIAL
    expected = run(case, grid_of(case, PARTITIONS, {0: [2, 3, 4]}), 4)
    assert_equal_to_rounding(strategy, expected)


def check_clients_leave(case: Case, folder: Path) -> None:
    """A client that left does not count, and comes back as a new one."""
    strategy = case.strategy(seed=1, max_missed_rounds=2)
    members: dict[int, list[int]] = {}

    def on_round(server_round: int, metrics: Any) -> None:
        members[server_round] = list(strategy.client_ids)

    grid = grid_of(case, (0, 1, 2, 1), GONE_AND_BACK)
    with logged() as warned:
        strategy.start(grid, case.initial_arrays(), 7, on_round=on_round)
    all_three, two = [0, 1, 2], [0, 2]
    first = {1: all_three, 2: all_three}
    assert members == first | {3: all_three, 4: two, 5: two, 6: all_three, 7: all_three}
    assert trained(strategy) == members | {3: two}
    assert len(warned("left the run")) == len(warned("left the run", "round 4", "[1]")) == 1


# --- Where it runs --------------------------------------------------------------------------------


def check_any_layout_and_engine(case: Case, folder: Path) -> None:
    """One client a node or several, trained one by one or together: equal to rounding."""
    expected, _ = plain(case)
    for nodes, cohort in ((4, False), (1, True)):
        options = {"num_clients": NUM_CLIENTS, "keep_clients": True, "cohort": cohort}
        with grid_of(case, nodes, app_options=options) as grid:
            assert_equal_to_rounding(run(case, grid, strategy=sampling(case)), expected)


def check_half_precision(case: Case, folder: Path) -> None:
    """Uploads have half of the bytes, and the state is in full precision near to the exact one."""
    exact, sent = plain(case)
    grid = grid_of(case)
    half = run(case, grid, strategy=sampling(case, wire_dtype="float16"))
    for reply, full in zip(grid.replies(TRAIN, 2), sent.replies(TRAIN, 2), strict=True):
        for name, array in reply.content["arrays"].items():
            assert array.dtype == "float16"
            assert full.content["arrays"][name].dtype in ("float32", "float64")
    for name, array in method_state(exact).items():
        assert method_state(half)[name].dtype == array.dtype
    assert_close(method_state(half), method_state(exact), rtol=0.05, atol=0.05)


# --- Privacy --------------------------------------------------------------------------------------

SECRET = 2**100 + 1  # no client can guess it, so nothing is logged
WEIGHTED = {"Ditto", "FedAlt", "LGFedAvg", "FedRoD", "FedCP"}
WEIGHTED |= {"FedADMM-client-duals", "FLAME-client-duals"}


def check_noise_or_a_refusal(case: Case, folder: Path) -> None:
    """Noise is in the state and counted in epsilon, or the setting is refused before round 1."""
    pytest.importorskip("dp_accounting", reason="needs the extra 'privacy'")
    settings = {"weights": "uniform"} if case.name in WEIGHTED else {}

    def private(place: Any, noise: float) -> StatefulStrategy:
        dp = ClientDP(clip=0.2, noise_multiplier=noise, delta=1e-3, noise_at=place)
        return case.strategy(seed=SECRET, privacy=dp, fraction_evaluate=0, **settings)

    for place, row in (("server", "noise at the server"), ("client", "noise at the clients")):
        strategy = private(place, 1.5)
        if strategy.upload.kind not in GOES_WITH[row]:
            with refused(ValueError, type(strategy).__name__, "privacy"):
                run(case, grid_of(case), 2, strategy)
            assert strategy.train_metrics == {}
            continue
        result = strategy.start(grid_of(case), case.initial_arrays(), 2)
        first, second = (result.train_metrics_clientapp[r]["epsilon"] for r in (1, 2))
        if not case.server_learns:
            assert first == second == 0
            continue
        assert 0 < first < second or (case.uploads_once and 0 < first == second)
        exact = run(case, grid_of(case), 2, private("server", 0)) if place == "server" else None
        # Noise of the clients follows from no seed, or the server would know it.
        other = exact or run(case, grid_of(case), 2, private(place, 1.5))
        assert differs(method_state(strategy), method_state(other))


def check_a_secret_seed_stays_secret(case: Case, folder: Path) -> None:
    grid = grid_of(case)
    run(case, grid, 1, case.strategy(seed=SECRET))
    configs = [
        config
        for _, _, messages in grid.sent
        for message in messages
        for config in message.content.config_records.values()
    ]
    told = [value for config in configs for value in config.values()]
    assert told
    assert not any(isinstance(value, int) and value >= 2**63 for value in told)


# --- Models ---------------------------------------------------------------------------------------


def check_models_of_each_kind(case: Case, folder: Path) -> None:
    """Every kind of model is evaluated, is there or said where, and is the same on disk."""
    strategy = case.strategy(seed=1)
    strategy.start(grid_of(case), case.initial_arrays(), 1, collect=True)
    models = strategy.models()
    for kind in strategy.kinds:
        here = []
        for client in strategy.client_ids:
            try:
                arrays = strategy.model_arrays(kind, client)
            except RuntimeError as error:
                assert names(error, kind, type(strategy).__name__)  # noqa: PT017
                continue
            here.append(client)
            assert arrays.keys() <= strategy.model_spec.keys()
            assert all(np.isfinite(array.numpy()).all() for array in arrays.values())
        assert here in ([], strategy.client_ids)
    assert bool(strategy.global_arrays) == ("global" in strategy.kinds)
    assert list(models.personal) == (strategy.client_ids if "personal" in strategy.kinds else [])
    assert bool(models.absent) == (not models.personal)
    files = models.save(folder / "models")
    assert [file.stem for file in files] == list(models.named())
    again = load_models(folder)
    assert (again.cluster_of, again.absent) == (models.cluster_of, models.absent)
    for name, arrays in models.named().items():
        assert_same_bits(again.named()[name], arrays)
    measured = strategy.evaluate_metrics[strategy.last_round]
    assert all(np.isfinite(metrics["loss"]) for metrics in measured.values())


# --- Settings -------------------------------------------------------------------------------------

STEP_SIZES = {"lr", "personal_lr", "outer_lr", "weight_lr", "alpha"}


def check_step_sizes_are_those_of_the_round(case: Case, folder: Path) -> None:
    """A step size is a number or a function of the round, whose values are checked."""
    names_of = STEP_SIZES & case.strategy().settings().keys()
    if isinstance(case.strategy(), type(case_of("FedDyn").strategy())):
        names_of -= {"alpha"}  # a penalty there
    in_the_rule = {"outer_lr"} if case.name == "PFedMeMatched" else set()
    schedules: dict[str, Any] = {
        name: StepDecay(0.02 + place / 100, 0.5) for place, name in enumerate(sorted(names_of))
    }
    grid = grid_of(case)
    run(case, grid, 2, case.strategy(**schedules))
    # Every lambda of a path begins its schedule anew.
    for server_round in () if case.name == "FPFC-path" else (1, 2):
        for message in grid.phase(TRAIN, server_round):
            for name in schedules.keys() - in_the_rule:
                found = message.content["config"][name.replace("_", "-")]
                assert found == schedules[name](server_round)
    for name in schedules:
        with pytest.raises((ValueError, TypeError), match=rf"{name} in round 1 is"):
            run(case, grid_of(case), 1, case.strategy(**{name: lambda server_round: -0.1}))


# --- ADMM methods: one client's fair share --------------------------------------------------------


def _replaced(record: ArrayRecord, behaviour: str) -> ArrayRecord:
    """Return ten times the opposite of an upload, or huge numbers of any sign."""
    rng, made = np.random.default_rng(1), {}
    for name, array in record.items():
        lie = array.numpy()
        if lie.dtype.kind == "f":
            huge = rng.choice([-1e11, 1e11], lie.shape).astype(lie.dtype)
            lie = -10 * lie if behaviour == "lies" else huge
        made[name] = Array(lie)
    return ArrayRecord(made)


def _loss_of_others(strategy: StatefulStrategy) -> float:
    """Return the honest clients' mean loss with the model that the method shows first."""
    last = strategy.evaluate_metrics[strategy.last_round]
    name = f"{next(iter(strategy.kinds))}-loss"
    honest = [last[client] for client in last if client != VICTIM]
    return float(np.mean([metrics.get(name, metrics["loss"]) for metrics in honest]))


def _global_model(arrays: Mapping[str, Any]) -> Any:
    return np.concatenate([np.ravel(a).astype(float) for a in arrays.values()] or [np.zeros(1)])


def check_one_bad_client_has_its_share_at_most(case: Case, folder: Path) -> None:
    """One client that is silent, sends huge numbers or lies costs the others little."""

    def run_with(behaviour: str) -> StatefulStrategy:
        def spoil(replies: list[Message]) -> list[Message]:
            bad = [r for r in replies if r.metadata.src_node_id == node_of(VICTIM)]
            others = [r for r in replies if r not in bad]
            if behaviour == "silent":
                return others
            for reply in bad:
                if not reply.has_error():
                    record = reply.content["arrays"]
                    reply.content["arrays"] = _replaced(record, behaviour)
            return others + bad

        settings: dict[str, Any] = {"seed": 1}
        # The papers' forms take every upload as it is.
        if behaviour == "lies" or getattr(case.strategy(), "published", False):
            settings["max_norm"] = "auto"
        rounds = dict.fromkeys(range(1, 5), spoil) if behaviour else {}
        return run(case, grid_of(case, spoil=rounds), 4, case.strategy(**settings))

    honest, silent = run_with(""), run_with("silent")
    usual = max(_loss_of_others(honest), _loss_of_others(silent))
    model = _global_model(honest.global_model())
    first = _global_model({name: a.numpy() for name, a in case.initial_arrays().items()})
    for behaviour in ("huge", "lies"):
        bad = run_with(behaviour)
        loss = _loss_of_others(bad)
        assert loss < 1.5 * usual + 0.1, (behaviour, loss, usual)
        # The mean of FPFC's personal models has the bad client's in it; no other client trains it.
        if model.shape == first.shape and not isinstance(bad, FPFC):
            moved = np.linalg.norm(_global_model(bad.global_model()) - model)
            assert moved < 2.5 * np.linalg.norm(model - first), (behaviour, moved)


CHECKS: list[Check] = [
    check_a_seed_repeats_a_run,
    check_partial_participation,
    check_empty_round,
    check_failing_clients_fail_alone,
    check_other_methods_clients_are_refused,
    check_extreme_replies_leave_a_finite_state,
    check_a_resumed_run_is_the_whole_run,
    check_clients_that_lost_their_state_take_part_again,
    check_clients_join,
    check_clients_leave,
    check_any_layout_and_engine,
    check_half_precision,
    check_noise_or_a_refusal,
    check_a_secret_seed_stays_secret,
    check_models_of_each_kind,
    check_step_sizes_are_those_of_the_round,
]
"""What every method promises."""

OF_ADMM: list[Check] = [check_one_bad_client_has_its_share_at_most]
"""What the ADMM methods promise besides."""

AT_ANY_PACE: list[Check] = [
    check_a_seed_repeats_a_run,
    check_a_resumed_run_is_the_whole_run,
    check_clients_that_lost_their_state_take_part_again,
    check_any_layout_and_engine,
    check_models_of_each_kind,
]
"""What is promised, too, where every reply is a round."""


def checks_of(case: Case) -> list[Check]:
    if case.is_async:
        return AT_ANY_PACE
    return CHECKS + (OF_ADMM if case.admm else [])


def check_strategy(case: Case) -> None:
    """Raise `AssertionError` unless a method keeps all of its promises."""
    for check in checks_of(case):
        with TemporaryDirectory() as folder:
            check(case, Path(folder))
