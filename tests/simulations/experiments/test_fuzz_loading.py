"""An experiment file of any content is refused in words, or it is a complete experiment."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from simulations.experiments.catalogue import EXPERIMENTS, experiment_names
from simulations.experiments.loading import load_settings
from simulations.methods import METHODS
from simulations.settings.tables import Settings
from tests.support.texts import text

FILES = {name: (EXPERIMENTS / f"{name}.toml").read_text("utf-8") for name in experiment_names()}

fuzz = settings(
    derandomize=True, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

leaves = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-3, 3),
    st.floats(),
    text(max_size=6),
    st.dates(),
    st.times(),
    st.datetimes(),
    st.sampled_from([*METHODS, "sgd", ""]),
)
DOTTED = "algorithm algorithm.lr algorithm.penalty algorithm.penalty.type baselines client.device"
DOTTED += " data.name data.options model published report seed"
keys = st.one_of(
    text(max_size=6),
    st.sampled_from(["name", "algorithm", "type", "lr", "baselines", "ditto", "profiles", "quick"]),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)),
    max_leaves=6,
)


@st.composite
def changed(draw: st.DrawFn) -> dict[str, Any]:
    """Return an experiment that comes with the app, with one or two things changed."""
    raw = tomllib.loads(FILES[draw(st.sampled_from(sorted(FILES)))])
    for _ in range(draw(st.integers(1, 2))):
        table = raw
        while True:
            key = draw(st.sampled_from([*table, "another"]))
            if not isinstance(table.get(key), dict) or draw(st.integers(0, 3)) == 0:
                break
            table = table[key]
        if key in table and draw(st.integers(0, 3)) == 0:
            del table[key]
        else:
            table[key] = draw(values)
    return raw


def load_or_refuse(text: str, folder: Path, **options: Any) -> None:
    """Load a file; raise unless that is complete settings, or a ValueError with words."""
    path = folder / "experiment.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        found = load_settings(str(path), **options)
    except ValueError as error:
        assert type(error) is ValueError, error  # noqa: PT017 - no UnicodeError nor another kind
        return
    assert isinstance(found, Settings)
    assert type(found.algorithm).builds is METHODS[found.algorithm.name]
    path.write_text(found.to_toml(), encoding="utf-8")
    assert repr(load_settings(str(path))) == repr(found)  # NaN is not equal to itself


@pytest.mark.slow
@fuzz
@given(raw=changed(), profile=st.sampled_from(["", "quick", "paper", "none"]))
@example(raw={"algorithm": {"name": []}}, profile="")
@example(raw={"algorithm": {"name": {}}}, profile="")
@example(raw={"profiles": 3}, profile="quick")
@example(raw={"profiles": {"quick": 3}}, profile="quick")
@example(raw={"algorithm": [], "profiles": {"quick": {"algorithm.rho": 1}}}, profile="quick")
def test_a_changed_experiment_is_complete_or_refused(
    raw: dict[str, Any], profile: str, tmp_path: Path
) -> None:
    load_or_refuse(tomli_w.dumps(raw), tmp_path, profile=profile)


@fuzz
@given(text=text(max_size=40))
@example(text="\ud800")
@example(text="a = " + "[" * 5000)
@example(text="a." * 2000 + "b = 1")
def test_a_text_of_anything_is_refused(text: str, tmp_path: Path) -> None:
    load_or_refuse(text, tmp_path)


@fuzz
@given(
    key=st.one_of(
        st.sampled_from(["", *DOTTED.split()]),
        text(max_size=10),
    ),
    value=st.one_of(
        text(max_size=10), st.sampled_from(["[[", "{", "nan", "1_0", "2026-11-21", "[1,2]"])
    ),
    seed=st.one_of(st.none(), st.integers(-3, 2**70)),
)
@example(key="algorithm.name", value="[]", seed=None)
@example(key="a", value="[" * 5000, seed=None)
@example(key="data.name", value=".:", seed=None)
@example(key="data.name", value=":f", seed=None)
def test_a_change_of_anything_is_applied_or_refused(
    key: str, value: str, seed: int | None, tmp_path: Path
) -> None:
    load_or_refuse(FILES["digits-fpfc"], tmp_path, changes=[f"{key}={value}"], seed=seed)


@pytest.mark.parametrize("name", ["", "/", "a\0b", "a\0b.toml", "x" * 5000 + ".toml"])
def test_no_name_of_an_experiment_does_more_than_be_unknown(name: str) -> None:
    with pytest.raises(ValueError, match=r"experiment|TOML"):
        load_settings(name)
