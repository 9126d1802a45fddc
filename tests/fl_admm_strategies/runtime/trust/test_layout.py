"""Which of the initial arrays travel: what clients say, and what a user gets back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.runtime.messages.records import Reply
from fl_admm_strategies.runtime.trust.layout import (
    ABSENT,
    BUFFER,
    CHECKSUMS,
    FROZEN,
    ROLES,
    TRAINED,
    Layout,
    checksum,
    wrapper_of,
)
from tests.support.refusals import refused


def model() -> Arrays:
    return {
        "base": np.ones((2, 2), np.float32),
        "head": np.full(2, 2, np.float16),
        "again": np.full(2, 2, np.float16),
        "calls": np.array(3),
    }


ROLES_OF_MODEL = [FROZEN, TRAINED, 1, BUFFER]


def says(roles: list[int], sums: list[int] | None = None) -> Reply:
    own = [0] * len(roles) if sums is None else sums
    return Reply({ROLES: np.array(roles), CHECKSUMS: np.array(own)}, 1.0, {})


def learned() -> Layout:
    layout = Layout.of(model())
    layout.learn({0: says(ROLES_OF_MODEL, [checksum(model()["base"]), 0, 0, 0])})
    return layout


def test_frozen_arrays_and_second_names_stay_and_come_back() -> None:
    layout = learned()
    assert layout.trained == ["head"]
    sent = layout.to_send()
    assert {name: array.dtype for name, array in sent.items()} == {
        "head": np.dtype(np.float32),
        "calls": np.dtype(np.int64),
    }
    whole = layout.complete({"head": np.array([5, 6], np.float32), "calls": np.array(4)})
    assert list(whole) == list(model())
    assert [a.dtype for a in whole.values()] == [a.dtype for a in model().values()]
    assert_array_equal(whole["again"], [5, 6])
    assert_array_equal(whole["base"], np.ones((2, 2)))


def test_a_part_of_a_model_is_completed_as_far_as_it_goes() -> None:
    assert list(learned().complete({"calls": np.array(4)})) == ["base", "calls"]


def test_where_nobody_says_anything_all_floats_are_trained_but_a_batch_norms() -> None:
    arrays = {n: np.ones(1) for n in ("w", "bn.running_mean", "running_mean_of_mine")}
    assert Layout.of(arrays | {"n": np.array(1)}).trained == ["w", "running_mean_of_mine"]


@pytest.mark.parametrize(
    ("roles", "named"),
    [
        ([TRAINED, TRAINED, TRAINED, TRAINED], ["calls", "int64"]),
        ([TRAINED, TRAINED, 4, BUFFER], [4, "again"]),
        ([TRAINED, TRAINED, -5, BUFFER], [-5, "again"]),
        ([TRAINED, TRAINED, 0, BUFFER], ["again", "base"]),  # another shape
        ([TRAINED, 2, 1, BUFFER], ["head", "again"]),
        ([TRAINED, TRAINED, 2, BUFFER], ["again"]),
    ],
)
def test_an_answer_that_cannot_be_true_is_refused(roles: list[int], named: list[Any]) -> None:
    with refused(ValueError, *named):
        Layout.of(model()).check(np.array(roles))


def test_the_answer_of_most_counts() -> None:
    layout = Layout.of(model())
    layout.learn(
        {0: says([TRAINED] * 3 + [BUFFER]), 1: says(ROLES_OF_MODEL), 2: says(ROLES_OF_MODEL)}
    )
    assert layout.trained == ["head"]


def test_frozen_arrays_are_the_servers_unless_nobody_can_tell() -> None:
    layout = Layout.of(model())
    layout.learn({7: says(ROLES_OF_MODEL)})  # 0: a quantised array has no checksum
    with refused(ValueError, "['base']", "client 7"):
        layout.learn({7: says(ROLES_OF_MODEL, [1, 0, 0, 0])})


def test_one_whose_frozen_arrays_are_others_is_refused_alone() -> None:
    layout, right = Layout.of(model()), [checksum(model()["base"]), 0, 0, 0]
    answers = {0: says(ROLES_OF_MODEL, [1, 0, 0, 0]), 1: says(ROLES_OF_MODEL, right)}
    refusals = layout.learn(answers)
    assert list(refusals) == [0]
    assert "base" in refusals[0]
    assert layout.frozen == ["base"]


@pytest.mark.parametrize("liar", [0, 1])
@pytest.mark.parametrize("lie", [FROZEN, BUFFER, ABSENT])
def test_of_two_the_one_that_fits_the_initial_arrays_is_believed(liar: int, lie: int) -> None:
    layout = Layout.of(model())
    truth = {1 - liar: says([TRAINED, TRAINED, TRAINED, BUFFER])}
    layout.learn(dict(sorted({liar: says([lie, lie, lie, BUFFER]), **truth}.items())))
    assert layout.trained == ["base", "head", "again"]


def test_an_array_that_the_clients_lack_is_none_of_theirs() -> None:
    layout = Layout.of(model())
    layout.check(np.array([ABSENT, TRAINED, TRAINED, BUFFER]))


@pytest.mark.parametrize(
    ("names", "prefix"),
    [
        (["module.a", "module.b.c"], "module."),
        (["module._orig_mod.a", "module._orig_mod.b"], "module._orig_mod."),
        (["module.a", "b"], ""),
        (["modules.a"], ""),
        ([], ""),
    ],
)
def test_a_wrappers_prefix_is_before_all_names(names: list[str], prefix: str) -> None:
    assert wrapper_of(names) == prefix
