"""What is a single value worth? Its price in the planner's items, and in compiled instructions.

Two plans differ in one value: *alone* keeps it and nothing else that could be computed again,
*without* keeps everything else. *priced* is what the planner's items say that keeping it spares
(its recompute, less what it costs to hold), *compiled* the same by the instructions of both
compiled programs (on TPUs in the cycles that the compiler expects). Milliseconds of the step;
below zero it is quicker not to keep the value. Nothing is run on a device.

    python -m benchmarks run pins --step "gpt2 length 512 scanned" --unit h
"""

import fnmatch
import functools
import statistics
from collections.abc import Sequence

from scipy.stats import kendalltau

import jdelta
from benchmarks import cases, steps, study
from benchmarks.study import Job, Row, Study
from jdelta import Decision
from jdelta._src.passes.emit import Step, emit
from jdelta._src.regions.policy import Policy
from jdelta._src.regions.trace import Trace
from jdelta._src.residuals.items import Items, items_of
from jdelta._src.residuals.pins import NO_PINS
from jdelta._src.residuals.region_inputs import with_boundaries

SMALLEST = 1 << 20
"""Bytes of a value below which its worth is not looked at."""

BASES = ("alone", "without")
HEADS = "step target base values worth off tau".split()


@functools.cache
def staged(step: str, target: str) -> tuple[Step, Trace, Items]:
    """A step and its items."""
    made, found = cases.staged(steps.build(step, remat=jdelta.remat), target)
    residuals = with_boundaries(found, made.target)
    return made, found, items_of(residuals, made.target, 0.0, NO_PINS, None)


def values(step: str, target: str, unit: str) -> list[str]:
    """Names of what the backward pass of some units reads and may compute again."""
    residuals = staged(step, target)[2].residuals
    fitting = (r for r in residuals if fnmatch.fnmatchcase(r.region, unit) and not r.boundary)
    return [r.name for r in fitting if r.needed and r.bytes >= SMALLEST]


def decided(items: Items, base: str, value: str | None) -> dict[str, Decision]:
    """Decisions for all residuals: those of the base, but for one value."""
    saved = {item.name for item in items.problem.items if item.needed and base == "without"}
    saved ^= {value}
    return items.decisions(
        [Decision.SAVE if i.name in saved else Decision.RECOMPUTE for i in items.problem.items]
    )


@functools.cache
def seconds(step: str, target: str, base: str, value: str | None) -> float:
    """What the compiled instructions of one plan take."""
    made, found, items = staged(step, target)
    names = items.policy_decisions(decided(items, base, value))
    policy = Policy.of(names, found.loops, made.target.platform)
    emission = emit(made, policy)
    graph = emission.timeline.graph
    program = cases.Program(graph, emission.lower, made.target, emission.options)
    compiled = program.scheduled
    if target in cases.PER_CYCLE:
        return compiled["cycles"] / cases.clock(made.target)
    return compiled["scheduled"]


def rows_of(step: str, target: str, base: str, unit: str) -> list[Row]:
    """A row for each value of some units, by a pattern of their names."""
    return [
        {"value": value, **row(step, target, base, value)} for value in values(step, target, unit)
    ]


def row(step: str, target: str, base: str, value: str) -> Row:
    """What one value is worth beside those that the base keeps."""
    items = staged(step, target)[2]
    bytes_ = {r.name: r.bytes for r in items.residuals}[value]
    sign = 1 if base == "alone" else -1
    priced = sign * (
        items.overhead(decided(items, base, None)) - items.overhead(decided(items, base, value))
    )
    compiled = sign * (seconds(step, target, base, None) - seconds(step, target, base, value))
    return {"bytes": bytes_, "priced": priced, "compiled": compiled}


def summary(rows: list[Row]) -> list[list[str]]:
    """One line a step, target and base: how near prices come, and to the order of the values."""
    lines: list[list[str]] = []
    for (step, target), found in study.grouped(rows).items():
        for base in BASES:
            group = [r for r in found if r["base"] == base]
            if len(group) > 1:
                lines.append([step, target, base, str(len(group)), *_agreement(group)])
    return lines


def _agreement(group: list[Row]) -> tuple[str, str, str]:
    """Milliseconds that values are worth, those that their prices are off, and Kendall's tau."""
    priced, compiled = ([1e3 * r[k] for r in group] for k in ("priced", "compiled"))
    off = [abs(a - b) for a, b in zip(priced, compiled, strict=True)]
    tau = float(kendalltau(priced, compiled).statistic)
    worth = statistics.mean(map(abs, compiled))
    return f"{worth:.2f}", f"{statistics.mean(off):.2f}", f"{tau:.2f}"


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    return study.table(HEADS, summary(rows), rows)


def jobs(
    step: Sequence[str] = steps.PLANNED,
    target: Sequence[str] = steps.TWO_TARGETS,
    base: Sequence[str] = BASES,
    unit: Sequence[str] = ("*",),
) -> list[Job]:
    return study.product(step, target, base=base, unit=unit)


STUDY = Study(
    "pins",
    "What is a single value worth, in the planner's items and in compiled instructions?",
    jobs,
    rows_of,
    tables,
)
