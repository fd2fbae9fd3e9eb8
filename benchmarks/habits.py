"""Writes `docs/compilers.md`: what jdelta takes XLA to do on TPUs, on NVIDIA's GPUs and on CPUs.

Everything on the page stands in `jdelta/_src/backends`: what a habit is, in `backend.py`; what it
is for a compiler, and the comment that says how that is known, in the file of that compiler.

    python -m benchmarks.habits
"""

import ast
import dataclasses
import inspect
import io
import re
import tokenize
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.study import markdown
from jdelta._src.backends import backend, cpu, cuda, tpu

PAGE = Path(__file__).parents[1] / "docs" / "compilers.md"

HEAD = """# Compilers: what XLA is taken to do, and how that is known

Written by `python -m benchmarks.habits` from `jdelta/_src/backends`: there each compiler has a
file, and who disagrees with a line changes it. Notes say where a habit was seen; one without a note
was seen in scheduled programs, by one of the studies in `benchmarks/compilers`."""

FILES: dict[str, tuple[ModuleType, backend.Backend]] = {
    "TPU": (tpu, tpu.TPU),
    "CUDA": (cuda, cuda.CUDA),
    "CPU": (cpu, cpu.CPU),
}


def meanings(kind: type[Any]) -> dict[str, str]:
    """From the fields of a record to what its docstring says of each."""
    _, _, attributes = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    matches = re.findall(r"^    (\w+): ((?:.+\n?(?:        .+\n?)*))", attributes, re.MULTILINE)
    return {name: " ".join(said.split()).replace("``", "`") for name, said in matches}


def comments(module: ModuleType) -> dict[tuple[str, str], str]:
    """From the part and the name of each habit in a file to the comment that it has there."""
    text = inspect.getsource(module)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    said = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    alone = {n for n, line in enumerate(text.splitlines(), 1) if line.lstrip().startswith("#")}
    notes: dict[tuple[str, str], str] = {}
    for part in ast.walk(ast.parse(text)):
        if not isinstance(part, ast.keyword) or not isinstance(part.value, ast.Call):
            continue
        for habit in part.value.keywords:
            first = habit.lineno
            while first - 1 in alone:
                first -= 1
            lines = [*range(first, habit.lineno), habit.value.end_lineno or 0]
            if comment := " ".join(said[n] for n in lines if n in said):
                notes[str(part.arg), str(habit.arg)] = comment
    return notes


def shown(value: Any) -> str:
    """The value of a habit; functions by what their docstring says first."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if callable(value):
        doc = inspect.getdoc(value)
        assert doc, f"{value.__name__} says nothing of what it does"
        return doc.splitlines()[0].replace("``", "`")
    if isinstance(value, Mapping):
        sizes = (f"{key} B: {' × '.join(map(str, one))}" for key, one in value.items())
        return ", ".join(sizes) or "none"
    if isinstance(value, (frozenset, tuple)):
        items = sorted(value) if isinstance(value, frozenset) else value
        return ", ".join(map(str, items)) or "none"
    if dataclasses.is_dataclass(value):
        return ", ".join(f"{f.name} {getattr(value, f.name)}" for f in dataclasses.fields(value))
    return "none" if value is None else f"{value:g}"


def sections() -> list[str]:
    """One for each part of a backend."""
    notes = {name: comments(module) for name, (module, _) in FILES.items()}
    parts = {name: said for name, said in meanings(backend.Backend).items() if name != "platform"}
    blocks: list[str] = []
    for part, said in parts.items():
        kind = type(getattr(tpu.TPU, part))
        values = [getattr(one, part) for _, one in FILES.values()]
        if not dataclasses.is_dataclass(kind):
            rows = [[f"`{part}`", said, *map(shown, values)]]
        else:
            rows = [
                [f"`{habit}`", meaning, *(shown(getattr(value, habit)) for value in values)]
                for habit, meaning in meanings(kind).items()
            ]
        why = [
            f"- `{habit}`, {name}: {note[part, habit]}"
            for habit in meanings(kind)
            for name, note in notes.items()
            if (part, habit) in note
        ]
        heads = ("habit", "what it says", *FILES)
        blocks.append(f"## {part}: {said.rstrip('.')}\n\n{markdown(heads, rows)}")
        if why:
            blocks.append("\n".join(why))
    return blocks


def page() -> str:
    """The whole page."""
    return "\n\n".join([HEAD, *sections()]) + "\n"


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
