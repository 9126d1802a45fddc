"""Memory of FPFC's pairwise store from the common start until the clusters have separated.

Run with `python tests/benchmarks/pairwise_memory.py` (8.3 GB of memory, half a minute). 1000
clients in four well-separated clusters, f_i(w) = .5 ||w - c_i||^2, 30 % of the clients per round,
a few local steps (5) each, so that the clusters drift apart gradually. Dense
theta and v would take 2 m^2 d = 32 GB in float32. Linux only (it reads /proc).
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

import numpy as np

from fl_admm_strategies.maths.clustering import clusters
from fl_admm_strategies.maths.pairs import PairwiseStore
from fl_admm_strategies.maths.penalties import SmoothedSCAD

CLIENTS, WIDTH, ACTIVE, CLUSTERS = 1000, 4010, 300, 4
RHO, MAX_ROUNDS = 1.0, 60
STEP_SIZE, STEPS = 0.02, 5


def main() -> None:
    """Print one line per round until only pairs within clusters are stored."""
    rng = np.random.default_rng(0)
    truth = np.arange(CLIENTS) % CLUSTERS
    # Centres 7 apart, members within .2 of each other: a lam = 2.22 lies well between.
    centres = 5 * np.linalg.qr(rng.normal(size=(WIDTH, CLUSTERS)))[0].T
    optima = centres[truth] + 0.1 / np.sqrt(WIDTH) * rng.normal(size=(CLIENTS, WIDTH))
    optima = optima.astype(np.float32)
    store = PairwiseStore(np.zeros_like(optima), SmoothedSCAD(0.6), RHO)
    within = CLUSTERS * (CLIENTS // CLUSTERS) * (CLIENTS // CLUSTERS - 1) // 2
    print(f"engine {store.engine}; dense theta and v: {2 * CLIENTS**2 * WIDTH * 4 / 1e9:.1f} GB")
    print("round  stored pairs  store GB  RSS GB  peak RSS GB  update+zeta s")
    for number in range(1, MAX_ROUNDS + 1):
        active = rng.permutation(CLIENTS)[:ACTIVE]
        start = time.perf_counter()
        zeta = store.zeta(active)
        seconds = time.perf_counter() - start
        # All steps of (5) at once: they shrink the distance to the minimiser of (9).
        minimiser = (optima[active] + RHO * zeta) / (1 + RHO)
        shrunk = (1 - STEP_SIZE * (1 + RHO)) ** STEPS
        models = minimiser + shrunk * (store.omega[active] - minimiser)
        start = time.perf_counter()
        store.update(active, models)
        seconds += time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        held = store.nbytes / 1e9
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        now = pages * resource.getpagesize() / 1e9
        print(
            f"{number:5d}  {store.num_stored:12d}  {held:8.2f}  {now:6.2f}  {peak:11.2f}"
            f"  {seconds:13.2f}",
            flush=True,
        )
        arrays = store.state_arrays()
        apart = np.array_equal(truth[arrays["pair_i"]], truth[arrays["pair_j"]])
        if apart and store.num_stored == within:
            break
    labels = clusters(store.theta_norms(), nu=0.5)
    print(f"pairs within the true clusters: {within}; clusters found: {labels.max() + 1}")


if __name__ == "__main__":
    main()
