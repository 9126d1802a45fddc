"""Every method with what its users' projects put around it: it works, or a sentence refuses it.

What goes with which kind of upload is in docs/composition.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod, message_size_mod
from numpy.testing import assert_allclose

from clients import FedADMMClient, answer, client_app
from fl_admm_strategies import (
    AsyncFPFC,
    FedADMM,
    FedAvg,
    FedDyn,
    StatefulStrategy,
)
from fl_admm_strategies.runtime.messages.packing import unpack_instructions
from fl_admm_strategies.runtime.messages.seal import ALTERED, SEAL
from fl_admm_strategies.runtime.uploads import GOES_WITH
from tests.support.cases import ASYNC, CASES, NUM_CLIENTS, Case, case_of, grid_of, run
from tests.support.companions import (
    CLIENT,
    CLIENT_SIDE,
    CLIP,
    COMPANIONS,
    KINDS,
    LOCAL,
    LOCAL_DP,
    PARTS,
    SERVER,
    SERVER_SIDE,
    Companion,
    goes,
    kind_of,
    wrapped_by,
)
from tests.support.federation import (
    WatchedGrid,
    assert_same_bits,
    client_fn_of,
    initial_arrays,
    make_client,
)
from tests.support.pace import fast
from tests.support.refusals import refused

DOCS = Path(__file__).parents[2] / "docs" / "composition.md"


def test_the_kinds_have_every_case_once_and_the_docs_have_the_table() -> None:
    cases = [name for names in KINDS.values() for name in names]
    assert sorted(cases) == sorted(case.name for case in CASES)
    for case in CASES:
        assert case.strategy().upload.kind == kind_of(case), case.name
    for what, kinds in GOES_WITH.items():
        cells = " | ".join("yes" if kind in kinds else "no" for kind in KINDS)
        assert f"| {what} | {cells} |" in DOCS.read_text()


def pairs() -> list[Any]:
    """Return every case with one companion of each column; the first of a family with all."""
    found = []
    for case in CASES:
        seen: set[str] = set()
        for one in COMPANIONS:
            if not case.variant or one.column not in seen:
                found.append(pytest.param(case, one, id=f"{case.name}-{one.name}"))
            seen.add(one.column)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("case", "companion"), pairs())
def test_a_method_works_in_company_or_is_refused(case: Case, companion: Companion) -> None:
    strategy = case.strategy(seed=1)
    if goes(case, companion.column):
        result = companion.run(case, strategy)
        assert strategy.last_round == 2
        assert {r: len(found) for r, found in strategy.train_metrics.items()} == {1: 6, 2: 6}
        if companion.column in (SERVER, CLIENT):
            returned = {name: array.numpy() for name, array in result.arrays.items()}
            ours = {name: array.numpy() for name, array in strategy.global_arrays.items()}
            assert_same_bits(ours, returned)  # what the wrapper made of it, noise and all
        return
    with pytest.raises((ValueError, RuntimeError)) as caught:
        companion.run(case, strategy)
    assert "docs/composition.md" in str(caught.value)
    assert dict(strategy.train_metrics) == {}  # nobody has trained for anything


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if not goes(case, SERVER)],
    ids=lambda case: case.name,
)
def test_a_wrapper_that_is_refused_is_told_of_a_mod_only_where_that_goes(case: Case) -> None:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        wrapped_by(SERVER_SIDE)(case.strategy(seed=1)).start(
            grid_of(case), case.initial_arrays(), 1
        )
    if "LocalDpMod" in str(caught.value):
        assert goes(case, LOCAL)


# --- Noise counts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", fast(["FedAvg"], ["FedAvg", "Ditto"]))
def test_the_clients_are_sent_what_the_wrapper_made_of_the_model(name: str) -> None:
    case = case_of(name)
    grid, strategy = grid_of(case), case.strategy(seed=1)
    given: dict[int, ArrayRecord] = {}
    wrapper = wrapped_by(SERVER_SIDE, 1e3)(strategy)

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> None:
        given[server_round] = arrays

    result = wrapper.start(grid, case.initial_arrays(), 3, evaluate_fn=evaluate_fn)
    for message in grid.phase("train", 3):
        ((_, instruction),) = unpack_instructions(message.content)
        first = next(iter(instruction.groups.values()))
        for key, array in given[2].items():
            assert_allclose(first[key], array.numpy(), rtol=1e-6)
            assert np.abs(array.numpy()).max() > 10 * CLIP  # noise of 80 or so
    assert_same_bits(
        {key: array.numpy() for key, array in strategy.global_arrays.items()},
        {key: array.numpy() for key, array in result.arrays.items()},
    )


WHERE = ("server", "client", "packed")
WRAPPED = [("FedAvg", where) for where in WHERE]
WRAPPED += [("FedAlt", where) for where in ("client", "packed")]
FAST = [("FedAvg", "server"), ("FedAlt", "client")]


@cache
def bounded(case: Case) -> StatefulStrategy:
    """Return a run with a bound of its own; only to read."""
    return run(case, grid_of(case), strategy=case.strategy(seed=1, max_norm=CLIP))


@pytest.mark.parametrize(("name", "where"), fast(FAST, WRAPPED))
def test_clipping_around_a_method_is_that_of_its_own_bound(name: str, where: str) -> None:
    # A wrapper without noise clips an upload to CLIP from what the client was sent: max_norm=CLIP.
    # Where the client keeps what it uploaded, it must be told what became of that.
    case = case_of(name)
    expected = bounded(case)
    if where == "server":
        companion = Companion("", "", wrapped_by(SERVER_SIDE, 0.0))
    else:
        per_node = 3 if where == "packed" else 1
        companion = Companion(
            "", "", wrapped_by(CLIENT_SIDE, 0.0), [fixedclipping_mod], per_node=per_node
        )
    strategy = case.strategy(seed=1)
    companion.run(case, strategy, 3)
    bound: Any = expected.run.record.result.train_metrics_clientapp[3]["clipped"]
    assert bound > 0  # the bound is one
    for key, array in expected.global_arrays.items():
        assert_allclose(strategy.global_arrays[key].numpy(), array.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("drops", [1, 5])
def test_a_wrapper_that_drops_every_round_ends_the_run(
    caplog: pytest.LogCaptureFixture, drops: int
) -> None:
    # Flower's drop a round in which a client has failed. Here all do: none has the mod.
    caplog.set_level("INFO")
    case = case_of("FedAvg")
    wrapper = wrapped_by(CLIENT_SIDE)(case.strategy(seed=1))
    if drops < 3:
        wrapper.start(grid_of(case), case.initial_arrays(), drops)
    else:
        with refused(RuntimeError, "aggregate_train", "privacy"):
            wrapper.start(grid_of(case), case.initial_arrays(), drops)
        assert any("changed nothing" in record.getMessage() for record in caplog.records)
    assert any("mods=[fixedclipping_mod]" in record.getMessage() for record in caplog.records)


def test_it_is_refused_that_a_wrapper_clips_several_clients_as_one() -> None:
    case = case_of("FedAvg")
    companion = Companion("", "", wrapped_by(SERVER_SIDE), per_node=3)
    with refused(ValueError, "DifferentialPrivacyServerSideFixedClipping", "fixedclipping_mod"):
        companion.run(case, case.strategy(seed=1))


def test_what_only_those_drawn_upload_is_refused_in_a_wrapper() -> None:
    case = case_of("PFedMe")
    strategy = case.strategy(seed=1, everyone_trains=True, fraction_train=0.5)
    with refused(ValueError, "PFedMe", "everyone_trains=False"):
        wrapped_by(SERVER_SIDE)(strategy).start(grid_of(case), case.initial_arrays(), 1)


# --- Hooks of a subclass --------------------------------------------------------------------------


class Doubling(FedAvg):
    """Its hooks write down that they were called; one doubles the model."""

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        self.calls = [*getattr(self, "calls", []), ("configure", float(norm_of(arrays)))]
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        assert metrics is not None
        doubled = ArrayRecord({key: Array(2 * array.numpy()) for key, array in arrays.items()})
        self.calls.append(("aggregate", float(norm_of(doubled))))
        return doubled, MetricRecord({**metrics, "mine": 1.0})

    def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        self.calls.append(("evaluate", float(norm_of(arrays))))
        return super().configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> Any:
        metrics = super().aggregate_evaluate(server_round, replies)
        return MetricRecord({**metrics, "mine": 2.0})


def norm_of(arrays: ArrayRecord) -> float:
    return float(np.sqrt(sum((array.numpy() ** 2).sum() for array in arrays.values())))


def test_the_hooks_of_a_subclass_are_called_and_what_they_return_counts() -> None:
    case = case_of("FedAvg")
    strategy = Doubling(lr=0.5, local_epochs=1, seed=1)
    told: dict[int, Any] = {}
    result = strategy.start(
        grid_of(case), initial_arrays(), 2, on_round=lambda r, metrics: told.update({r: metrics})
    )
    assert [name for name, _ in strategy.calls] == ["configure", "aggregate", "evaluate"] * 2
    norms = [norm for _, norm in strategy.calls]
    assert norms[1] == norms[2] == norms[3]  # the next phases get what the hook returned
    assert norms[4] == norms[5] == norm_of(strategy.global_arrays) == norm_of(result.arrays)
    assert (told[2]["train-mine"], told[2]["mine"]) == (1.0, 2.0)
    assert result.train_metrics_clientapp[1]["mine"] == 1.0
    assert result.evaluate_metrics_clientapp[2]["mine"] == 2.0


class Silent(FedADMM):
    """Its hook changes nothing."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        return super().aggregate_train(server_round, replies)


