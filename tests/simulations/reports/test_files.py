"""The files of a run on a full disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from fl_admm_strategies.runtime.saving.files import NotWrittenError
from simulations.reports.files import write_figure, write_text
from tests.support.disk import largest_file


def test_a_file_that_cannot_be_written_is_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_text(path, "before")
    with (
        largest_file(1_000),
        pytest.raises(NotWrittenError, match=r"result.json \(2.0 kB\) could not be written: File"),
    ):
        write_text(path, "x" * 2_000)
    with largest_file(100), pytest.raises(NotWrittenError, match=r"metric.png"):
        write_figure(tmp_path / "metric.png", Figure(), {})
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]
    assert path.read_text() == "before"
