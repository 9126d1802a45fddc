"""How much memory and time it takes to read and deal as many ratings as the Netflix prize has.

    PYTHONPATH=. python tests/benchmarks/netflix_memory.py [--share 0.1]

It writes made-up ratings in Kaggle's form, 2 GB of them, to a temporary folder and loads them in a
process of its own. The goal is a peak below 2 GB.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from simulations.data import RatingsData, load, ratings

MOVIES, USERS, FILES = 17_770, 480_189, 4


def write(folder: Path, count: int) -> None:
    """Write `count` ratings; all files have the same, of movies of their own."""
    draw = np.random.default_rng(0)
    movies, each = MOVIES // FILES, count // FILES
    share = draw.dirichlet(np.full(movies, 0.3))  # some are rated by very many
    sizes = np.minimum(1 + np.floor(share * (each - movies)).astype(int), USERS)
    for place in np.argsort(sizes):  # what is left goes where there is room
        more = min(each - sizes.sum(), USERS - sizes[place])
        sizes[place] += more
    ids = np.sort(draw.choice(2_649_429, USERS, replace=False) + 1)
    with_dates = np.array([f",{stars},2005-09-06\n" for stars in range(1, 6)])
    bodies = []
    for size in sizes.tolist():
        users = ids[draw.choice(USERS, size, replace=False)].tolist()
        ends = with_dates[draw.integers(0, 5, size)].tolist()
        bodies.append("".join([f"{u}{e}" for u, e in zip(users, ends, strict=True)]))
    for file in range(FILES):
        with (folder / f"combined_data_{file + 1}.txt").open("w") as text:
            for number, body in enumerate(bodies):
                text.write(f"{file * movies + number + 1}:\n{body}")


def measure(root: str, count: int, transform: str) -> None:
    """Load and say what it took."""
    ratings.NETFLIX_RATINGS = count
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    data = load("netflix", 0, root, rating_transform=transform)
    assert isinstance(data, RatingsData)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dealt = sum(len(part) for own in data.clients for part in (own.train, own.test))
    print(
        f"{dealt:,} ratings of {data.num_users:,} users and {data.num_items:,} items, {transform}: "
        f"{seconds:.0f} s, peak {peak / 1e6:.2f} GB (of which {before / 1e6:.2f} were there before)"
    )


def main() -> None:
    """Write, and measure in a process that has nothing else in memory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--measure", nargs=3)
    asked = parser.parse_args()
    if asked.measure:
        root, count, transform = asked.measure
        measure(root, int(count), transform)
        return
    count = int(asked.share * 100_480_507) // FILES * FILES
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "netflix").mkdir()
        write(Path(root) / "netflix", count)
        for transform in ("none", "zscore"):
            command = [sys.executable, __file__, "--measure", root, str(count), transform]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
