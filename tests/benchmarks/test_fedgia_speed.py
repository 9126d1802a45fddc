"""FedGiA's client round at k0 = 1 and k0 = 20, and the measurement of its curvature.

The steps are in closed form, so that their number costs nothing. r_i is compared with the singular
values that it could be had from.

Run with `pytest tests/benchmarks/test_fedgia_speed.py --benchmark-enable`. Compare within a group.
``new client`` makes the loss anew for every message, as an app without a cache of its own does; the
factor is then found by the content of the data. Nothing here asserts a time. Without
--benchmark-enable, small data show that it works.
"""

from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from clients import FedGiALinearClient, LeastSquares
from fl_admm_strategies.algorithms.fedgia import FedGiAInstruction, FedGiARule
from tests.clients.methods.messages import received

SIZES = [
    pytest.param(100, 100, id="d=100,n=100"),  # Example V.1
    pytest.param(140, 1024, id="d=140,n=1024"),  # QSAR
    pytest.param(3125, 200, id="d=3125,n=200"),  # Santander
]


@pytest.mark.parametrize("fresh", [False, True], ids=["kept", "new client"])
@pytest.mark.parametrize("steps", [1, 20])
@pytest.mark.parametrize("hessian", ["diagonal", "gram"])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_client_round(benchmark, rows, columns, hessian, steps, fresh):
    benchmark.group = f"d={rows}, n={columns}, {hessian}{', new client' * fresh}"
    if not benchmark.enabled:
        rows, columns = rows // 20, columns // 20
    rng = np.random.default_rng(0)
    data, targets = rng.normal(size=(rows, columns)), rng.normal(size=rows)
    x = rng.normal(size=columns)
    loss = LeastSquares(data, targets)
    curvature = loss.largest_curvature()
    rule = FedGiARule(True, curvature, 0.15 * curvature / 64, 64, steps, hessian == "gram")
    instruction = FedGiAInstruction({"x": x}, rule.text())
    upload = ["x", "message/x"] if hessian == "gram" else ["x"]
    parameters, config = received(instruction, upload=upload)

    def client_round() -> Any:
        context = Context(1, 2, {}, RecordDict(), {})
        problem = LeastSquares(data, targets) if fresh else loss
        return FedGiALinearClient(context, problem).fit(parameters, config)

    reply, _, _ = benchmark.pedantic(client_round, warmup_rounds=3, rounds=200)
    assert np.isfinite(reply).all()


@pytest.mark.parametrize("how", ["singular value", "largest_curvature"])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_curvature_of_a_linear_model(benchmark: Any, rows: int, columns: int, how: str) -> None:
    benchmark.group = f"r_i, d={rows}, n={columns}"
    shape = (rows, columns) if benchmark.enabled else (rows // 20, columns // 20)
    data = np.random.default_rng(0).normal(size=shape)
    loss = LeastSquares(data, np.zeros(len(data)))
    if how == "singular value":
        found = benchmark(lambda: float(np.linalg.norm(data, 2)) ** 2 / len(data))
    else:
        found = benchmark(loss.largest_curvature)
    assert found == pytest.approx(loss.largest_curvature())
