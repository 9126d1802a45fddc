"""Flower's example apps, converted by docs/own-client.md: read where they are, not kept here."""

from __future__ import annotations

import os
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_admm_strategies import run_in_process

ROOT = Path(__file__).parents[2]
APPS = Path(os.environ.get("FL_ADMM_APPS", ROOT.parent / "shared" / "apps"))
GUIDE = (ROOT / "docs" / "own-client.md").read_text(encoding="utf-8")


def needs_app(name: str) -> pytest.MarkDecorator:
    """Return a mark that skips the tests of an app where it is not there."""
    reason = f"Flower's example app {name} is not in {APPS}; set FL_ADMM_APPS to a folder with it"
    return pytest.mark.skipif(not (APPS / name / "pyproject.toml").is_file(), reason=reason)


def block(label: str) -> str:
    """Return the guide's code that stands under ``<!-- LABEL -->``."""
    found = re.search(rf"<!-- {re.escape(label)} -->\n```\w+\n(.*?)^```$", GUIDE, re.M | re.S)
    assert found is not None, f"docs/own-client.md has no {label}"
    return found[1]


def patched(source: str, diff: str) -> str:
    """Return a file with the guide's change made; its parts stand between lines ``@@``."""
    for hunk in re.split(r"^@@\n", diff, flags=re.MULTILINE):
        lines = [line or " " for line in hunk.splitlines()]
        old = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
        new = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
        assert source.count(old) == 1, f"not once in the app:\n{old}"
        source = source.replace(old, new)
    return source


def swapped(source: str, changes: dict[str, str]) -> str:
    """Return a file with words replaced, each of which must be in it."""
    for old, new in changes.items():
        assert old in source, old
        source = source.replace(old, new)
    return source


def run_app(
    folder: Path,
    package: str,
    num_clients: int,
    run_config: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run a project in this process, from its own folder, where it writes its result."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    torch.manual_seed(0)  # the apps do not seed their models
    try:
        server = import_module(f"{package}.server_app").app
        client = import_module(f"{package}.client_app").app
        run_in_process(server, client, num_clients, run_config=run_config)
    finally:
        for name in [n for n in sys.modules if n == package or n.startswith(f"{package}.")]:
            del sys.modules[name]


def copy_of(app: str, to: Path) -> Path:
    """Copy an app's files, and nothing that was made of them."""
    return Path(shutil.copytree(APPS / app, to / app, ignore=shutil.ignore_patterns("__pycache__")))
