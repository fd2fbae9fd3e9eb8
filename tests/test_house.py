"""The rooms of the house: which package a module is in, and what it may import."""

import ast
import functools
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import jdelta

ROOT = Path(__file__).parents[1] / "jdelta"
LEAVES = ("errors", "decision", "sizes", "cache", "versions")
PACKAGES = (
    *("_jax", "backends", "solver", "spill", "program", "regions", "estimate", "hlo", "order"),
    *("residuals", "passes", "search", "plan", "report", "api", "cli"),
)
ROOMS = (*LEAVES, *PACKAGES[:-1], "plot", "cli", "__main__", "")
"""Each may import only from those before it; the last is `jdelta` itself, which re-exports."""

MOST_LEVELS = 12

NO_NAMES = frozenset("found made given there again late held whole near".split())
"""Words that say where a value stands in a sentence, not what it is."""

NAMED_BY_OTHERS = {"jdelta/plot.py": {"found"}, "jdelta/_src/spill/store.py": {"held", "late"}}
"""A public argument, and counters that the native store calls so."""


def name_of(path: Path) -> str:
    """As in `jdelta._src.hlo.text`."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def room_of(module: str) -> str:
    """As in `hlo`, or `errors` for a leaf."""
    parts = module.removeprefix("jdelta").removeprefix("._src").split(".")
    return parts[1] if len(parts) > 1 else ""


@functools.cache
def imported(module: str) -> frozenset[str]:
    """The modules of jdelta that a module imports, wherever in it, for types only too."""

    def names() -> Iterator[str]:
        for node in ast.walk(ast.parse(MODULES[module].read_text("utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}: imports are absolute"
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield inner if inner in MODULES else str(node.module)

    return frozenset(name for name in names() if name in MODULES and name != module)


def test_jdelta_holds_what_users_and_python_ask_for():
    names = {path.name for path in ROOT.iterdir()} - {"__pycache__"}
    assert names == {"__init__.py", "__init__.pyi", "__main__.py", "plot.py", "py.typed", "_src"}


def test_what_is_public_is_loaded_when_it_is_asked_for():
    """A module that marks regions waits for no planner, and one that imports jdelta for nothing."""
    assert all(getattr(jdelta, name) is not None for name in jdelta.__all__)
    script = """
        import sys, jdelta
        rooms = lambda: sorted({m.split(".")[2] for m in sys.modules if "jdelta._src." in m})
        print(rooms())
        jdelta.remat
        print(rooms())
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=True, capture_output=True, text=True
    )
    before, after = map(ast.literal_eval, process.stdout.splitlines())
    assert before == ["versions"]  # whether another package of that name is installed
    assert "regions" in after
    assert not {"search", "passes", "solver", "api", "report"} & set(after)


def test_every_module_is_in_a_room():
    names = {path.stem for path in (ROOT / "_src").iterdir()} - {"__pycache__", "__init__"}
    assert names == {*LEAVES, *PACKAGES}


@pytest.mark.parametrize("module", MODULES)
def test_imports_come_from_rooms_above(module):
    place = ROOMS.index(room_of(module))
    upwards = {name for name in imported(module) if ROOMS.index(room_of(name)) > place}
    assert not upwards


def test_no_module_imports_itself_by_way_of_others():
    def reached(module: str) -> set[str]:
        modules: set[str] = set()
        todo = [module]
        while todo:
            new = imported(todo.pop()) - modules
            modules |= new
            todo.extend(new)
        return modules

    assert [module for module in MODULES if module in reached(module)] == []


def test_rooms_are_few_levels_deep():
    below = {
        room: {room_of(name) for m in MODULES if room_of(m) == room for name in imported(m)}
        for room in ROOMS
    }

    @functools.cache
    def level(room: str) -> int:
        return 1 + max((level(other) for other in below[room] - {room}), default=0)

    assert max(map(level, ROOMS)) <= MOST_LEVELS


@pytest.mark.parametrize("module", [m for m in MODULES if room_of(m) != "backends"])
def test_only_backends_tell_platforms_apart(module):
    compared = [
        constant.value
        for node in ast.walk(ast.parse(MODULES[module].read_text("utf-8")))
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        for constant in ast.walk(side)
        if isinstance(constant, ast.Constant)
    ]
    assert not {"tpu", "cuda", "gpu", "rocm", "cpu"}.intersection(map(str, compared))


def names_in(path: Path) -> set[str]:
    """What a file calls its variables, arguments, functions and classes."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    stored = (n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    arguments = (n.arg for n in nodes if isinstance(n, ast.arg))
    definitions = (n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef)))
    return {*stored, *arguments, *definitions}


def test_names_say_what_a_value_is():
    folders = (ROOT.parent / name for name in ("jdelta", "tests", "benchmarks", "examples"))
    vague = {
        path.relative_to(ROOT.parent).as_posix(): names_in(path) & NO_NAMES
        for folder in folders
        for path in folder.rglob("*.py")
    }
    assert {path: names for path, names in vague.items() if names} == NAMED_BY_OTHERS


def test_the_page_on_architecture_has_every_room():
    page = (ROOT.parent / "docs" / "architecture.md").read_text("utf-8")
    table = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert {name for cell in table for name in re.findall(r"`(\w+)`", cell)} == {*LEAVES, *PACKAGES}
