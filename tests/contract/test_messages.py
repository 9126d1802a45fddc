"""What travels: half precision, the maker's stamp, and apps that know nothing of this library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.testing import assert_allclose
from torch import nn

from clients import FedADMMClient, FPFCClient, SGDClient, client_app
from fl_admm_strategies import FPFC, FedADMM, SmoothedSCAD, StatefulStrategy, made_by
from tests.support.cases import CHEAP, NUM_CLIENTS, case_of, grid_of, run
from tests.support.federation import (
    Federation,
    client_fn_of,
    dataset,
    initial_arrays,
    make_client,
    make_model,
    method_state,
    node_of,
    trained,
)
from tests.support.pace import fast
from tests.support.refusals import Warned, refused

# --- Half precision -------------------------------------------------------------------------------


def test_plain_clients_understand_half_precision() -> None:
    """They reply in full precision, which counts as what it is."""
    strategy = run(CHEAP, grid_of(CHEAP), strategy=CHEAP.strategy(wire_dtype="float16"))
    assert strategy.traffic[2] == (6 * 18, 6 * 36)
    assert strategy.global_arrays["w"].numpy().dtype == np.float32


@pytest.mark.parametrize("then", fast(["float16"], ["float16", None]))
def test_a_run_goes_on_with_and_without_it(then: Any, tmp_path: Path) -> None:
    """To the same bits, where nothing is changed: what a client's rounding held back is saved."""

    def client_fn(context: Context) -> Any:
        data = [dataset(int(context.node_config["partition-id"])).tensors]
        state = tmp_path / "clients"
        return FedADMMClient(context, make_model(), data, nn.CrossEntropyLoss(), state_dir=state)

    def rounds(until: int, dtype: Any, folder: str) -> dict[str, Any]:
        strategy = FedADMM(duals="client", wire_dtype=dtype, fraction_evaluate=0, seed=1)
        checkpoints: Any = {"checkpoint_dir": tmp_path / folder, "resume": True}
        strategy.start(Federation(client_app(client_fn), 3), initial_arrays(), until, **checkpoints)
        return method_state(strategy)

    whole = rounds(4, "float16", "whole")
    rounds(2, "float16", "halves")
    halves = rounds(4, then, "halves")
    for name, array in whole.items():
        assert_allclose(halves[name], array, rtol=0, atol=1e-3 if then is None else 0)


def test_a_model_beyond_the_range_is_refused_before_anything_is_sent() -> None:
    model = make_model()
    with torch.no_grad():
        model.get_parameter("head.bias")[1] = 7e4
    strategy = FPFC(SmoothedSCAD(0.5), wire_dtype="float16")
    grid = Federation(client_app(client_fn_of(FPFCClient)), 3)
    with refused(ValueError, "head.bias", "7e+04", "float16", "wire_dtype"):
        strategy.start(grid, ArrayRecord(model.state_dict()), 2)
    assert all(server_round == 0 for _, server_round, _ in grid.sent)


def test_an_upload_beyond_the_range_is_refused_by_name(warned: Warned) -> None:
    class Growing(FPFCClient):
        def changed(self, upload: Any, reference: Any, config: Any) -> Any:
            if self.context.node_config["partition-id"] == 1 and config["server-round"] == 2:
                upload["head.bias"] = np.full_like(upload["head.bias"], -1e5)
            return super().changed(upload, reference, config)

    strategy = FPFC(SmoothedSCAD(0.5), wire_dtype="float16", fraction_evaluate=0)
    strategy.start(Federation(client_app(client_fn_of(Growing)), 3), initial_arrays(), 3)
    assert trained(strategy) == {1: [0, 1, 2], 2: [0, 2], 3: [0, 1, 2]}
    assert len(warned()) == len(warned("client 1", "head.bias", "-1e+05", "float16")) == 1