def test_a_hook_that_changes_nothing_changes_nothing() -> None:
    case = case_of("FedADMM")
    expected, strategy = (
        kind(rho=0.1, lr=0.5, local_epochs=1, seed=1, fraction_train=0.5)
        for kind in (FedADMM, Silent)
    )
    for one in (expected, strategy):
        one.start(grid_of(case), initial_arrays(), 3)
    assert_same_bits(strategy.state_dict(), expected.state_dict())


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if not (goes(case, SERVER) or case.name in PARTS)],
    ids=lambda case: case.name,
)
def test_a_hook_cannot_change_what_is_no_model(case: Case) -> None:
    kind = type(case.strategy())

    class Changing(kind):  # type: ignore[misc, valid-type]
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            _, metrics = super().aggregate_train(server_round, replies)
            return ArrayRecord({"w": Array(np.ones(3))}), metrics

    settings = {**getattr(case.strategy, "keywords", {}), "seed": 1}
    strategy = Changing(*getattr(case.strategy, "args", ()), **settings)
    with pytest.raises(ValueError, match="another global model"):
        strategy.start(grid_of(case), case.initial_arrays(), 2)


def test_hooks_where_they_would_never_be_called_are_refused_at_once() -> None:
    with refused(TypeError, "Mine", "aggregate_train", "on_round"):

        class Mine(AsyncFPFC):
            def aggregate_train(self, server_round: int, replies: Any) -> Any:
                return super().aggregate_train(server_round, replies)


