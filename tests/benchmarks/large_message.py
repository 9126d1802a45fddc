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
import re
import subprocess
import tempfile
import time
from pathlib import Path

from tests.support.deployment import PLAIN, Federation, is_service, status

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
            for name, size in resident(federation).items():
                largest[name] = max(size, largest.get(name, 0.0))
            time.sleep(0.2)
        print(status(federation))
        said = json.loads(out.read_text())
        assert said["right"], "another model came back than was sent"
        first, second = (b - a for a, b in zip(said["times"], said["times"][1:], strict=False))
        sizes = ", ".join(f"{name} {size:.2f}" for name, size in sorted(largest.items()))
        print(f"{megabytes} MB: rounds of {first:.0f} and {second:.0f} s; GB at most: {sizes}")
    except BaseException:
        federation.stop()
        raise
    finally:
        federation.close()


def resident(federation: Federation) -> dict[str, float]:
    """Return the size of the federation's processes, in GB, by program."""
    command = ["ps", "-A", "-ww", "-o", "rss=,args="]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    ports = "|".join(federation.ports.values())
    found: dict[str, float] = {}
    for size, args in re.findall(rf"(\d+) (.*[ :](?:{ports})\b.*)", listed):
        for word in args.split()[:2]:
            name = Path(word).name
            if name.startswith(("flwr-", "flower-")):
                found[name] = max(found.get(name, 0.0), int(size) * 1024 / 1e9)
    return found


if __name__ == "__main__":
    main()
