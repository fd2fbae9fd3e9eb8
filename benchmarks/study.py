"""The one shape of everything that is measured here: a question, its jobs, what measures them.

A study stands in a file of its own in one of the folders of `FOLDERS`, as `STUDY`. Its rows stand
in `benchmarks/results`, in NAME.json; those of an attached device in NAME-DEVICE.json. A file is
written after each job, so a run that was interrupted, or that covered a part, goes on from there.

    python -m benchmarks list
    python -m benchmarks run offload --target cuda:h100
    python -m benchmarks table offload
"""

import functools
import importlib
import itertools
import json
import pkgutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from rich.progress import Progress

FOLDERS = ("plans", "accuracy", "compilers", "device", "order", "programs")
RESULTS = Path(__file__).parent / "results"

Row = dict[str, Any]
"""What a job came to: `{"step": "mlp", "target": "cpu", "share": 0.6, "compiled_peak": 4739}`."""


@dataclass(frozen=True)
class Job:
    """What makes one row, or several that belong together.

    Attributes:
        label: The program, such as "gpt2 length 512 scanned". In all studies a label means the same
            program; in a row it is the value of "step".
        arguments: What is asked of the program, such as `{"target": "cuda:h100", "share": 0.6}`.
    """

    label: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def key(self) -> Row:
        """What its rows begin with."""
        return {"step": self.label, **self.arguments}


@dataclass(frozen=True)
class Study:
    """One question, and how it is answered.

    Attributes:
        name: What it is called on the command line and in `benchmarks/results`.
        question: What it asks, in one sentence.
        jobs: Lists the jobs. Each of its parameters is an option of `run`, and holds the choices
            that are made by default: `jobs(step=("mlp",), target=("cuda:h100",))`.
        measure: Makes the figures of a job, from its label (`step`) and its arguments. Further
            parameters are settings of a run that no row is told by, such as a directory.
        tables: Shows rows as the docs do, in Markdown; all that it needs is in the rows.
    """

    name: str
    question: str
    jobs: Callable[..., Iterable[Job]]
    measure: Callable[..., Row | list[Row]]
    tables: Callable[[list[Row]], str]

    @property
    def file(self) -> Path:
        """Where its rows are kept."""
        return RESULTS / f"{self.name}.json"

    def others(self) -> list[Path]:
        """Files of its rows that are each of another device."""
        return sorted(RESULTS.glob(f"{self.name}-*.json"))

    def rows(self) -> list[Row]:
        """All rows that are kept."""
        return [row for path in (self.file, *self.others()) for row in load(path)]

    def run(self, jobs: Iterable[Job], path: Path, **settings: Any) -> list[Row]:
        """Makes the rows that a file lacks, showing progress.

        Args:
            jobs: The jobs to be done.
            path: The file.
            **settings: Further arguments of `measure`.

        Returns:
            All rows, those that the file had first.
        """
        rows = load(path)
        todo = [job for job in jobs if not any(job.key.items() <= row.items() for row in rows)]
        with Progress() as progress:
            task = progress.add_task("", total=len(todo))
            for job in todo:
                progress.update(task, description=" ".join(map(str, job.key.values())))
                figures = self.measure(**job.key, **settings)
                made_by = {"jax": jax.__version__, "commit": revision()}
                for one in figures if isinstance(figures, list) else [figures]:
                    rows.append({**job.key, **one, **made_by})
                save(rows, path)
                progress.advance(task)
        return rows


def studies() -> dict[str, Study]:
    """All studies by their names, folder by folder."""
    by_name: dict[str, Study] = {}
    for folder in FOLDERS:
        package = importlib.import_module(f"benchmarks.{folder}")
        for part in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            study = getattr(importlib.import_module(part.name), "STUDY", None)
            if study:
                assert study.name not in by_name, f"two studies are called {study.name}"
                by_name[study.name] = study
    return by_name


@functools.cache
def revision() -> str:
    """The revision of jdelta that makes a row; `+` marks changes that are not committed."""
    command = ["git", "describe", "--always", "--dirty=+"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip()


def load(path: Path) -> list[Row]:
    """The rows of a file; none if it is not there."""
    return json.loads(path.read_text()) if path.exists() else []


def save(rows: list[Row], path: Path) -> None:
    """Writes the rows, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writing = path.with_suffix(".writing")
    writing.write_text(json.dumps(rows, indent=1) + "\n")
    writing.replace(path)


def product(steps: Iterable[str], targets: Iterable[str], **others: Iterable[Any]) -> list[Job]:
    """One job for each target, each step and each choice of the other arguments."""
    return [
        Job(step, {"target": target, **dict(zip(others, chosen, strict=True))})
        for target, step, *chosen in itertools.product(targets, steps, *others.values())
    ]


def table(heads: Iterable[str], lines: Iterable[Iterable[str]], rows: Iterable[Row]) -> str:
    """A table in Markdown, and below it at which revisions its rows were made; "" without rows."""
    rows = list(rows)
    return f"{markdown(heads, lines)}\n\n{made_at(rows)}" if rows else ""


def page(parts: Iterable[str]) -> str:
    """Tables and lines one below the other, those that say something."""
    return "\n\n".join(filter(None, parts))


def markdown(heads: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    written = [list(heads), *map(list, lines)]
    head, *rest = ("| " + " | ".join(cells) + " |" for cells in written)
    return "\n".join([head, "|" + "---|" * len(written[0]), *rest])


def made_at(rows: Iterable[Row]) -> str:
    """One line: the revisions that made some rows, and how many rows each of them made."""
    revisions = Counter(row.get("commit", "unknown") for row in rows)
    if len(revisions) == 1:
        return f"Made at revision {next(iter(revisions))}."
    counts = (f"{commit} ({count})" for commit, count in revisions.items())
    return f"Made at several revisions (rows): {', '.join(counts)}."


def grouped(rows: Iterable[Row], *others: str) -> dict[tuple[str, ...], list[Row]]:
    """The rows of each step and target that agree in the other keys too."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for r in rows:
        groups.setdefault(tuple(r[key] for key in ("step", "target", *others)), []).append(r)
    return groups


def values(rows: Iterable[Row], key: str) -> list[Any]:
    """The values of a key, each once, in the order of the rows."""
    return list(dict.fromkeys(row[key] for row in rows))


def mib(size: float | None) -> str:
    """Bytes in MiB."""
    return "-" if size is None else f"{size / 2**20:.0f}"


def bound(plan: Row, field: str) -> str:
    """The floor or ceiling of a plan in MiB, with a mark if it was not compiled."""
    return ("~" if field in plan.get("estimates", ()) else "") + mib(plan[field])


def share(part: float, total: float) -> str:
    """A part of a whole, in percent."""
    return f"{part / total:.1%}"
