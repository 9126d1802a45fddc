"""What `flwr build` bundles of this repository, and `flwr run .` sends to a SuperLink."""

from __future__ import annotations

import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk

ROOT = Path(__file__).parents[1]


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's
def test_the_bundle_has_the_packages_and_nothing_else() -> None:
    bundle = build_fab_from_disk(ROOT)
    names = set(zipfile.ZipFile(BytesIO(bundle)).namelist())
    code = {
        str(path.relative_to(ROOT))
        for package in ("clients", "fl_admm_strategies", "simulations")
        for path in (ROOT / package).rglob("*")
        if path.suffix in {".py", ".toml"}
    }
    assert names == code | {"pyproject.toml", "README.md", "LICENSE", ".info/CONTENT"}
