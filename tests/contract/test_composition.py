"""Every method with what its users' projects put around it: it works, or a sentence refuses it.

What goes with which kind of upload is in docs/composition.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import (
    LocalDpMod,
    adaptiveclipping_mod,
    arrays_size_mod,
    fixedclipping_mod,
    message_size_mod,
)
from flwr.serverapp import strategy as flowers
from numpy.testing import assert_allclose

from clients import FedADMMClient, SGDClient, answer, client_app
from fl_admm_strategies import AsyncFPFC, FedADMM, FedAvg, StatefulStrategy
from fl_admm_strategies.runtime.uploads import GOES_WITH
from tests.support.cases import CASES, NUM_CLIENTS, Case, case_of, grid_of, run
from tests.support.federation import (
    Federation,
    assert_same_bits,
    client_fn_of,
    initial_arrays,
    make_client,
)
from tests.support.pace import fast
from tests.support.refusals import refused

DOCS = Path(__file__).parents[2] / "docs" / "composition.md"
KINDS = ["mean", "sum", "own copy", "statistic"]


def kind_of(case: Case) -> str:
    return str(case.strategy().upload.kind)


def test_the_docs_have_the_table_and_every_method_under_its_kind() -> None:
    text = DOCS.read_text()
    for what, kinds in GOES_WITH.items():
        cells = " | ".join("yes" if kind in kinds else "no" for kind in KINDS)
        assert f"| {what} | {cells} |" in text
    items = {kind: text.partition(f"* *{kind}*: ")[2].partition("\n* ")[0] for kind in KINDS}
    for case in CASES:
        if "client-duals" not in case.name:
            assert f"`{type(case.strategy()).__name__}`" in items[kind_of(case)], case.name


# --- Wrappers and mods ----------------------------------------------------------------------------

CLIP, NOISE = 0.1, 0.1
LOCAL_DP = {"clipping_norm": CLIP, "sensitivity": 1e-4, "epsilon": 1.0, "delta": 1e-2}
SERVER_SIDE = flowers.DifferentialPrivacyServerSideFixedClipping
CLIENT_SIDE = flowers.DifferentialPrivacyClientSideFixedClipping


def own_mod(message: Any, context: Any, call_next: Any) -> Any:
    """A mod of a user's own, which notes something and changes nothing."""
    reply = call_next(message, context)
    if reply.content.metric_records:
        next(iter(reply.content.metric_records.values()))["from-a-mod"] = 1.0
    return reply


class Company(NamedTuple):
    """A privacy wrapper around a strategy, and mods around its clients."""

    wrapper: Any = None
    mods: Sequence[Any] = ()
    noise: float = NOISE

    def around(self, strategy: StatefulStrategy) -> Any:
        if self.wrapper is None:
            return strategy
        bound = [CLIP] if "Fixed" in self.wrapper.__name__ else []  # the adaptive ones find theirs
        return self.wrapper(strategy, self.noise, *bound, NUM_CLIENTS)

    def run(self, case: Case, strategy: StatefulStrategy, rounds: int = 2) -> Any:
        """Run a strategy in this company; return what the outermost strategy returned."""
        grid = grid_of(case, app_options={"num_clients": None, "mods": list(self.mods)})
        return self.around(strategy).start(grid, case.initial_arrays(), rounds)


COMPANIES = {
    "server's wrapper": Company(SERVER_SIDE),
    "server's adaptive wrapper": Company(flowers.DifferentialPrivacyServerSideAdaptiveClipping),
    "clients' wrapper": Company(CLIENT_SIDE, [fixedclipping_mod]),
    "clients' adaptive wrapper": Company(
        flowers.DifferentialPrivacyClientSideAdaptiveClipping, [adaptiveclipping_mod]
    ),
    "LocalDpMod": Company(mods=[LocalDpMod(**LOCAL_DP)]),
    "sizes": Company(mods=[message_size_mod, arrays_size_mod, own_mod]),
}
NO_MODEL = {"FedMAvg", "LpProj", "FedEASE"}
"""Means that are no model of all clients."""
GROUPS = {"Ditto", "LpProj"}
"""Those that send several groups of arrays, which Flower's mods do not take."""
PARTS = {"FedAlt", "FedSim", "LGFedAvg", "FedRoD", "FedCP"}
"""Those that upload a part of the model, which no wrapper of the server's takes."""


def goes(case: Case, name: str) -> bool:
    """Return whether a case works in such company."""
    if name == "LocalDpMod":
        # FedEASE is sent no arrays, and Local uploads none.
        mean = kind_of(case) in GOES_WITH["mods"] and case.name not in {*GROUPS, "FedEASE"}
        return mean or case.name == "Local"
    if "wrapper" in name:
        client_side = name.startswith("clients'")
        not_taken = GROUPS if client_side else PARTS
        return kind_of(case) in GOES_WITH["wrappers"] and case.name not in NO_MODEL | not_taken
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPANIES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_method_works_in_company_or_is_refused(case: Case, name: str) -> None:
    strategy = case.strategy(seed=1)
    if goes(case, name):
        result = COMPANIES[name].run(case, strategy)
        assert {r: len(found) for r, found in strategy.train_metrics.items()} == {1: 6, 2: 6}
        if "wrapper" in name:
            returned = {name: array.numpy() for name, array in result.arrays.items()}
            ours = {name: array.numpy() for name, array in strategy.global_arrays.items()}
            assert_same_bits(ours, returned)  # what the wrapper made of it, noise and all
        return
    told = r"docs/composition\.md|mods=\[fixedclipping_mod\]|Flower's privacy wrappers"
    with pytest.raises((ValueError, RuntimeError), match=told):
        COMPANIES[name].run(case, strategy, rounds=4)
    assert dict(strategy.train_metrics) == {}  # no client has trained for nothing


