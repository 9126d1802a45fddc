"""After a run, and during it: its models, the best of its rounds, and what may leave a client."""

from __future__ import annotations

import contextvars
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord

from clients import FPFCClient, LocalClient, answer, client_app
from fl_admm_strategies import (
    FPFC,
    InProcessGrid,
    KeepBest,
    Local,
    Models,
    SmoothedSCAD,
    load_models,
)
from fl_admm_strategies.runtime.saving.files import DamagedFileError
from tests.support.cases import CHEAP, case_of, grid_of
from tests.support.federation import (
    Federation,
    Mean,
    assert_same_bits,
    client_fn_of,
    initial_arrays,
    make_client,
    make_model,
)
from tests.support.pace import fast
from tests.support.refusals import Warned, names, refused

# --- Models on disk -------------------------------------------------------------------------------


def test_clusters_are_numbered_by_size_and_know_their_clients(tmp_path: Path) -> None:
    strategy = FPFC(SmoothedSCAD(0.5), lr=0.2, local_epochs=1)
    strategy.start(Federation(client_app(client_fn_of(FPFCClient)), 5), initial_arrays(), 1)
    # Two clusters, that of clients 1, 3 and 4 is the larger; numbered from the first client it
    # would be the second.
    strategy.clusters = lambda nu=None: np.array([0, 1, 0, 1, 1])  # type: ignore[method-assign]
    models = strategy.models()
    assert models.cluster_of == {0: 2, 1: 1, 2: 2, 3: 1, 4: 1}
    clients = [f"client-{client}" for client in range(5)]
    assert list(models.named()) == ["global", "cluster-1", "cluster-2", *clients]
    models.save(tmp_path)
    assert load_models(tmp_path).cluster_of == models.cluster_of


def test_a_damaged_or_swapped_file_is_refused(tmp_path: Path) -> None:
    with refused(FileNotFoundError, tmp_path):
        load_models(tmp_path)
    models = Models("M", personal={1: {"w": np.ones(2)}, 2: {"w": np.zeros(2)}})
    first, second = models.save(tmp_path)
    good = first.read_bytes()
    for content in (good[:-1], second.read_bytes(), None):
        if content is None:
            first.unlink()
        else:
            first.write_bytes(content)
        with refused(DamagedFileError, first):
            load_models(tmp_path)
    (tmp_path / "models.json").write_text('{"models": []')
    with refused(DamagedFileError, tmp_path / "models.json"):
        load_models(tmp_path)


def test_models_of_a_run_before_are_not_among_those_of_this_one(tmp_path: Path) -> None:
    Models("M", personal={client: {"w": np.ones(2)} for client in range(3)}).save(tmp_path)
    Models("M", personal={0: {"w": np.ones(2)}}).save(tmp_path)
    assert list(load_models(tmp_path).personal) == [0]


# --- Models that stay with their clients ----------------------------------------------------------


def test_a_client_that_sends_no_usable_model_is_named_and_missing(warned: Warned) -> None:
    class Forgetful(LocalClient):
        def personal_arrays(self) -> dict[str, np.ndarray]:
            client = self.context.node_config["partition-id"]
            if client == 0:
                raise OSError("the disk is gone")
            own = super().personal_arrays()
            return own | ({"head.bias": np.full(3, np.nan)} if client == 1 else {})

    strategy = Local(lr=0.1)
    grid = Federation(client_app(client_fn_of(Forgetful)), 3)
    strategy.start(grid, initial_arrays(), 1, collect=True)
    assert list(strategy.models().personal) == [2]
    assert warned("client 0", "the disk is gone")
    assert warned("client 1", "head.bias", "NaN")
    strategy.start(grid, initial_arrays(), 1)  # not asked to collect
    assert names(strategy.models().absent, "LocalClient", "collect=True")


def own_handlers(may_collect: bool) -> Any:
    """Return an app with handlers of a user's own."""
    app = client_app()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return answer(make_client(LocalClient, context), message, may_collect=may_collect)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return answer(make_client(LocalClient, context), message)

    return app


@pytest.mark.parametrize(
    ("app", "expected"),
    [
        (client_app(client_fn_of(LocalClient), num_clients=3), []),
        (client_app(client_fn_of(LocalClient), num_clients=3, may_collect=True), [0, 1, 2]),
        (
            client_app(
                client_fn_of(LocalClient),
                may_collect=lambda context: context.node_config["partition-id"] != 1,
            ),
            [0, 2],
        ),
        (own_handlers(False), []),
        (own_handlers(True), [0, 1, 2]),
    ],
)
def test_a_site_is_asked_whether_its_models_may_be_collected(
    app: Any, expected: list[int], warned: Warned
) -> None:
    def alone(message: Message, context: Context) -> Message:
        """Answer as on a site of its own, where the client knows of no simulation."""
        reply: Message = contextvars.Context().run(app, message, context)
        return reply

    strategy = Local(lr=0.1)
    strategy.start(InProcessGrid(alone, 3), initial_arrays(), 1, collect=True)
    assert sorted(strategy.models().personal) == expected
    assert all(warned(f"client {client}", "may_collect=True") for client in {0, 1, 2} - {*expected})


