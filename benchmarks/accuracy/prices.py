"""What is a step priced at as it is traced, and by what its compiler made of it?

First the plain step, in seconds: *traced* is the roofline that plans are made with, of the program
before it is compiled; *compiled* the same rates on the instructions of the compiled one, fusions as
XLA makes them. For a TPU the second takes what the compiler leaves on the chip for free, so there
the cycles that it notes on its instructions stand beside them, at the clock that the chip's
published FLOP/s need of its matrix units. Then what plans for 80, 60 and 40 % of the plain peak add
to it: by their own *estimate*, by the program as it is traced under them, and by the instructions
of both compiled programs. Nothing is run on a device.

Last what single values are worth. Two plans differ in one value: *alone* keeps it and nothing else
that could be computed again, *without* keeps everything else. *priced* is what the planner's items
say that keeping it spares (its recompute, less what it costs to hold), *compiled* the same by the
instructions of both compiled programs (on TPUs in the cycles that the compiler expects).
Milliseconds of the step; below zero it is quicker not to keep the value.

    python -m benchmarks run prices --what steps --target cuda:h100
    python -m benchmarks run prices --what values --step "gpt2 length 512 scanned" --unit h
"""

import fnmatch
import functools
import statistics
from collections.abc import Sequence
from typing import Any

from scipy.stats import kendalltau

import jdelta
from benchmarks import cases, steps, study
from benchmarks.plans.budgets import refusal
from benchmarks.study import Job, Row, Study
from jdelta import Decision
from jdelta._src.passes.emit import Step, emit
from jdelta._src.regions.policy import Policy
from jdelta._src.regions.trace import Trace
from jdelta._src.residuals.items import Items, items_of
from jdelta._src.residuals.pins import NO_PINS
from jdelta._src.residuals.region_inputs import with_region_inputs

SMALLEST = 1 << 20
"""Bytes of a value below which its worth is not looked at."""

BASES = ("alone", "without")
VALUES = "step target base values worth off tau".split()


SHARES = (None, 0.8, 0.6, 0.4)
HEADS = "step target traced compiled above cycles above".split()
ADDED = "step target budget estimate traced compiled".split()


def row(step: str, what: str, **asked: Any) -> Row | list[Row]:
    """Prices one program, or values of a step: a row for each."""
    return (step_row if what == "steps" else values_rows)(step, **asked)


def step_row(step: str, target: str, share: float | None) -> Row:
    """Prices one program.

    Args:
        step: A key of `steps.STEPS`.
        target: Where to compile for.
        share: The budget of a plan, as a part of the plain peak; None for the plain step.
    """
    plain = cases.traced(steps.build(step), target)
    if share is None:
        return _seconds(plain)
    case = steps.build(step, remat=jdelta.remat)
    figures, plan = cases.plan(case, int(share * plain.measured.peak), target)
    if plan is None:
        return figures
    planned = cases.planned(case, plan)
    return {
        "peak": plan.compiled_peak,
        "estimate": plan.overhead_share,
        "traced": planned.added_as_traced(plain),
        "compiled": planned.added(plain) if plain.scheduled else None,
    }


def _seconds(plain: cases.Program) -> Row:
    """The plain step by all readings."""
    traced, compiled, target = plain.price.compute, plain.scheduled, plain.target
    if not compiled:
        return {"traced": traced}
    seconds = {"traced": traced, "compiled": compiled["scheduled"]}
    if target.name in cases.PER_CYCLE:
        seconds["cycles"] = compiled["cycles"] / cases.clock(target)
    return seconds


def cells(r: Row) -> list[str]:
    """One line of the first table: milliseconds, and what *traced* is above the others."""
    head = [r["step"], r["target"], f"{1e3 * r['traced']:.1f}"]
    if "compiled" not in r:
        return [*head, "refused", "", "", ""]
    return [
        *head,
        *(cell for k in ("compiled", "cycles") for cell in _beside(r["traced"], r.get(k))),
    ]


def _beside(traced: float, seconds: float | None) -> list[str]:
    """Another reading, and what the traced program is priced at above it."""
    return [f"{1e3 * seconds:.1f}", f"{traced / seconds - 1:+.0%}"] if seconds else ["", ""]


def added(r: Row) -> list[str]:
    """One line of the second table: what a plan adds, in percent of the plain step."""
    head = [r["step"], r["target"], f"{r['share']:.0%}"]
    if "error" in r:
        return [*head, refusal(r), "", ""]
    return [*head, *("" if r[k] is None else f"{r[k]:+.1%}" for k in ADDED[3:])]


@functools.cache
def staged(step: str, target: str) -> tuple[Step, Trace, Items]:
    """A step and its items."""
    traced_step, trace = cases.staged(steps.build(step, remat=jdelta.remat), target)
    residuals = with_region_inputs(trace, traced_step.target)
    return traced_step, trace, items_of(residuals, traced_step.target, 0.0, NO_PINS, None)


def values(step: str, target: str, unit: str) -> list[str]:
    """Names of what the backward pass of some regions reads and may compute again."""
    residuals = staged(step, target)[2].residuals
    fitting = (r for r in residuals if fnmatch.fnmatchcase(r.region, unit) and not r.region_input)
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
    traced_step, trace, items = staged(step, target)
    names = items.policy_decisions(decided(items, base, value))
    policy = Policy.of(names, trace.loops, traced_step.target.backend)
    emission = emit(traced_step, policy)
    graph = emission.timeline.graph
    program = cases.Program(graph, emission.lower, traced_step.target, emission.options)
    compiled = program.scheduled
    if target in cases.PER_CYCLE:
        return compiled["cycles"] / cases.clock(traced_step.target)
    return compiled["scheduled"]


def values_rows(step: str, target: str, base: str, unit: str) -> list[Row]:
    """A row for each value of some regions, by a pattern of their names."""
    return [
        {"value": value, **value_row(step, target, base, value)}
        for value in values(step, target, unit)
    ]


def value_row(step: str, target: str, base: str, value: str) -> Row:
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
    for (step, target), step_rows in study.grouped(rows).items():
        for base in BASES:
            group = [r for r in step_rows if r["base"] == base]
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
    """The rows as the docs show them: plain steps, what plans add, and how values are priced."""
    of_steps = [r for r in rows if r["what"] == "steps"]
    of_values = [r for r in rows if r["what"] == "values"]
    plain = [r for r in of_steps if r["share"] is None]
    plans = [r for r in of_steps if r["share"] is not None]
    return study.page(
        [
            study.table(HEADS, map(cells, plain), plain),
            study.table(ADDED, map(added, plans), plans),
            study.table(VALUES, summary(of_values), of_values),
        ]
    )


def jobs(
    what: Sequence[str] = ("steps", "values"),
    step: Sequence[str] = steps.PLANNED,
    target: Sequence[str] = steps.TWO_TARGETS,
    share: Sequence[float | None] = SHARES,
    base: Sequence[str] = BASES,
    unit: Sequence[str] = ("*",),
) -> list[Job]:
    """Steps at shares of their peaks, and values of regions whose names match a pattern."""
    job_list: list[Job] = []
    if "steps" in what:
        job_list += study.product(step, target, what=["steps"], share=share)
    if "values" in what:
        job_list += study.product(step, target, what=["values"], base=base, unit=unit)
    return job_list


STUDY = Study(
    "prices",
    "What are steps, plans and values priced at, as traced and as compiled?",
    jobs,
    row,
    tables,
)