@pytest.mark.parametrize("name", fast(["FedAvg"], ["FedAvg", "Ditto"]))
def test_the_clients_are_sent_what_the_wrapper_made_of_the_model(name: str) -> None:
    case = case_of(name)
    grid, strategy = grid_of(case), case.strategy(seed=1)
    given: dict[int, ArrayRecord] = {}

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> None:
        given[server_round] = arrays

    wrapper = Company(SERVER_SIDE, noise=1e3).around(strategy)
    wrapper.start(grid, case.initial_arrays(), 3, evaluate_fn=evaluate_fn)
    for message in grid.phase("train", 3):
        for key, array in given[2].items():
            assert_allclose(message.content["arrays"][key].numpy(), array.numpy(), rtol=1e-6)
            assert np.abs(array.numpy()).max() > 10 * CLIP  # noise of 80 or so


FAST = [("FedAvg", "server"), ("FedAlt", "client")]


@pytest.mark.parametrize(("name", "side"), fast(FAST, [*FAST, ("FedAvg", "client")]))
def test_clipping_around_a_method_is_that_of_its_own_bound(name: str, side: str) -> None:
    """A wrapper without noise clips an upload to CLIP from what the client was sent."""
    case, strategy = case_of(name), case_of(name).strategy(seed=1)
    expected = run(case, grid_of(case), 2, case.strategy(seed=1, max_norm=CLIP))
    server, client = Company(SERVER_SIDE, (), 0.0), Company(CLIENT_SIDE, [fixedclipping_mod], 0.0)
    (server if side == "server" else client).run(case, strategy)
    free = run(case, grid_of(case), 2, case.strategy(seed=1))
    for key, array in expected.global_arrays.items():
        assert_allclose(strategy.global_arrays[key].numpy(), array.numpy(), rtol=1e-4, atol=1e-5)
    assert any(
        not np.allclose(free.global_arrays[key].numpy(), array.numpy(), atol=1e-2)
        for key, array in expected.global_arrays.items()
    )


def test_a_wrapper_that_drops_every_round_ends_the_run() -> None:
    # Flower's drop a round in which a client has failed. Here all do: none has the mod.
    case = case_of("FedAvg")
    wrapper = Company(CLIENT_SIDE).around(case.strategy(seed=1))
    with refused(RuntimeError, "aggregate_train", "privacy"):
        wrapper.start(grid_of(case), case.initial_arrays(), 5)


def test_a_wrapper_that_would_clip_several_clients_as_one_is_refused() -> None:
    case = case_of("FedAvg")
    with refused(ValueError, "DifferentialPrivacyServerSideFixedClipping", "one client on each"):
        wrapped = Company(SERVER_SIDE).around(case.strategy(seed=1))
        packed = grid_of(case, 2, app_options={"num_clients": NUM_CLIENTS})
        wrapped.start(packed, case.initial_arrays(), 2)
    drawn = case_of("PFedMe").strategy(seed=1, everyone_trains=True, fraction_train=0.5)
    with refused(ValueError, "PFedMe", "everyone_trains=False"):
        Company(SERVER_SIDE).run(case_of("PFedMe"), drawn)


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


def own_app(client_class: Any, mods: Any, *, inside: bool) -> ClientApp:
    """Return an app with a training handler of the user's own, and mods in it or around it."""
    app = client_app()

    @app.train(mods=[] if inside else mods)
    def train(message: Message, context: Context) -> Message:
        client = make_client(client_class, context)
        return answer(client, message, mods=mods if inside else [], context=context)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return answer(make_client(client_class, context), message)

    return app


def test_handlers_of_ones_own_give_their_mods_to_answer() -> None:
    mods = [LocalDpMod(**LOCAL_DP | {"sensitivity": 0.0})]  # clipped, without noise
    runs = []
    by_app = client_app(client_fn_of(SGDClient), mods=mods)
    for app in (own_app(SGDClient, mods, inside=True), by_app):
        runs.append(FedAvg(lr=0.5, seed=1))
        runs[-1].start(Federation(app, NUM_CLIENTS), initial_arrays(), 2)
    assert_same_bits(runs[0].state_dict(), runs[1].state_dict())


def test_mods_around_such_a_handler_are_refused_by_a_sentence() -> None:
    grid = Federation(own_app(FedADMMClient, [LocalDpMod(**LOCAL_DP)], inside=False), NUM_CLIENTS)
    with refused(RuntimeError, "LocalDpMod", "answer(client, message, mods=[...]"):
        FedADMM(lr=0.5).start(grid, initial_arrays(), 3)


@pytest.mark.parametrize("name", ["FedADMM", "FedDyn"])
def test_a_mod_that_changes_an_upload_is_refused_where_the_client_goes_on_from_it(
    name: str,
) -> None:
    def halving(message: Any, context: Any, call_next: Any) -> Any:
        reply = call_next(message, context)
        (record,) = reply.content.array_records
        halved = {k: Array(v.numpy() / 2) for k, v in reply.content[record].items()}
        reply.content[record] = ArrayRecord(halved)
        return reply

    case = case_of(name)
    grid = Federation(client_app(client_fn_of(case.client_class), mods=[halving]), NUM_CLIENTS)
    with refused(RuntimeError, "changed by a mod", "docs/composition.md"):
        case.strategy(seed=1).start(grid, initial_arrays(), 3)


def test_mods_that_cannot_be_are_refused_at_once() -> None:
    with refused(ValueError, "mods", "answer"):
        client_app(mods=[message_size_mod])
    with refused(ValueError, "num_clients", "mods"):
        client_app(client_fn_of(FedADMMClient), num_clients=6, mods=[message_size_mod])
