"""What `flwr build` bundles of this repository, and `flwr run .` sends to a SuperLink."""

from __future__ import annotations

import zipfile
from io import BytesIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's
def test_the_bundle_has_the_packages_and_nothing_else() -> None:
    from flwr.cli.build import build_fab_from_files  # a third of a second to import

    # Not by `build_fab_from_disk`, which walks through an environment in .venv.
    tops = [top for top in ROOT.iterdir() if top.name == ".gitignore" or top.name[0] != "."]
    paths = [path for top in tops for path in (top, *top.rglob("*")) if path.is_file()]
    bundle, _ = build_fab_from_files({str(path.relative_to(ROOT)): path for path in paths})
    names = set(zipfile.ZipFile(BytesIO(bundle)).namelist())
    code = {
        str(path.relative_to(ROOT))
        for package in ("clients", "fl_admm_strategies", "simulations")
        for path in (ROOT / package).rglob("*")
        if path.suffix in {".py", ".toml"}
    }
    assert names == code | {"pyproject.toml", "README.md", "LICENSE", ".info/CONTENT"}
