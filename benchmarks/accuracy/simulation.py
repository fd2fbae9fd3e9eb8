"""How far off is the simulated peak, before anything of the step was compiled?

The plain step, and plans that keep 0, 20, 40 and 60 % of the bytes of all residuals (nothing
offloaded), simulated and compiled.

    python -m benchmarks run simulation --target cuda:h100
"""

import dataclasses
import functools
import statistics
from collections.abc import Sequence

import jdelta
from benchmarks import cases, steps, study
from benchmarks.study import Job, Row, Study
from jdelta._src.hlo.measure import measure
from jdelta._src.passes.emit import Step, emit
from jdelta._src.regions.policy import Policy
from jdelta._src.regions.trace import Trace
from jdelta._src.residuals.items import items_of
from jdelta._src.residuals.pins import NO_PINS
from jdelta._src.residuals.region_inputs import with_boundaries
from jdelta._src.solver import Knapsack

KEPT = (None, 0.0, 0.2, 0.4, 0.6)


def row(step: str, target: str, kept: float | None) -> Row:
    """Simulate and compile one program; ``kept`` is None for the plain step."""
    staged, found = traced(step, target)
    emission = emit(staged, None if kept is None else policy(staged, found, kept))
    measured = measure(emission.lower(), staged.target, emission.options)[1]
    return {"simulated": emission.simulated, "compiled": measured.peak}


@functools.lru_cache(maxsize=1)
def traced(step: str, target: str) -> tuple[Step, Trace]:
    """A step for a target."""
    return cases.staged(steps.build(step, remat=jdelta.remat), target)


def policy(step: Step, found: Trace, kept: float) -> Policy:
    """What DELTA's heuristic keeps in a part of the residuals' bytes, if keeping costs nothing."""
    target = step.target
    items = items_of(with_boundaries(found, target), target, 0.0, NO_PINS)
    whole = sum(item.bytes for item in items.problem.items if item.needed)
    free = tuple(dataclasses.replace(item, holding=0.0) for item in items.problem.items)
    problem = dataclasses.replace(items.problem, items=free, capacity=kept * whole)
    decisions = items.decisions(Knapsack().solve(problem).decisions)
    return Policy.of(items.policy_decisions(decisions), found.loops, target.platform)


def error(r: Row) -> float:
    """What the simulation is too high by, as a part of the compiled peak."""
    return r["simulated"] / r["compiled"] - 1


def percent(r: Row) -> str:
    """The error, in percent."""
    return f"{error(r):+.1%}"


def tables(rows: list[Row]) -> str:
    """The errors as the docs show them: one line a step and target."""
    lines: list[list[str]] = []
    for (step, target), found in study.grouped(rows).items():
        group = {r["kept"]: r for r in found}
        figures = (percent(group[k]) if k in group else "not run" for k in KEPT)
        lines.append([step, target, *figures])
    planned = [abs(error(r)) for r in rows if r["kept"] is not None]
    heads = ["step", "target", "plain", *(f"{k:.0%} kept" for k in KEPT[1:])]
    shown = study.table(heads, lines, rows)
    if not planned:
        return shown
    return f"{shown}\n\nMedian of the plans' errors: {statistics.median(planned):.1%}"


def jobs(
    step: Sequence[str] = steps.PLANNED,
    target: Sequence[str] = steps.TWO_TARGETS,
    kept: Sequence[float | None] = KEPT,
) -> list[Job]:
    return study.product(step, target, kept=kept)


STUDY = Study(
    "simulation",
    "How far off is the simulated peak, before anything of the step was compiled?",
    jobs,
    row,
    tables,
)
