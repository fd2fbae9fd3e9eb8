"""Examples in docstrings run; pages of the docs lead somewhere."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

import jdelta

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("module", ["_planning", "_largest", "_remat"])
def test_examples_in_docstrings(module):
    failed, tried = doctest.testmod(importlib.import_module(f"jdelta.{module}"))
    assert tried > 3
    assert failed == 0


def test_every_public_name_is_documented():
    for name in dir(jdelta):
        public = getattr(jdelta, name)
        if not name.startswith("_") and getattr(public, "__module__", "").startswith("jdelta"):
            assert public.__doc__, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for link in re.findall(r"\]\(([^)#]+)", page.read_text("utf-8")):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_that_pages_name_exist(page):
    for module in re.findall(r"python -m ((?:benchmarks|tests)[\w.]*)", page.read_text("utf-8")):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module
    for script in re.findall(r"python (examples/\S+\.py)", page.read_text("utf-8")):
        assert (ROOT / script).exists(), script
