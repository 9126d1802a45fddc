"""Memory and time of FPFC's server from the common start until the clusters have separated.

    PYTHONPATH=. python tests/benchmarks/pairwise_memory.py RESULTS --models 250 500 1000 2000
    PYTHONPATH=. python tests/benchmarks/pairwise_memory.py RESULTS --vectors 250 500 1000
    PYTHONPATH=. python tests/benchmarks/pairwise_memory.py RESULTS --models 2000 --rounds 500
    PYTHONPATH=. python tests/benchmarks/pairwise_memory.py RESULTS --picture FILE

Clients in four well-separated clusters, f_i(w) = .5 ||w - c_i||^2, 30 % of them per round, a few
local steps (5) each, so that the clusters drift apart gradually; models of 4010 numbers in float32.
A run ends before `--rounds` when in 20 rounds the number of clusters has not changed and no model
moved by more than .01; the centres are 7 apart.
By models, or with a vector for every close pair (1000 clients: 8.3 GB). Each size runs in a process
of its own and is kept in RESULTS, a JSON file. Linux only (it reads /proc).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from fl_admm_strategies.maths.pairs import PairwiseStore
from fl_admm_strategies.maths.penalties import SmoothedSCAD

WIDTH, ACTIVE, CLUSTERS = 4010, 0.3, 4
RHO = 1.0
STEP_SIZE, STEPS = 0.02, 5
SETTLED_ROUNDS, SETTLED_MOVE = 20, 0.01
GB = 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--models", type=int, nargs="*", default=[])
    parser.add_argument("--vectors", type=int, nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    if given.results.exists():
        found = json.loads(given.results.read_text(encoding="utf-8"))
    for form, sizes in (("models", given.models), ("vectors", given.vectors)):
        for clients in sizes:
            alone = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=alone) as pool:
                found.append(pool.submit(run, clients, form, given.rounds).result())
            given.results.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if given.picture:
        draw(found, given.picture)


def run(clients: int, form: str, rounds: int) -> dict[str, Any]:
    """Run so many rounds; print one line for each."""
    rng = np.random.default_rng(0)
    truth = np.arange(clients) % CLUSTERS
    # Centres 7 apart, members within .2 of each other: a lam = 2.22 lies well between.
    centres = 5 * np.linalg.qr(rng.normal(size=(WIDTH, CLUSTERS)))[0].T.astype(np.float32)
    noise = rng.standard_normal((clients, WIDTH), np.float32)
    optima = centres[truth] + np.float32(0.1 / np.sqrt(WIDTH)) * noise
    del noise
    most_bytes = {"models": 0, "vectors": 2**62}[form]
    store = PairwiseStore(np.zeros_like(optima), SmoothedSCAD(0.6), RHO, most_bytes=most_bytes)
    all_vectors = 2 * clients**2 * WIDTH * 4 / GB
    print(
        f"{clients} clients, {form}; engine {store.engine}; all theta and v: {all_vectors:.1f} GB"
    )
    print("round  close pairs  clusters   moved  store GB  RSS GB  peak RSS GB  zeta s  update s")
    processor, saved, groups, settled = 0.0, 0.0, 0, 0
    began = time.perf_counter()
    for number in range(1, rounds + 1):
        active = rng.permutation(clients)[: int(ACTIVE * clients)]
        start = time.process_time()
        zeta = store.zeta(active)
        middle = time.process_time()
        # All steps of (5) at once: they shrink the distance to the minimiser of (9).
        minimiser = (optima[active] + RHO * zeta) / (1 + RHO)
        shrunk = (1 - STEP_SIZE * (1 + RHO)) ** STEPS
        models = minimiser + shrunk * (store.omega[active] - minimiser)
        moved = float(np.linalg.norm(models - store.omega[active], axis=1).max())
        begin = time.process_time()
        store.update(active, models)
        end = time.process_time()
        processor += middle - start + end - begin
        saved = max(saved, sum(array.nbytes for array in store.state_arrays().values()) / GB)
        labels, before = store.clusters(0.5), groups
        groups = int(labels.max()) + 1
        settled = settled + 1 if groups == before and moved <= SETTLED_MOVE else 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GB
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        now = pages * resource.getpagesize() / GB
        print(
            f"{number:5d}  {store.num_stored:11d}  {groups:8d}  {moved:6.4f}  "
            f"{store.nbytes / GB:8.2f}  {now:6.2f}  {peak:11.2f}  "
            f"{middle - start:6.2f}  {end - begin:8.2f}",
            flush=True,
        )
        if settled == SETTLED_ROUNDS:
            break
    lasted = time.perf_counter() - began
    print(f"settled: {settled == SETTLED_ROUNDS}, {lasted:.0f} s with the clients and the measures")
    print(f"clusters are the true ones: {np.array_equal(labels, truth)}")
    return {
        "form": form,
        "clients": clients,
        "rounds": number,
        "settled": settled == SETTLED_ROUNDS,
        "peak GB": peak,
        "processor s a round": processor / number,
        "checkpoint GB": saved,
    }


def draw(found: list[dict[str, Any]], file: Path) -> None:
    """Draw memory and time against the number of clients."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    memory, lasted = figure.subplots(1, 2)
    names = {"models": "by the clients' models", "vectors": "a vector for each close pair"}
    for form, name in names.items():
        runs = sorted((r for r in found if r["form"] == form), key=lambda r: int(r["clients"]))
        clients = [own["clients"] for own in runs]
        memory.plot(clients, [own["peak GB"] for own in runs], "o-", label=name)
        lasted.plot(clients, [own["processor s a round"] for own in runs], "o-", label=name)
    sizes = sorted({own["clients"] for own in found})
    dense = [2 * m**2 * WIDTH * 4 / GB for m in sizes]
    memory.plot(sizes, dense, "k:", label="all of theta and v, as printed")
    for axes, title in ((memory, "peak memory, GB"), (lasted, "processor time, s a round")):
        axes.set(xscale="log", yscale="log", xlabel="clients", title=title)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    memory.legend()
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    main()
