"""The mistakes that `tests.mutation` makes."""

from __future__ import annotations

import ast

from tests.mutation import mutations_of

SOURCE = '''
"""A text with 1 + 1."""
LIMIT = 1 + 1


def step(x: int, rate: float = 0.5) -> int:
    """Return 2."""
    if x < 3:
        log(INFO, "at %s", x + 1)
        raise ValueError(f"{x - 1} is below 3")
    y = x * 2
    y += 1 if not x else -x
    store.keep(y)
    return y and x
'''


def test_every_kind_of_mistake_is_made_and_text_is_left() -> None:
    found = mutations_of("one.py", SOURCE)
    made = {(mutation.before, mutation.after) for mutation in found}
    assert made == {
        ("x < 3", "(x <= 3)"),
        ("x < 3", "(not (x < 3))"),
        ("3", "(4)"),
        ("x * 2", "(x / 2)"),
        ("2", "(3)"),
        ("y = x * 2", "pass"),
        ("y += 1 if not x else -x", "pass"),
        ("1 if not x else -x", "(-x if not x else 1)"),
        ("1", "(2)"),
        ("not x", "(x)"),
        ("-x", "(x)"),
        ("store.keep(y)", "pass"),
        ("y and x", "(y or x)"),
    }


def test_a_mistake_is_valid_code_that_differs() -> None:
    for mutation in mutations_of("one.py", SOURCE):
        code = SOURCE.encode()
        changed = code[: mutation.start] + mutation.after.encode() + code[mutation.end :]
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(code))
