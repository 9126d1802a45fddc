"""How many random mistakes in the code do the tests notice?

    python -m tests.mutation --count 100 --seed 1 --out mutations.jsonl

draws mistakes (an operator or a number that is another one, a statement that is missing, branches
that are swapped) in the code of the methods, and runs the tests of each in a copy of the
repository until one fails: of all mistakes the fast tests first; then, of those that no fast test
notices, the slow ones of the module's folder and of the contract. `pytest-testmon` knows from one
run without a mistake which fast tests run the mistaken code. Every trial becomes a line of `--out`,
and one that stands there already is not repeated, so that an interrupted command goes on. Text, log
lines, and constants of modules and settings are left as they are.

Neither mutmut nor cosmic-ray draws by a seed or runs tests in stages, so this is a script.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
CODE = ["algorithms", "maths", "runtime"]
STAGES = ["fast", "slow"]
FOLDERS = [f"fl_admm_strategies/{folder}" for folder in CODE] + ["clients/methods"]

PAIRS: list[tuple[type, type]] = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn)),
    *((ast.Is, ast.IsNot), (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.And, ast.Or)),
]
SWAPPED = dict(PAIRS) | {second: first for first, second in PAIRS}
SWAPPED |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.MatMult: ast.Add}


class Mutation(NamedTuple):
    """A mistake: in a file, from byte `start` to `end`, `after` stands in place of `before`."""

    file: str
    line: int
    start: int
    end: int
    before: str
    after: str


def is_left(node: ast.AST) -> bool:
    """Return whether nothing in a node is mutated: log lines, errors, text, types."""
    if isinstance(node, ast.Expr):
        return is_left(node.value)
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("log", "warnings.warn")
    left = (ast.Raise, ast.JoinedStr, ast.AnnAssign, ast.arg, ast.Import, ast.ImportFrom)
    return isinstance(node, left)


def nodes_of(parent: ast.AST) -> Iterator[ast.AST]:
    """Return the nodes that may be mutated: all below the functions' bodies."""
    outside = isinstance(parent, ast.Module | ast.ClassDef)  # constants and settings
    inside = parent.body if isinstance(parent, ast.FunctionDef) else ast.iter_child_nodes(parent)
    for node in inside:
        if is_left(node) or (outside and not isinstance(node, ast.ClassDef | ast.FunctionDef)):
            continue
        yield node
        yield from nodes_of(node)


def changes_of(node: ast.AST) -> Iterator[str]:
    """Return the texts that could stand in place of a node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        ops: Any = [SWAPPED[type(node.ops[0])]()]
        yield ast.unparse(ast.Compare(node.left, ops, node.comparators))
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        yield ast.unparse(ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right))
    elif isinstance(node, ast.BoolOp):
        yield ast.unparse(ast.BoolOp(SWAPPED[type(node.op)](), node.values))
    elif isinstance(node, ast.UnaryOp):
        yield ast.unparse(node.operand)
    elif isinstance(node, ast.IfExp):
        yield ast.unparse(ast.IfExp(node.test, node.orelse, node.body))
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        yield repr(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.Assign | ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
    ):
        yield "pass"
    elif isinstance(node, ast.If):
        yield f"not ({ast.unparse(node.test)})"


def mutations_of(file: str, source: str) -> list[Mutation]:
    """Return all mistakes that could be made in a file."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = set()
    for node in nodes_of(ast.parse(source)):
        for after in changes_of(node):
            place: Any = node.test if isinstance(node, ast.If) else node
            start = starts[place.lineno - 1] + place.col_offset
            end = starts[place.end_lineno - 1] + place.end_col_offset
            before = source.encode()[start:end].decode()
            changed = after if after == "pass" else f"({after})"
            found.add(Mutation(file, place.lineno, start, end, before, changed))
    return sorted(found)


def slow_tests_of(file: str) -> list[str]:
    """Return what pytest is given to run the slow tests for a mistake in a file."""
    folders = [Path("tests", Path(file).parent), Path("tests/contract")]
    return [*(str(folder) for folder in folders if (ROOT / folder).is_dir()), "-m", "slow"]


def run_tests(copy: Path, arguments: list[str], limit: float) -> str:
    """Return the test that fails first in a copy of the repository, or an empty text.

    Raises
    ------
    RuntimeError
        If pytest fails otherwise than by a test.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return f"no end in {limit:.0f} s"
    if process.returncode in (0, 5):  # 5: there was no test to run
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) .*", output, re.MULTILINE)
    return failed[0] if failed else output[-300:].strip()


def noticed_by(copy: Path, mutation: Mutation, arguments: list[str], limit: float) -> str:
    """Return the test that notices a mistake, or an empty text."""
    path = copy / mutation.file
    source = path.read_bytes()
    path.write_bytes(source[: mutation.start] + mutation.after.encode() + source[mutation.end :])
    try:
        return run_tests(copy, arguments, limit)
    finally:
        path.write_bytes(source)


def copy_repository(copy: Path) -> None:
    """Copy what git knows of, as it is in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    archive = ["tar", "--create", "--null", "--files-from=-"]
    packed = subprocess.run(archive, cwd=ROOT, input=listed.stdout, capture_output=True, check=True)
    subprocess.run(["tar", "--extract"], cwd=copy, input=packed.stdout, check=True)


def table_of(lines: list[dict[str, Any]]) -> str:
    rows = ["| file | line | code | mistake | noticed by |", "|---|---|---|---|---|"]
    for line in lines:
        code, mistake = (" ".join(line[key].split())[:60] for key in ("before", "after"))
        noticed = line["noticed"].split("::")[-1][:60] or "**nothing**"
        rows.append(f"| {line['file']} | {line['line']} | `{code}` | `{mistake}` | {noticed} |")
    noticed = sum(bool(line["noticed"]) for line in lines)
    share = 100 * noticed / len(lines) if lines else 0
    return "\n".join([*rows, "", f"{noticed} of {len(lines)} noticed: {share:.0f} %."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("mutations.jsonl"))
    parser.add_argument("--limit", type=float, default=1200, help="seconds for a stage of one")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    given = parser.parse_args()
    files = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    names = [str(path.relative_to(ROOT)) for path in files]
    found = [m for name in names for m in mutations_of(name, (ROOT / name).read_text())]
    drawn = random.Random(given.seed).sample(found, given.count)
    done = given.out.read_text().splitlines() if given.out.exists() else []
    tried = {(*line["key"], line["stage"]): line for line in map(json.loads, done)}
    last: dict[Mutation, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, given.out.open("a") as out:
        copy = Path(folder)
        copy_repository(copy)
        if failed := run_tests(copy, ["--testmon"], 7200):
            raise SystemExit(f"A fast test fails without a mistake. Mend it first. {failed}")
        for stage, mutation in itertools.product(given.stages, drawn):
            if mutation in last and last[mutation]["noticed"]:
                continue
            key = (mutation.file, mutation.start, mutation.end, mutation.after)
            if (*key, stage) not in tried:
                fast = ["--testmon", "--testmon-nocollect", "-n", "0"]
                tests = fast if stage == "fast" else slow_tests_of(mutation.file)
                began = time.monotonic()
                noticed = noticed_by(copy, mutation, tests, given.limit)
                seconds = round(time.monotonic() - began)
                line = {"key": key, "stage": stage, "noticed": noticed, "seconds": seconds}
                line |= mutation._asdict()
                out.write(json.dumps(line) + "\n")
                out.flush()
                tried[(*key, stage)] = line
            last[mutation] = tried[(*key, stage)]
    print(table_of([last[mutation] for mutation in drawn]))


if __name__ == "__main__":
    main()