def test_a_model_that_cannot_be_used_is_refused_by_a_sentence() -> None:
    class Broken(FedAvg):
        broken: ClassVar[Any]

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            return self.broken(arrays), metrics

    for broken, named in (
        (lambda arrays: ArrayRecord({**arrays, "more": Array(np.ones(2))}), "more"),
        (lambda a: ArrayRecord({k: Array(v.numpy() * np.nan) for k, v in a.items()}), "NaN"),
    ):
        Broken.broken = staticmethod(broken)
        with refused(ValueError, "Broken", named):
            Broken(lr=0.5).start(grid_of(case_of("FedAvg")), initial_arrays(), 1)


# --- Mods -----------------------------------------------------------------------------------------


def own_app(mods: Any, *, inside: bool) -> ClientApp:
    """Return an app with a training handler of the user's own, and mods in it or around it."""
    app = client_app()

    @app.train(mods=[] if inside else mods)
    def train(message: Message, context: Context) -> Message:
        client = make_client(FedADMMClient, context)
        return answer(client, message, mods=mods if inside else [], context=context)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return answer(make_client(FedADMMClient, context), message)

    return app


def test_handlers_of_ones_own_give_their_mods_to_answer() -> None:
    mods = [LocalDpMod(**LOCAL_DP | {"sensitivity": 0.0})]  # clipped, without noise
    runs = []
    for app in (own_app(mods, inside=True), client_app(client_fn_of(FedADMMClient), mods=mods)):
        runs.append(FedADMM(rho=0.1, lr=0.5, seed=1))
        runs[-1].start(WatchedGrid(app, NUM_CLIENTS), initial_arrays(), 2)
    assert_same_bits(runs[0].state_dict(), runs[1].state_dict())


def test_mods_around_such_a_handler_are_refused_by_a_sentence() -> None:
    grid = WatchedGrid(own_app([LocalDpMod(**LOCAL_DP)], inside=False), NUM_CLIENTS)
    with refused(RuntimeError, "LocalDpMod", "answer(client, message, mods=[...]"):
        FedADMM(lr=0.5).start(grid, initial_arrays(), 3)


