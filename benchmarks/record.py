"""What all scripts here share: rows that say what made them, and files that runs resume from.

A job is a dictionary that says what to run, its row the same and the figures. A file of rows is
written after each, so a run that was interrupted, or that covered a part, goes on from there.
"""

import argparse
import functools
import itertools
import json
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

Row = dict[str, Any]


@functools.cache
def revision() -> str:
    """The revision of jdelta that makes a row; `+` marks changes that are not committed."""
    command = ["git", "describe", "--always", "--dirty=+"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip()


def load(path: Path | None) -> list[Row]:
    """The rows of a file; none if it is not there."""
    return json.loads(path.read_text()) if path and path.exists() else []


def save(rows: list[Row], path: Path) -> None:
    """Writes the rows, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writing = path.with_suffix(".writing")
    writing.write_text(json.dumps(rows, indent=1) + "\n")
    writing.replace(path)


def run(
    jobs: Iterable[Mapping[str, Any]], measure: Callable[..., Row], path: Path | None
) -> list[Row]:
    """Makes the rows that a file lacks, showing progress.

    Args:
        jobs: The arguments of `measure` for each row.
        measure: Makes the figures of a row.
        path: The file; without one nothing is kept.

    Returns:
        All rows, those that the file had first.
    """
    rows = load(path)
    todo = [job for job in jobs if not any(job.items() <= row.items() for row in rows)]
    with Progress() as progress:
        task = progress.add_task("", total=len(todo))
        for job in todo:
            progress.update(task, description=" ".join(map(str, job.values())))
            figures = measure(**job)
            rows.append({**job, **figures, "jax": jax.__version__, "commit": revision()})
            if path:
                save(rows, path)
            progress.advance(task)
    return rows


def parser(
    doc: str | None, steps: Iterable[str], targets: Iterable[str] | None = None
) -> argparse.ArgumentParser:
    """The options that all scripts have; `--target` where there are `targets`."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chosen: dict[str, Any] = {"action": "append", "metavar": "NAME"}
    made.add_argument("--step", choices=steps, help=f"default: {', '.join(steps)}", **chosen)
    if targets:
        made.add_argument("--target", help=f"default: {', '.join(targets)}", **chosen)
    made.add_argument("--json", type=Path, help="file to resume from and to write all rows to")
    return made


def options(
    made: argparse.ArgumentParser, markdown: Callable[[list[Row]], str]
) -> argparse.Namespace:
    """The options given; where `--markdown` is among them, the file's rows are all there is."""
    made.add_argument("--markdown", action="store_true", help="print what the file has; run none")
    given = made.parse_args()
    if given.markdown:
        print(markdown(load(given.json)))
        made.exit()
    return given


def jobs(
    targets: Iterable[str], steps: Iterable[str], **others: Iterable[Any]
) -> list[dict[str, Any]]:
    """One job for each target, each step and each choice of the other arguments."""
    return [
        {"step": step, "target": target, **dict(zip(others, chosen, strict=True))}
        for target, step, *chosen in itertools.product(targets, steps, *others.values())
    ]


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    lines = [list(heads), *map(list, rows)]
    head, *rest = ("| " + " | ".join(cells) + " |" for cells in lines)
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rest])


def grouped(rows: Iterable[Row], *others: str) -> dict[tuple[str, ...], list[Row]]:
    """The rows of each step and target that agree in the other keys too."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for r in rows:
        groups.setdefault(tuple(r[key] for key in ("step", "target", *others)), []).append(r)
    return groups


def show(title: str, heads: Iterable[str], cells: Iterable[Iterable[str]]) -> None:
    """Prints a table, its first two columns aligned to the left."""
    table = Table(title=title)
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i < 2 else "right")
    for row in cells:
        table.add_row(*row)
    Console(width=150).print(table)


def mib(size: float | None) -> str:
    """Bytes in MiB."""
    return "-" if size is None else f"{size / 2**20:.0f}"


def bound(plan: Row, field: str) -> str:
    """The floor or ceiling of a plan in MiB, with a mark if it was not compiled."""
    return ("~" if field in plan.get("estimates", ()) else "") + mib(plan[field])


def share(part: float, whole: float) -> str:
    """A part of a whole, in percent."""
    return f"{part / whole:.1%}"
