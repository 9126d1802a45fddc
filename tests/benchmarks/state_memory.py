"""Memory of FedADMM's server: 4,000 clients of 100,000 numbers, u_i and pi_i, 3.2 GB.

    PYTHONPATH=. python tests/benchmarks/state_memory.py [--folder DIR] [--clients N] [--rounds K]

A tenth of the clients takes part in every round; the uploads come from here. With a folder the
clients' variables are in files in it (`state_on_disk`). It prints what of the process' memory
belongs to it alone, and what is mapped from files, which the system takes back where it is short
of memory.
"""

from __future__ import annotations

import argparse
import logging
import re
import time
from pathlib import Path

import numpy as np

from fl_admm_strategies import FedADMM
from fl_admm_strategies.runtime.messages.records import Reply

WIDTH = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--clients", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)

    strategy = FedADMM(fraction_train=0.1, state_on_disk=given.folder)
    strategy.run.begin({"w": np.ones(WIDTH, np.float32)}, range(given.clients))
    strategy.run.handshake(lambda asked, kind: [], {})
    print(f"{given.clients} clients x {WIDTH} numbers, twice: {given.clients * WIDTH * 8 / 1e9} GB")
    print(f"at the start: {memory()}")
    rng = np.random.default_rng(0)
    for number in range(1, given.rounds + 1):
        start = time.perf_counter()
        sampled = strategy.run.sampling.for_training(strategy.client_ids)
        strategy.train_instructions(number, sampled)
        replies = {
            client: Reply({"w": rng.standard_normal(WIDTH, np.float32)}, 1.0, {})
            for client in sorted(sampled)
        }
        strategy.update(number, replies)
        print(f"round {number}: {time.perf_counter() - start:.2f} s, {memory()}")


def memory() -> str:
    """Return the process' own memory and that of mapped files, in GB."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = {name: int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", status, re.M)}
    own, mapped = (found[name] * 1024 / 1e9 for name in ("RssAnon", "RssFile"))
    return f"{own:.2f} GB own, {mapped:.2f} GB mapped"


if __name__ == "__main__":
    main()