SPLIT = ["FedAPM", "FedAlt", "FedRoD", "FedCP", "FedSim", "LGFedAvg"]


@pytest.mark.parametrize("name", fast(["FedAPM"], SPLIT))
def test_a_server_that_names_personal_arrays_does_not_get_them(name: str) -> None:
    case = case_of(name)
    strategy: Any = case.strategy(seed=1)
    strategy.upload_spec = lambda: strategy.model_spec
    with refused(RuntimeError, strategy.personal, "not sent"):
        strategy.start(grid_of(case), case.initial_arrays(), 1)


# --- During the run -------------------------------------------------------------------------------


def test_evaluate_fn_gets_a_whole_model_where_a_part_stays_with_the_clients() -> None:
    case, seen = case_of("FedAPM"), list[ArrayRecord]()  # "^head" stays

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> None:
        make_model().load_state_dict(arrays.to_torch_state_dict())
        seen.append(arrays)

    first = case.initial_arrays()
    case.strategy(seed=1).start(grid_of(case), first, 2, evaluate_fn=evaluate_fn)
    assert len(seen) == 3
    for name, array in seen[-1].items():
        stayed = torch.equal(*(torch.tensor(a.numpy()) for a in (array, first[name])))
        assert stayed == name.startswith("head")


SCORES = [5.0, 3.0, 1.0, 4.0, 1.0, 9.0]
"""What `evaluate_fn` says after rounds 0 to 5: round 2 is the best by "min"."""


def scored(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"score": SCORES[server_round], "counts": [1, server_round]})


def best_of(folder: Path) -> tuple[int, float]:
    found = json.loads((folder / "best.json").read_text())
    return found["round"], found["value"]


@pytest.mark.parametrize("ended_after", [2, 3])
def test_the_best_model_is_kept_in_a_resumed_run_as_well(ended_after: int, tmp_path: Path) -> None:
    def run(num_rounds: int, resume: bool) -> Any:
        strategy = Mean()
        keep = KeepBest(strategy, tmp_path / "best", "server-score")
        options: Any = {"checkpoint_dir": tmp_path, "resume": resume, "evaluate_fn": scored}
        return strategy.start(
            grid_of(CHEAP), CHEAP.initial_arrays(), num_rounds, on_round=keep, **options
        )

    run(ended_after, resume=False)
    best = load_models(tmp_path / "best").named()["global"]
    result = run(5, resume=True)
    assert best_of(tmp_path / "best") == (2, 1.0)  # round 4 has 1.0 as well, which is no better
    assert_same_bits(load_models(tmp_path / "best").named()["global"], best)
    assert result.evaluate_metrics_serverapp[5]["counts"] == [1, 5]


def test_a_new_run_takes_no_best_round_of_a_folders_old_one(tmp_path: Path) -> None:
    strategy, note = Mean(), {"round": 1, "metric": "server-score", "value": -1.0}
    (tmp_path / "best.json").write_text(json.dumps(note))
    keep = KeepBest(strategy, tmp_path, "server-score")
    options: Any = {"evaluate_fn": scored, "on_round": keep}
    strategy.start(grid_of(CHEAP), CHEAP.initial_arrays(), 1, **options)
    assert best_of(tmp_path) == (1, SCORES[1])


def test_decisions_are_made_without_extremes_but_for_what_the_server_measured() -> None:
    run = Mean().run
    reported = {0: 1.0, 1: 2.0, 2: 999.0}
    run.record.train_metrics[4] = {
        client: {"loss": value, "own": value, "num-examples": 10.0}
        for client, value in reported.items()
    }
    mean = sum(reported.values()) / 3
    found = run.for_decisions(4, {"train-loss": mean, "train-own": 7.0, "loss": 0.5})
    assert found == {"train-loss": 2.0, "train-own": 7.0, "loss": 0.5}


def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path) -> None:
    with refused(ValueError, "mode", "most"):
        KeepBest(Mean(), tmp_path, "loss", "most")  # type: ignore[arg-type]
    # Local's models are all the clients'.
    for case, metric, named in (
        (CHEAP, "acuracy", "acuracy"),
        (case_of("Local"), "loss", "collect=True"),
    ):
        strategy = case.strategy()
        keep = KeepBest(strategy, tmp_path, metric, "max")
        with refused(ValueError, "KeepBest", named):
            strategy.start(grid_of(case), case.initial_arrays(), 1, on_round=keep)
