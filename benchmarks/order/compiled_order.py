"""XLA's own order of operators beside the best: how much less could any order make it allocate?

The steps of the study `order` (unrolled, Adam without clipping, the state donated), compiled
ahead of time. Of the compiled program: what XLA allocates beside the arguments, what is alive in
its order, in the best order of the same instructions, and in any. Nothing is run. Programs that are
compiled can be kept, to be read again without the minutes that a compiler takes:

    python -m benchmarks run compiled_order --with directory=kept
"""

import gzip
import json
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import study
from benchmarks.order import order
from benchmarks.study import Job, Row, Study, mib, share
from jdelta._src.api.schedule import of_text
from jdelta._src.backends.target import resolve
from jdelta._src.hlo.measure import measure

TARGETS = ("cuda:h100", "tpu:v5e:2x2")
HEADS = [
    "model",
    "batch",
    "target",
    "operators",
    "XLA allocates",
    "alive in XLA's order",
    "allocated / alive",
    "in the best",
    "in any",
    "gain",
    "ceiling",
    "of the step's peak",
]


def compiled(step: str, target: str) -> dict[str, Any]:
    """The text of a compiled step, and what it takes; no text if the compiler refuses it."""
    fun, args = order.adam_step(**order.STEPS[step])
    where = resolve(target)
    traced = jax.jit(fun, donate_argnums=0).trace(*where.abstract(args))
    lowered = traced.lower(lowering_platforms=(where.platform,))
    program, measured = measure(lowered, where, executable=True)
    return {
        "text": program and program.as_text(),
        "step_peak": measured.peak,
        "arguments": measured.arguments,
        "compile_seconds": measured.seconds,
    }


def kept(directory: Path | None, step: str, target: str) -> dict[str, Any]:
    """The compiled step of that name in a directory; compiled, and put there, if it has none."""
    if directory is None:
        return compiled(step, target)
    directory.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"\W+", "-", f"{step} {target} {jax.__version__}")
    path = directory / f"{name}.json.gz"
    if not path.exists():
        path.write_bytes(gzip.compress(json.dumps(compiled(step, target)).encode()))
    return json.loads(gzip.decompress(path.read_bytes()))


def row(step: str, target: str, directory: str | None = None) -> Row:
    """Reads what one compiled step holds in memory, and orders its instructions anew."""
    figures = kept(Path(directory) if directory else None, step, target)
    figures |= order.STEPS[step]
    text = figures.pop("text")
    if not text:
        return {**figures, "refused": True}
    start = time.perf_counter()
    schedule = of_text(text, figures["arguments"])
    return {
        **figures,
        "operators": len(schedule.order) - 1,  # without the one that stands for arguments
        "allocated": figures["step_peak"] - figures["arguments"],
        "xla_peak": schedule.program_peak,
        "peak": schedule.peak,
        "bound": schedule.bound,
        "arena": schedule.arena,
        "order_seconds": time.perf_counter() - start,
    }


def cells(r: Row) -> list[str]:
    """One line of the table; sizes in MiB."""
    names = [r["model"], str(r["batch"]), r["target"]]
    if "allocated" not in r:
        return [*names, "refused", mib(r["step_peak"]), *["-"] * (len(HEADS) - 5)]
    could = r["xla_peak"] - r["bound"]
    return [
        *names,
        str(r["operators"]),
        *(mib(r[name]) for name in ("allocated", "xla_peak")),
        f"{r['allocated'] / r['xla_peak']:.2f}",
        *(mib(r[name]) for name in ("peak", "bound")),
        share(r["xla_peak"] - r["peak"], r["xla_peak"]),
        share(could, r["xla_peak"]),
        share(could, r["step_peak"]),
    ]


def medians(rows: list[Row]) -> str:
    """How much there is to gain in the median, by target."""
    lines: list[str] = []
    for target in dict.fromkeys(r["target"] for r in rows if "allocated" in r):
        read = [r for r in rows if r["target"] == target and "allocated" in r]
        best, least = (
            statistics.median(1 - r[name] / r["xla_peak"] for r in read)
            for name in ("peak", "bound")
        )
        lines.append(
            f"{target}: the best order found keeps {best:.1%} less alive than XLA's in the median, "
            f"none could keep more than {least:.1%} less"
        )
    return "; ".join(lines)


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    return study.page([study.table(HEADS, map(cells, rows), rows), medians(rows)])


def jobs(
    step: Sequence[str] = tuple(order.STEPS),
    target: Sequence[str] = TARGETS,
) -> list[Job]:
    return study.product(step, target)


STUDY = Study(
    "compiled_order",
    "How much less could any order of a compiled step's operators make it allocate?",
    jobs,
    row,
    tables,
)
