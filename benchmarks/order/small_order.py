"""Small steps, whose best order an integer program can find: does jdelta find the same?

Steps of tiny models, with the operators that XLA would fuse them to for an H100 (one by one they
are too many for the integer program), weights updated in place. The integer program (MODeL's form)
gets `--limit` seconds. Nothing is compiled or run.

    python -m benchmarks run small_order
"""

import dataclasses
import functools
import statistics
import time
from typing import Any

import optax

from benchmarks import study
from benchmarks.order.order import comparators
from benchmarks.models import find
from benchmarks.order.order import posed_by, step_of
from benchmarks.study import Row
from jdelta._src.backends.cuda import CUDA
from jdelta._src.estimate.buffers import Compiler
from jdelta._src.order import Problem, arrange, layout

MLP = dataclasses.replace(find("mlp"), batch=64, width=256)
MODELS = {
    "mlp, 1 layer": dataclasses.replace(MLP, layers=1),
    "unet, 1 level": dataclasses.replace(find("unet").small(), levels=1),
    "mlp, 2 layers": dataclasses.replace(MLP, layers=2),
}
OPTIMIZERS: dict[str, Any] = {"SGD": optax.sgd, "Adam": optax.adam}
REPEATS = 5
HEADS = [
    "model",
    "optimiser",
    "operators",
    "program order",
    "jdelta",
    "ILP",
    "proven least",
    "seconds of jdelta",
    "of the ILP",
    "times as fast",
]


def row(model: str, optimizer: str, limit: float) -> Row:
    """Orders one step in both ways."""
    posed = posed_by(step_of(MODELS[model], OPTIMIZERS[optimizer](1e-3)), Compiler(CUDA))
    seconds = [_seconds(dataclasses.replace(posed)) for _ in range(REPEATS)]
    found = arrange(posed)
    return {
        "operators": len(posed),
        "program_peak": posed.peak(posed.program),
        "peak": found.peak,
        "bound": found.bound,
        "seconds": seconds,
        "limit": limit,
        "ilp": dataclasses.asdict(comparators.integer_program(posed, limit)),
    }


def _seconds(posed: Problem) -> float:
    """What order and layout take."""
    start = time.perf_counter()
    layout(posed.bytes, *posed.lives(arrange(posed).order))
    return time.perf_counter() - start


def faster(r: Row) -> float:
    """How many times the seconds of jdelta the integer program took."""
    return r["ilp"]["seconds"] / statistics.median(r["seconds"])


def cells(r: Row) -> list[str]:
    """One line of the table; sizes in KiB."""
    ilp = r["ilp"]
    return [
        *(r["model"], r["optimizer"], str(r["operators"])),
        *(f"{size / 2**10:.1f}" if size else "none" for size in (r["program_peak"], r["peak"])),
        f"{ilp['peak'] / 2**10:.1f}" if ilp["peak"] else "none",
        "yes" if ilp["optimal"] else "no",
        f"{statistics.median(r['seconds']):.3f}",
        f"{ilp['seconds']:.0f}",
        f"{faster(r):.0f}",
    ]


def summary(rows: list[Row]) -> str:
    """In how many steps both come to the same, and how much faster jdelta is there."""
    proven = [r for r in rows if r["ilp"]["optimal"]]
    equal = sum(r["peak"] == r["ilp"]["peak"] for r in proven)
    times = f"{min(map(faster, proven)):.0f}" if proven else "-"
    return (
        f"proven least in {len(proven)} of {len(rows)}, jdelta's peak equal in {equal} of those, "
        f"at least {times} times as fast"
    )


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    return study.table(HEADS, map(cells, rows)) + "\n\n" + summary(rows)

