"""Examples in docstrings run; pages of the docs lead somewhere."""

import dataclasses
import doctest
import functools
import importlib
import inspect
import json
import re
import shlex
import typing
from pathlib import Path

import pytest

import jdelta
from benchmarks import __main__, study
from jdelta import plot
from jdelta._src.cli import main
from jdelta._src.plan.record import PlanRecord

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page):
    """As in `docs/results/budgets.md`."""
    return page.relative_to(ROOT).as_posix()


WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "jdelta").rglob("*.py"))
    if ">>> " in path.read_text("utf-8")
]
PUBLIC = [getattr(jdelta, name) for name in jdelta.__all__ if not name.startswith("_")]


def test_all_that_is_public_is_there():
    stub = (ROOT / "jdelta/__init__.pyi").read_text("utf-8")
    assert len(PUBLIC) == len(re.findall(r" as [A-Za-z]\w*$", stub, re.MULTILINE)) > 30


def test_there_are_examples():
    assert {
        "jdelta._src.api.planning",
        "jdelta._src.api.largest",
        "jdelta._src.regions.remat",
    } <= set(WITH_EXAMPLES)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_in_docstrings(module):
    failed, tried = doctest.testmod(importlib.import_module(module))
    assert tried > 0
    assert failed == 0


def undocumented(function):
    """What a function takes, or how it fails, that its docstring does not say."""
    text = inspect.getdoc(function) or ""
    names = inspect.signature(function).parameters.keys() - {"self", "cls"}
    return [name for name in names if not re.search(rf"\b{name}\b", text)] if text else ["all"]


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.__name__)
def test_every_public_name_is_documented(public):
    if not inspect.isclass(public):
        assert undocumented(public) == []
        assert all(part in public.__doc__ for part in ("Args:", "Raises:"))
        return
    assert inspect.getdoc(public)
    fields = dataclasses.fields(public) if dataclasses.is_dataclass(public) else ()
    shown = [f.name for f in fields if not f.name.startswith("_")]
    attributes = public.__doc__.partition("Attributes:")[2]
    assert [name for name in shown if not re.search(rf"\b{name}\b", attributes)] == []
    for name, member in vars(public).items():
        if name.startswith("_"):
            continue
        if inspect.isfunction(member):
            assert undocumented(member) == [], name
        elif isinstance(member, (property, functools.cached_property, classmethod)):
            assert inspect.getdoc(member), name


def named_by(page, directive):
    """What a page lists in the blocks of a directive, in the order of the page."""
    blocks = re.findall(rf"{directive}::\n(?:   :.*\n)*\n((?:   \w+\n)+)", page.read_text("utf-8"))
    return [name for block in blocks for name in block.split()]


def test_every_public_name_is_in_the_reference():
    listed = named_by(ROOT / "docs/reference/python.md", r"autosummary")
    functions = [
        name
        for name, one in inspect.getmembers(plot, inspect.isfunction)
        if not name.startswith("_") and one.__module__ == plot.__name__
    ]
    public = [name for name in jdelta.__all__ if not name.startswith("_")]
    assert sorted(listed) == sorted([*public, *functions])


def test_every_command_is_in_the_reference(capsys):
    page = (ROOT / "docs/reference/command-line.md").read_text("utf-8")
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"^    ([a-z][a-z-]+)(?=\s)", capsys.readouterr().out, re.MULTILINE)
    assert len(commands) >= 10
    assert re.findall(r"\{command-help\} (\S+)", page) == commands


def test_every_variable_of_the_environment_is_in_the_reference():
    page = (ROOT / "docs/reference/environment.md").read_text("utf-8")
    sources = [path.read_text("utf-8") for path in (ROOT / "jdelta").rglob("*.py")]
    looked_up = {name for text in sources for name in re.findall(r"environ.*\"([A-Z_]+)\"", text)}
    assert {"JDELTA_CACHE_DIR", "CXX"} <= looked_up
    assert [name for name in looked_up if f"`{name}`" not in page] == []


def test_every_error_is_explained():
    page = (ROOT / "docs/reference/errors.md").read_text("utf-8")
    errors = [one.__name__ for one in PUBLIC if inspect.isclass(one) and issubclass(one, Exception)]
    assert len(errors) >= 9
    assert [name for name in errors if not re.search(rf"`(jdelta\.)?{name}`", page)] == []


def test_pages_are_in_a_table_of_contents():
    pages = [page for page in PAGES if page.parent != ROOT and page.stem != "index"]
    for page in pages:
        index = (page.parent / "index.md").read_text("utf-8")
        assert re.search(rf"^(.+ <)?{page.stem}>?$", index, re.MULTILINE), name_of(page)


def test_a_page_of_results_begins_with_what_came_of_it():
    for page in (ROOT / "docs/results").glob("*.md"):
        if page.stem != "index":
            first = page.read_text("utf-8").split("\n\n")[1]
            assert re.match(r"\*\*[^*]+[.:]\*\*", first), name_of(page)


def test_the_schema_of_plan_files_says_what_fields_are():
    schema = ROOT / "jdelta/_src/plan/plan.schema.json"
    shown = json.loads(schema.read_text("utf-8"))["properties"]
    plan = {f.name for f in dataclasses.fields(jdelta.Plan) if not f.name.startswith("_")}
    assert shown.keys() == plan | {"jdelta_plan"}
    for name, part in typing.get_type_hints(PlanRecord).items():
        if name in plan:
            fields = [f.name for f in dataclasses.fields(part)]
            assert list(shown[name]["properties"]) == shown[name]["required"] == fields


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files(page):
    for link in re.findall(r"\]\(([^)#]+)", page.read_text("utf-8")):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_scripts_that_pages_name_exist(page):
    text = page.read_text("utf-8")
    for module in re.findall(r"python -m ((?:benchmarks|tests)\.[\w.]*)", text):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module
    for script in re.findall(r"python (examples/\S+\.py)", text):
        assert (ROOT / script).exists(), script
    for command in re.findall(r"python\s+-m\s+benchmarks\s+([^`]+)`", text):
        options = __main__.parser().parse_args(shlex.split(command))
        if options.command == "run":
            settings = {one.partition("=")[0] for one in options.settings}
            assert settings <= __main__.settings_of(STUDIES[options.name]), command


STUDIES = study.studies()
WITH_ROWS = [name for name, of in STUDIES.items() if of.rows()]


def test_every_file_of_results_is_of_a_study():
    files = {path for of in STUDIES.values() for path in (of.file, *of.others())}
    assert set(study.RESULTS.glob("*.json")) <= files
    assert len(WITH_ROWS) >= 12


@pytest.mark.parametrize("name", WITH_ROWS)
def test_tables_are_those_of_the_result_files(name):
    rows = STUDIES[name].rows()
    assert len(rows) >= 3
    texts = [page.read_text("utf-8") for page in PAGES]
    for table in STUDIES[name].tables(rows).split("\n\n"):
        assert any(table in text for text in texts), table
