"""A model of any size through Flower's deployment engine: seconds a round, memory of each process.

    PYTHONPATH=. python tests/benchmarks/large_message.py --megabytes 250 2200

A SuperLink, a SuperNode and two rounds of FedAvg on loopback; the model is one array of random
numbers, and the client adds 1 to it, so that what arrives can be checked. Linux only (it reads
/proc). Memory is the largest resident size; the SuperLink keeps messages in its database, as in the
guide.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from tests.support.deployment import PLAIN, Federation, is_service, status

# By program, the guide's port in its command.
PROGRAMS = {
    "flwr-serverapp": "8000",
    "flower-superlink": "8000",
    "flower-supernode": "9094",
    "flwr-clientapp": "9094",
}

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "large"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "fl-admm-strategies"
[tool.flwr.app.components]
serverapp = "large.server_app:app"
clientapp = "large.client_app:app"
[tool.flwr.app.config]
numbers = 0
out = ""
"""

SERVER = """
import json
import time

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

from fl_admm_strategies import FedAvg

app = ServerApp()


@app.main()
def main(grid, context):
    first = np.random.default_rng(0).random(context.run_config["numbers"], dtype=np.float32)
    some = slice(None, None, max(1, len(first) // 1000))
    expected = first[some] + np.float32(1) + np.float32(1)
    times = [time.time()]
    strategy = FedAvg(min_available_nodes=1, fraction_evaluate=0)
    initial = ArrayRecord({"w": Array(first)})
    del first
    strategy.start(grid, initial, 2, on_round=lambda r, _: times.append(time.time()))
    right = np.array_equal(strategy.global_model()["w"][some], expected)
    with open(context.run_config["out"], "w") as file:
        json.dump({"right": bool(right), "times": times}, file)
"""

CLIENT = """
from flwr.client import NumPyClient

from clients import client_app


class Plus(NumPyClient):
    def fit(self, parameters, config):
        parameters[0] += 1
        return parameters, 1, {}


app = client_app(lambda context: Plus().to_client())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[250])
    for megabytes in parser.parse_args().megabytes:
        with tempfile.TemporaryDirectory() as folder:
            run(Path(folder), megabytes)


def run(folder: Path, megabytes: int) -> None:
    app = folder / "large"
    (app / "large").mkdir(parents=True)
    (app / "pyproject.toml").write_text(PYPROJECT)
    (app / "large" / "__init__.py").touch()
    (app / "large" / "server_app.py").write_text(SERVER)
    (app / "large" / "client_app.py").write_text(CLIENT)
    federation, out = Federation(folder / "app", app), folder / "out.json"
    link, site, *_ = [block for block in PLAIN if is_service(block)]
    largest: dict[str, float] = {}
    try:
        federation.run(PLAIN[-2])  # the connection
        federation.start_all([link, site])
        federation.wait_for_sites("sites", 1)
        settings = f"numbers={megabytes * 10**6 // 4} out='{out}'"
        federation.start("run", f'flwr run . sites --stream -c "{settings}"')
        run = federation.forget("run")
        while run.poll() is None:
            for program, port in PROGRAMS.items():
                sizes = federation.processes(program, port).values()
                largest[program] = max(largest.get(program, 0.0), *sizes, 0.0)
            time.sleep(0.2)
        print(status(federation))
        said = json.loads(out.read_text())
        assert said["right"], "another model came back than was sent"
        first, second = (b - a for a, b in zip(said["times"], said["times"][1:], strict=False))
        memory = ", ".join(f"{program} {size:.2f}" for program, size in largest.items())
        print(f"{megabytes} MB: rounds of {first:.0f} and {second:.0f} s; GB at most: {memory}")
    except BaseException:
        federation.stop()
        raise
    finally:
        federation.close()


if __name__ == "__main__":
    main()
