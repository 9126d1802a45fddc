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
    st.floats(),
    text(max_size=6),
    st.datetimes(),
    st.sampled_from([*METHODS, "sgd", ""]),
)
keys = st.sampled_from(["name", "algorithm", "type", "lr", "baselines", "ditto", "profiles", "?"])
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)),
    max_leaves=6,
)


@st.composite
def changed(draw: st.DrawFn) -> dict[str, Any]:
    """Return an experiment that comes with the app, with something in it changed."""
    raw = tomllib.loads(FILES[draw(st.sampled_from(sorted(FILES)))])
    table = raw
    while True:
        key = draw(st.sampled_from([*table, "another"]))
        if not isinstance(table.get(key), dict) or draw(st.booleans()):
            break
        table = table[key]
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
@example(raw={"profiles": 3}, profile="quick")
@example(raw={"profiles": {"quick": 3}}, profile="quick")
def test_a_changed_experiment_is_complete_or_refused(
    raw: dict[str, Any], profile: str, tmp_path: Path
) -> None:
    load_or_refuse(tomli_w.dumps(raw), tmp_path, profile=profile)


@pytest.mark.parametrize("content", ["\ud800", "a = " + "[" * 5000, "a." * 2000 + "b = 1"])
def test_a_text_of_anything_is_refused(content: str, tmp_path: Path) -> None:
    load_or_refuse(content, tmp_path)


@pytest.mark.parametrize("name", ["", "a\0b.toml", "x" * 5000 + ".toml"])
def test_no_name_of_an_experiment_does_more_than_be_unknown(name: str) -> None:
    with pytest.raises(ValueError, match=r"experiment|TOML"):
        load_settings(name)
