"""Examples in docstrings run; pages of the docs lead somewhere."""

import dataclasses
import doctest
import functools
import importlib
import inspect
import json
import re
import typing
from pathlib import Path

import pytest

import jdelta
from benchmarks import record, when_not
from jdelta._src.plan.record import PlanRecord

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "jdelta").rglob("*.py"))
    if ">>> " in path.read_text("utf-8")
]
PUBLIC = [
    value
    for name, value in vars(jdelta).items()
    if not name.startswith("_") and getattr(value, "__module__", "").startswith("jdelta")
]


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


def test_the_schema_of_plan_files_says_what_fields_are():
    schema = ROOT / "jdelta/_src/plan/plan.schema.json"
    shown = json.loads(schema.read_text("utf-8"))["properties"]
    plan = {f.name for f in dataclasses.fields(jdelta.Plan) if not f.name.startswith("_")}
    assert shown.keys() == plan | {"jdelta_plan"}
    for name, part in typing.get_type_hints(PlanRecord).items():
        if name in plan:
            fields = [f.name for f in dataclasses.fields(part)]
            assert list(shown[name]["properties"]) == shown[name]["required"] == fields


def test_the_table_of_when_not_to_use_it_is_that_of_the_results():
    assert when_not.markdown() in (ROOT / "docs" / "how-it-works.md").read_text("utf-8")


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


SAME_NAME = (
    *("compiled_order", "hand_policies", "max_batch", "offload", "order", "per_layer", "pins"),
    *("prices", "resident", "rok", "savings", "sharded", "simulation", "small_order", "throttled"),
    *("programs", "unmarked", "updates"),
)
TABLES = {
    "budgets-cuda-h100": "budgets",
    "budgets-tpu-v5e": "budgets",
    "device-nvidia-h200": "device",
    "rok-nvidia-h200": "rok",
    "turns-nvidia-h200": "turns",
    "sweep": "budgets",
    "cycles": "xla.cycles",
    "gradients": "xla.gradients",
    "kernels": "xla.kernels",
    "random_bits": "xla.random_bits",
    "transfers": "xla.transfers",
    **{name: name for name in SAME_NAME},
}
"""From files of results to the scripts that print the tables of the docs from them."""


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_those_of_the_result_files(name):
    script = importlib.import_module(f"benchmarks.{TABLES[name]}")
    rows = record.load(ROOT / "benchmarks" / "results" / f"{name}.json")
    assert len(rows) >= 3
    texts = [page.read_text("utf-8") for page in PAGES]
    for table in script.markdown(rows).split("\n\n"):
        assert any(table in text for text in texts), table
