"""The site has the lists and blocks of a page as GitHub does, which reads Markdown otherwise."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown import Markdown
from markdown_it import MarkdownIt

from fl_admm_strategies.runtime.algorithm import Algorithm
from tests.support.pace import fast

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SITE: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
BLOCKS = re.compile(r"<(/?(?:ol|ul|li|pre|table|h\d))\b")


def as_the_site(text: str) -> str:
    extensions: dict[str, Any] = {}
    for entry in SITE["markdown_extensions"]:
        extensions |= entry if isinstance(entry, dict) else {entry: {}}
    return Markdown(extensions=list(extensions), extension_configs=extensions).convert(text)


def as_github(text: str) -> str:
    return MarkdownIt("commonmark").enable("table").render(text)


PAGES = sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", fast(["api/strategies.md", "compare.md", "tasks.md"], PAGES))
def test_a_page_has_the_blocks_of_its_source(page: str) -> None:
    """Lists, items, code, tables and headings are those that CommonMark reads, nested alike."""
    text = (DOCS / page).read_text(encoding="utf-8")
    here, there = as_the_site(text), as_github(text)
    assert BLOCKS.findall(here) == BLOCKS.findall(there)


def test_the_site_loads_nothing_from_elsewhere() -> None:
    shipped = SITE["extra_css"] + SITE["extra_javascript"]
    assert [file for file in shipped if not (DOCS / file).is_file()] == []
    assert SITE["theme"]["font"] is False  # else Google's
    styles = (DOCS / "katex/katex.min.css").read_text(encoding="utf-8")
    for font in re.findall(r"url\(([^)]*\.woff2)\)", styles):
        assert (DOCS / "katex" / font).is_file(), font


def test_the_navigation_has_four_groups_and_every_page() -> None:
    groups = [next(iter(entry)) for entry in SITE["nav"]]
    assert groups == ["Start", "Guides", "Methods", "Reference"]
    named = re.findall(r"[\w/-]+\.(?:md|ipynb)\b", str(SITE["nav"]))
    pages = [p for p in DOCS.rglob("*") if p.suffix in {".md", ".ipynb"}]
    assert sorted(named) == sorted(str(path.relative_to(DOCS)) for path in pages)


def test_the_reference_has_what_users_call() -> None:
    """Members are named one by one; what the runtime asks of a method is not among them."""
    (python,) = (entry["mkdocstrings"] for entry in SITE["plugins"] if "mkdocstrings" in entry)
    assert python["handlers"]["python"]["options"]["members"] is False
    for page in (DOCS / "api").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        for path, options in re.findall(r"^::: (\S+)\n((?:^ {4}.*\n)*)", text, flags=re.MULTILINE):
            named = (yaml.safe_load(options) or {}).get("options", {}).get("members", [])
            documented = pkgutil.resolve_name(path)
            assert [name for name in named if not hasattr(documented, name)] == [], path
            if isinstance(documented, type) and issubclass(documented, Algorithm):
                assert Algorithm.__abstractmethods__.isdisjoint(named), path
