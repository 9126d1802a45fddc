"""Flower's SecAgg+ around our strategies: the real workflow and the real mod, over the grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.server import LegacyContext, ServerConfig
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from numpy.typing import NDArray

from clients import (
    DittoClient,
    FedADMMClient,
    FedDynClient,
    FedGiAClient,
    FPFCClient,
    PFedMeClient,
    SGDClient,
)
from fl_admm_strategies import (
    FPFC,
    ClientDP,
    Ditto,
    FedADMM,
    FedAvg,
    FedDyn,
    FedGiA,
    InProcessGrid,
    LegacyStrategy,
    PFedMe,
    SmoothedSCAD,
)
from tests.support.cases import CASES, NUM_CLIENTS, Case, case_of
from tests.support.federation import Adding, client_fn_of, initial_arrays, trained
from tests.support.legacy import run_workflow
from tests.support.refusals import Warned, refused

pytest.importorskip("dp_accounting", reason="needs the extra 'privacy'")

MOST = 16  # max_weight: beyond all numbers of examples


def secured(
    legacy: LegacyStrategy,
    client_fn: Any,
    num_rounds: int,
    around: Sequence[Any] = (),
    clipping_range: float = 8.0,
) -> Any:
    """Run Flower's workflow with SecAgg+, with mods around its mod; return the strategy."""
    mods: Any = [*around, secaggplus_mod]
    grid = InProcessGrid(ClientApp(client_fn=client_fn, mods=mods), NUM_CLIENTS)
    fit: Any = SecAggPlusWorkflow(1.0, 0.5, max_weight=MOST, clipping_range=clipping_range)
    context = LegacyContext(
        Context(1, 1, {}, RecordDict(), {}), ServerConfig(num_rounds=num_rounds), strategy=legacy
    )
    DefaultWorkflow(fit_workflow=fit)(grid, context)
    return legacy.strategy


def plain(
    legacy: LegacyStrategy, client_fn: Any, num_rounds: int, around: Sequence[Any] = ()
) -> Any:
    app = ClientApp(client_fn=client_fn, mods=[*around])
    run_workflow(InProcessGrid(app, NUM_CLIENTS), legacy, num_rounds)
    return legacy.strategy


def numbers(arrays: ArrayRecord) -> NDArray[np.float64]:
    return np.concatenate([array.numpy().ravel().astype(np.float64) for array in arrays.values()])


ASKING_NOTHING = {
    "FedADMM-client-duals": {"weights": "uniform"},
    "FLAME-client-duals": {"weights": "uniform"},
    "FedMC-ADMM-client-duals": {"y0": "zero"},
}
"""What cases that ask clients before round 1 need, not to."""
RANGE_OF_SUMS = 100.0
SUMMED = [case for case in CASES if case.strategy().counted_by is not None]


@pytest.mark.slow
@pytest.mark.parametrize("case", SUMMED, ids=lambda case: case.name)
def test_a_run_is_the_plain_one_up_to_quantisation_or_refused(case: Case) -> None:
    fn = client_fn_of(case.client_class)

    def new(**settings: Any) -> LegacyStrategy:
        strategy = case.strategy(seed=1, fraction_evaluate=0, **settings)
        return LegacyStrategy(strategy, case.initial_arrays())

    legacy: Callable[[], LegacyStrategy] = new
    if case.shakes_hands:
        with refused(ValueError, "SecAggPlusWorkflow"):
            secured(legacy(), fn, 3)
        legacy = partial(new, **ASKING_NOTHING[case.name])
    expected = numbers(plain(legacy(), fn, 3).global_arrays)
    sums = case.name.startswith("FedALS")  # of squares, which are beyond 8 and would be cut off
    most, atol = (RANGE_OF_SUMS, 1e-2) if sums else (8.0, 1e-4)
    found = numbers(secured(legacy(), fn, 3, clipping_range=most).global_arrays)
    np.testing.assert_allclose(found, expected, atol=atol)
    assert np.abs(found - expected).max() > 0  # it was quantised


def test_a_plain_client_of_flowers_counts_by_its_examples() -> None:
    def legacy() -> LegacyStrategy:
        return LegacyStrategy(FedAvg(seed=1, fraction_evaluate=0), initial_arrays())

    fn = client_fn_of(Adding)
    found, expected = secured(legacy(), fn, 2), plain(legacy(), fn, 2)
    np.testing.assert_allclose(
        numbers(found.global_arrays), numbers(expected.global_arrays), atol=1e-4
    )


# --- Clients that drop out ------------------------------------------------------------------------


class Dropping:
    """A mod around SecAgg+'s, which ends a client in a round, at a stage or, without one, in fit.

    Without the workflow there are no stages, and the client ends in fit all the same.
    """

    def __init__(self, client: int, server_round: int, stage: str) -> None:
        self.client, self.server_round, self.stage = client, server_round, stage

    def __call__(self, message: Message, context: Context, call_next: Any) -> Message:
        configs: Any = message.content.config_records.get(RECORD_KEY_CONFIGS, {})
        stage = configs.get(Key.STAGE)
        drops = message.metadata.message_type == "train" and stage in (None, self.stage)
        here = context.node_config["partition-id"] == self.client
        if drops and here and message.metadata.group_id == str(self.server_round):
            raise RuntimeError("the battery is empty")
        found: Message = call_next(message, context)
        return found