@pytest.mark.parametrize("per_node", [1, 3])
def test_every_hosted_client_passes_a_mod_with_its_own_message(per_node: int) -> None:
    seen: list[tuple[int, list[str], float]] = []

    def watching(message: Any, context: Any, call_next: Any) -> Any:
        (record,) = message.content.array_records.values()
        shown = [list(record), float(sum(a.numpy().sum() for a in record.values()))]
        reply = call_next(message, context)
        (upload,) = reply.content.array_records.values()
        assert list(upload) == shown[0]
        seen.append((context.node_config["partition-id"], *shown))
        return reply

    total = None if per_node == 1 else NUM_CLIENTS
    app = client_app(client_fn_of(FedADMMClient), num_clients=total, mods=[watching])
    strategy = FedADMM(rho=0.1, lr=0.5, seed=1, fraction_evaluate=0.0)
    strategy.start(WatchedGrid(app, NUM_CLIENTS // per_node), initial_arrays(), 2)
    assert sorted(client for client, *_ in seen) == sorted([*range(NUM_CLIENTS)] * 2)
    assert all(names == list(initial_arrays()) for _, names, _ in seen)
    plain = FedADMM(rho=0.1, lr=0.5, seed=1, fraction_evaluate=0.0)
    plain.start(WatchedGrid(client_app(client_fn_of(FedADMMClient)), 6), initial_arrays(), 2)
    assert_same_bits(strategy.state_dict(), plain.state_dict())  # it has changed nothing


def test_what_a_mod_changed_is_what_the_client_is_told_that_it_sent() -> None:
    # Without that its dual would go on from what it sent, and the server's from what it got.
    def halving(message: Any, context: Any, call_next: Any) -> Any:
        reply = call_next(message, context)
        (name,) = reply.content.array_records
        halved = {k: Array(v.numpy() / 2) for k, v in reply.content[name].items()}
        reply.content[name] = ArrayRecord(halved)
        return reply

    case = case_of("FedADMM")
    grid = WatchedGrid(client_app(client_fn_of(case.client_class), mods=[halving]), NUM_CLIENTS)
    FedADMM(rho=0.1, lr=0.5, seed=1).start(grid, initial_arrays(), 2)
    for message in grid.phase("train", 2):
        ((_, instruction),) = unpack_instructions(message.content)
        assert instruction.groups["start"]["dual"].any()  # the server's


@pytest.mark.parametrize(
    ("mod", "tells"), [(LocalDpMod(**LOCAL_DP), False), (message_size_mod, True)]
)
def test_no_checksum_tells_what_an_upload_was_without_its_noise(mod: Any, tells: bool) -> None:
    grid = WatchedGrid(client_app(client_fn_of(FedADMMClient), mods=[mod]), NUM_CLIENTS)
    FedADMM(rho=0.1, lr=0.5, seed=1).start(grid, initial_arrays(), 1)
    seals = [reply.content["metrics"][SEAL] for reply in grid.replies("train", 1)]
    assert all((found != ALTERED) == tells for found in seals)


def test_an_upload_that_must_not_change_ends_the_run_in_its_first_round() -> None:
    case = case_of("FedDyn")
    app = client_app(client_fn_of(case.client_class), mods=[LocalDpMod(**LOCAL_DP)])
    with refused(RuntimeError, "mod", "duals='strategy'"):
        FedDyn(lr=0.5).start(WatchedGrid(app, NUM_CLIENTS), initial_arrays(), 5)


def test_mods_that_cannot_be_are_refused_at_once() -> None:
    with refused(ValueError, "mods", "answer"):
        client_app(mods=[message_size_mod])
    with refused(ValueError, "cohort", "mods"):
        client_app(client_fn_of(FedADMMClient), num_clients=6, cohort=True, mods=[message_size_mod])


@pytest.mark.slow
@pytest.mark.parametrize(
    "mods", [[], [message_size_mod], [LocalDpMod(**LOCAL_DP)]], ids=["none", "sizes", "noise"]
)
def test_where_every_reply_is_a_round_mods_work_as_well(mods: Any) -> None:
    app = client_app(client_fn_of(ASYNC.client_class), mods=mods)
    strategy = ASYNC.strategy(seed=1)
    strategy.start(WatchedGrid(app, NUM_CLIENTS), ASYNC.initial_arrays(), 8)
    assert strategy.last_round == 8
    with refused(RuntimeError, "AsyncFPFC", "start(grid, initial_arrays, num_rounds)"):
        wrapped_by(SERVER_SIDE)(ASYNC.strategy()).start(
            WatchedGrid(app, 6), ASYNC.initial_arrays(), 1
        )