class Normed(nn.Module):
    """The small network behind a batch norm whose running variance float16 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net = nn.BatchNorm1d(3), make_model()
        self.norm.running_var.fill_(1e6)  # type: ignore[union-attr]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(self.norm(inputs))


@pytest.mark.parametrize("name", fast(["FPFC"], ["FPFC", "Ditto"]))
def test_buffers_travel_as_they_are(name: str) -> None:
    case = case_of(name)

    def client_fn(context: Context) -> Any:
        data = [dataset(int(context.node_config["partition-id"])).tensors]
        return case.client_class(context, Normed(), data, nn.CrossEntropyLoss(), test_loader=data)

    grid = Federation(client_app(client_fn), 3)
    strategy = case.strategy(wire_dtype="float16", seed=1)
    strategy.start(grid, ArrayRecord(Normed().state_dict()), 2)
    buffers = dict.fromkeys(["norm.running_mean", "norm.running_var"], "float32")
    buffers["norm.num_batches_tracked"] = "int64"
    for messages in (grid.phase("train", 2), grid.replies("train", 2), grid.phase("evaluate", 2)):
        for record in (r for m in messages for r in m.content.array_records.values()):
            for array_name, array in record.items():
                assert array.dtype == buffers.get(array_name, "float16"), array_name
    assert strategy.global_arrays["norm.running_var"].numpy().min() > 5e5


# --- Whose clients --------------------------------------------------------------------------------


def test_the_client_of_fedavg_refuses_other_strategies() -> None:
    client: Any = make_client(SGDClient, Context(1, 2, {}, RecordDict(), {}))
    for call in (client.fit, client.evaluate):
        with refused(ValueError, "SGDClient", "FedAvg", "FPFCClient"):
            call([], made_by("FPFC"))


def test_a_strategy_says_which_clients_it_is_for() -> None:
    class Silent(StatefulStrategy):
        init_state = train_instructions = update = model = None  # type: ignore[assignment]

    with refused(TypeError, "Silent", "method"):
        Silent()


# --- An app as people write it for FedAvg ---------------------------------------------------------


def fedavg_app(stamp: dict[str, int] | None = None) -> ClientApp:
    """Return a ClientApp that knows nothing of this library but, perhaps, the stamp."""
    app = ClientApp()

    def received(message: Message) -> torch.nn.Module:
        model = make_model()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        return model

    def reply(message: Message, metrics: dict[str, Any], **content: Any) -> Message:
        record = MetricRecord({**metrics, **(stamp or {})})
        return Message(RecordDict({"metrics": record, **content}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model, data = received(message), dataset(int(context.node_config["partition-id"]))
        inputs, labels = data.tensors
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        with torch.no_grad():  # `torch.optim` takes a second to import
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
        metrics = {"num-examples": len(data)}
        return reply(message, metrics, arrays=ArrayRecord(model.state_dict()))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        inputs, labels = dataset(int(context.node_config["partition-id"])).tensors
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(received(message)(inputs), labels)
        return reply(message, {"loss": loss.item(), "num-examples": len(labels)})

    return app


@pytest.mark.parametrize(("name", "stamp"), [("FedAvg", {}), ("FedProx", made_by("FedProx"))])
def test_a_client_app_written_for_fedavg_serves_a_strategy_for_any_client(
    name: str, stamp: dict[str, int], warned: Warned
) -> None:
    strategy = case_of(name).strategy(seed=1)
    strategy.start(Federation(fedavg_app(stamp), NUM_CLIENTS), initial_arrays(), 2)
    assert warned() == []
    # Such an app does not say which partition it has, so a client's id is its node's.
    assert strategy.client_ids == [node_of(client) for client in range(NUM_CLIENTS)]
    assert sorted(strategy.train_metrics[2]) == strategy.client_ids
    assert strategy.train_metrics[1][node_of(0)] == {"num-examples": 10}  # a stamp is no metric
    assert strategy.evaluate_metrics[2][node_of(0)]["loss"] > 0
    first, last = initial_arrays()["head.weight"], strategy.global_arrays["head.weight"]
    assert not np.allclose(last.numpy(), first.numpy(), atol=1e-3)
