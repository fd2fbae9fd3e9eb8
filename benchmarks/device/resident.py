"""Resident memory of the GPT-2 example that keeps everything, and of one that spills.

Each is a process of its own under `/usr/bin/time -v`. *arguments* is one that loads the framework,
makes state and batch, and ends: what the other two take beyond that is for the step (its compiler
too). Both train on the same batches, so that their losses are equal.

    python -m benchmarks run resident --with directory=/nvme
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import study
from benchmarks.study import Job, Row, Study, mib

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt2.py"
STEPS = {"nano": ("--batch", "128", "--steps", "6")}
BUDGET = "40%"
WAYS = ("arguments", "plain", "planned")
TIME = "/usr/bin/time"
HEADS = "step process resident beyond below loss files jax".split()
_PEAK = re.compile(r"Maximum resident set size \(kbytes\): (\d+)")


def row(step: str, way: str, directory: str = ".") -> Row:
    """Runs one process."""
    command = [sys.executable, str(EXAMPLE), "--model", step, *STEPS[step], "--only", way]
    budget = ["--budget", BUDGET] if way == "planned" else []
    spill = ["--spill", directory] if way == "planned" else []
    done = subprocess.run([TIME, "-v", *command, *budget, *spill], capture_output=True, text=True)
    peak = _PEAK.search(done.stderr)
    if done.returncode or not peak:
        raise SystemExit(f"{way}: expected GNU time's report of a run; got\n{done.stderr[-3000:]}")
    loss = re.search(r"loss after \d+ steps: (\S+)", done.stdout)
    files = re.search(r"in files +(\S+ \S+) in", done.stdout)
    return {
        "resident": int(peak[1]) * 1024,
        "loss": loss and float(loss[1]),
        "files": files and files[1],
        "options": [*STEPS[step], *budget],
    }


def cells(r: Row, rows: list[Row]) -> list[str]:
    """One line of the table; sizes in MiB."""
    peaks = {other["way"]: other["resident"] for other in rows if other["step"] == r["step"]}
    beyond = {way: peak - peaks["arguments"] for way, peak in peaks.items()}
    has_both = r["way"] == "planned" and "plain" in beyond
    below = study.share(beyond["plain"] - beyond["planned"], beyond["plain"]) if has_both else ""
    loss = "" if r["loss"] is None else f"{r['loss']:.6f}"
    sizes = [mib(r["resident"]), mib(beyond[r["way"]]), below]
    return [r["step"], r["way"], *sizes, loss, r["files"] or "", r["jax"]]


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    return study.table(HEADS, (cells(r, rows) for r in rows), rows)


def jobs(
    step: Sequence[str] = tuple(STEPS),
    way: Sequence[str] = WAYS,
) -> list[Job]:
    return [Job(s, {"way": w}) for s in step for w in way]


STUDY = Study(
    "resident",
    "How much resident memory does a process take that spills, beside one that keeps everything?",
    jobs,
    row,
    tables,
)