DROPPED = {"in training": (Stage.COLLECT_MASKED_VECTORS, True), "after it": (Stage.UNMASK, False)}


@pytest.mark.slow
@pytest.mark.parametrize("when", DROPPED)
@pytest.mark.parametrize("name", ["FedADMM-client-duals", "FedProx"])
def test_a_client_that_drops_out_is_left_out_as_in_the_plain_run(name: str, when: str) -> None:
    case, (stage, is_missed) = case_of(name), DROPPED[when]
    settings = {"weights": "uniform"} if name == "FedADMM-client-duals" else {}

    def legacy() -> LegacyStrategy:
        strategy = case.strategy(seed=1, fraction_evaluate=0, **settings)
        return LegacyStrategy(strategy, case.initial_arrays())

    dropping, fn = Dropping(2, 2, stage), client_fn_of(case.client_class)
    found = secured(legacy(), fn, 4, around=[dropping])
    expected = plain(legacy(), fn, 4, around=[dropping] if is_missed else [])
    assert trained(found) == trained(expected)
    assert (2 in trained(found)[2]) != is_missed
    np.testing.assert_allclose(
        numbers(found.global_arrays), numbers(expected.global_arrays), atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("stage", [Stage.SETUP, Stage.SHARE_KEYS])
def test_a_round_that_flower_halts_changes_nothing(stage: str, warned: Warned) -> None:
    """Its workflow of 1.41 wants shares of the keys of a client that has never shared them."""
    strategy = FedADMM(duals="client", rho=0.1, lr=0.5, seed=1, fraction_evaluate=0)
    legacy, fn = LegacyStrategy(strategy, initial_arrays()), client_fn_of(FedADMMClient)
    secured(legacy, fn, 3, around=[Dropping(2, 2, stage)])
    assert trained(strategy) == {1: [*range(NUM_CLIENTS)], 3: [*range(NUM_CLIENTS)]}
    assert warned("the last round changed nothing")


# --- What a client says beside its masked upload --------------------------------------------------


@pytest.mark.slow
def test_nothing_else_says_what_a_client_uploads() -> None:
    """A seal is a checksum of the upload itself."""
    said: list[dict[str, Any]] = []

    def watching(message: Message, context: Context, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        if metrics := reply.content.config_records.get("fitres.metrics"):
            said.append(dict(metrics))
            assert not any(len(record) for record in reply.content.array_records.values())
        return reply

    strategy = FedADMM(duals="client", rho=0.1, lr=0.5, seed=1, fraction_evaluate=0)
    fn = client_fn_of(FedADMMClient)
    secured(LegacyStrategy(strategy, initial_arrays()), fn, 1, around=[watching])
    assert len(said) == NUM_CLIENTS
    assert {name for metrics in said for name in metrics} == {
        "loss",
        "initial-loss",
        "made-by.FedADMM",
    }


def test_noise_of_the_clients_goes_through() -> None:
    dp = ClientDP(clip=0.5, noise_multiplier=1.0, delta=1e-3, noise_at="client")
    strategy = FedAvg(lr=0.5, seed=1, privacy=dp, fraction_evaluate=0)
    secured(LegacyStrategy(strategy, initial_arrays()), client_fn_of(SGDClient), 1)
    means = strategy.run.record.result.train_metrics_clientapp
    assert means[1]["epsilon"] > 0  # type: ignore[operator]


# --- Refusals -------------------------------------------------------------------------------------

DP = ClientDP(clip=1.0, noise_multiplier=1.0, delta=1e-3)


@pytest.mark.parametrize(
    ("make", "client", "named"),
    [
        (lambda: FPFC(SmoothedSCAD(0.5)), FPFCClient, ["FPFC", "every upload"]),
        (lambda: FedADMM(), FedADMMClient, ["FedADMM", "duals='client'"]),
        (lambda: FedAvg(aggregation="median"), SGDClient, ["aggregation='mean'"]),
        (lambda: PFedMe(fraction_train=0.5), PFedMeClient, ["everyone_trains=False"]),
        (lambda: Ditto(max_norm=1.0), DittoClient, ["max_norm"]),
        (lambda: Ditto(wire_dtype="float16"), DittoClient, ["wire_dtype"]),
        (lambda: Ditto(privacy=DP), DittoClient, ["noise_at='client'"]),
        (lambda: FedDyn(privacy=DP), FedDynClient, ["Leave it out"]),
        (lambda: FedGiA(), FedGiAClient, ["every upload for itself (docs"]),
        (lambda: FedADMM(duals="client", weights="size"), FedADMMClient, ["uniform"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_needs_single_uploads_is_refused_before_round_1(
    make: Any, client: Any, named: list[str]
) -> None:
    legacy = LegacyStrategy(make(), initial_arrays())
    with refused(ValueError, "SecAggPlusWorkflow", *named):
        secured(legacy, client_fn_of(client), 2)
    assert legacy.strategy.last_round == 0


def test_the_mod_without_the_workflow_is_named() -> None:
    legacy = LegacyStrategy(FedADMM(weights="size", node_timeout=5), initial_arrays())
    grid = InProcessGrid(
        ClientApp(client_fn=client_fn_of(FedADMMClient), mods=[secaggplus_mod]), NUM_CLIENTS
    )
    with refused(RuntimeError, "secaggplus_mod", "SecAggPlusWorkflow"):
        run_workflow(grid, legacy, 2)
