"""What the pictures of a plan show, as plain records: no drawing here."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jdelta._src.backends.target import Target
from jdelta._src.decision import Decision
from jdelta._src.estimate.buffers import Compiler
from jdelta._src.estimate.memory import Timeline, body_timeline, timeline
from jdelta._src.estimate.seconds import each_seconds, program_seconds
from jdelta._src.hlo.overlap import Span, read_lanes
from jdelta._src.hlo.text import parse
from jdelta._src.passes.emit import Step, emit, fixed_bytes
from jdelta._src.plan.call import Call
from jdelta._src.plan.planned_step import compiled, step_of
from jdelta._src.plan.record import PlanRecord
from jdelta._src.program.graph import labels

_NAMED = 6
"""Buffers that are named at each moment."""

_FINEST = 1500
"""Moments that a picture shows at most."""


@dataclass(frozen=True)
class Moment:
    """A stretch of a step during which memory does not change.

    Attributes:
        start: Predicted seconds since the step's start.
        seconds: Predicted length.
        bytes: Live bytes per device, arguments and results included.
        what: The operation that runs.
        alive: The largest buffers alive, each with its bytes.
    """

    start: float
    seconds: float
    bytes: int
    what: str
    alive: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Grid:
    """Decisions, layer by layer.

    Attributes:
        columns: The regions, or the number of layers that share one.
        rows: Names of values within a region.
        cells: For each row and column the decision; None where the region has no such value.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    cells: tuple[tuple[Decision | None, ...], ...]


@dataclass(frozen=True)
class Picture:
    """Everything that pictures of a plan show.

    Attributes:
        plain: The simulated plain step, scaled so that its peak is what the plan
            says of it.
        planned: The planned step likewise: its peak is the compiled one.
        simulated: The peaks of both before they were scaled, bytes: of the plain step and with the
            plan.
        grid: Decisions.
        lanes: When compute and transfers run in the compiled schedule; empty without transfers.
    """

    plain: tuple[Moment, ...]
    planned: tuple[Moment, ...]
    simulated: tuple[int, int]
    grid: Grid
    lanes: tuple[Span, ...]


def picture(plan: PlanRecord, call: Call) -> Picture:
    """Simulate a plan's step and the plain one, and read the compiled schedule.

    Args:
        plan: The plan.
        call: A call of the step that it was made for.

    Raises:
        PlanMismatchError: The plan was made for another program.
    """
    donate = plan.question.donate_argnums
    step, trace = step_of(plan, call, donate)
    compiler = Compiler(step.target.backend)
    plain, planned = timeline(trace.graph, compiler), emit(step, plan.answer.policy).timeline
    lanes: tuple[Span, ...] = ()
    if plan.figures.overlap.transfers:
        program = compiled(plan, call, donate)
        lanes = read_lanes(parse(program.as_text() or ""), step.target.rates)
    before, after = moments(plain, step, trace.plan_name), moments(planned, step)
    return Picture(
        _reaching(plan.search.ceiling, before),
        _reaching(plan.figures.compiled_peak, after),
        (_highest(before), _highest(after)),
        grid(plan),
        lanes,
    )


def _reaching(peak: int, simulated: Sequence[Moment]) -> tuple[Moment, ...]:
    """The simulated step, scaled to a peak in bytes: what fits is not drawn over its budget.

    Single buffers keep their sizes, which are known.
    """
    scale = peak / (_highest(simulated) or 1)
    return tuple(replace(m, bytes=min(peak, round(m.bytes * scale))) for m in simulated)


def _highest(line: Sequence[Moment]) -> int:
    return max((moment.bytes for moment in line), default=0)


def moments(line: Timeline, step: Step, rename: Callable[[Any], str] = str) -> tuple[Moment, ...]:
    """The simulated step, its loops' bodies once each, stretched to all their iterations.

    Args:
        line: The simulation.
        step: The step it is of.
        rename: From names in its program to what to call values.
    """
    moments: list[Moment] = []
    now = 0.0
    base = fixed_bytes(line.graph, step)
    for seconds, live, what, alive in _stretches(line, step.target, base, rename):
        if seconds:
            moments.append(Moment(now, seconds, live, what, alive))
            now += seconds
    return tuple(_coarse(moments))


_Alive = tuple[tuple[str, int], ...]


def _stretches(
    line: Timeline, target: Target, base: int, rename: Callable[[Any], str]
) -> Iterator[tuple[float, int, str, _Alive]]:
    """Length, bytes, operation and largest buffers of each part of a program's run."""
    graph, compiler = line.graph, Compiler(target.backend)
    each = each_seconds(graph, target.rates, target.backend)
    for index, alive in enumerate(_alive(line, rename)):
        op, seconds = graph.operations[index], each[index]
        live = base + line.live[index]
        if op.body is None or not op.body.operations:
            yield seconds, live, "/".join((*op.scope, op.primitive)), alive
            continue
        inner = body_timeline(op, op.body, compiler)
        times = seconds / (program_seconds(op.body, target.rates, target.backend) or 1.0)
        under = live - inner.peak
        for length, inside, what, more in _stretches(inner, target, under, rename):
            largest = sorted((*alive, *more), key=lambda a: -a[1])[:_NAMED]
            yield times * length, inside, what, tuple(largest)


def _alive(line: Timeline, rename: Callable[[Any], str]) -> Iterator[_Alive]:
    """For each operation the largest buffers alive while it runs."""
    values, names = line.graph.values, labels(line.graph, rename)
    ends: dict[int, list[int]] = {}
    for v, end in line.last.items():
        ends.setdefault(end, []).append(v)
    living: dict[int, int] = {}
    for index, op in enumerate(line.graph.operations):
        living.update((v, values[v].bytes) for v in op.outputs if v in line.last)
        largest = heapq.nlargest(_NAMED, living, key=living.__getitem__)
        yield tuple((names[v], living[v]) for v in largest if living[v])
        for v in ends.get(index, ()):
            living.pop(v, None)


def _coarse(fine_moments: Sequence[Moment]) -> Iterator[Moment]:
    """The same with neighbours merged, the largest of them shown, until few enough are left."""
    size = max(1, -(-len(fine_moments) // _FINEST))
    for start in range(0, len(fine_moments), size):
        part = fine_moments[start : start + size]
        most = max(part, key=lambda m: m.bytes)
        yield replace(most, start=part[0].start, seconds=sum(m.seconds for m in part))


def grid(plan: PlanRecord) -> Grid:
    """Decisions by region and by value; in regions of a loop one column stands for all layers."""
    decisions = plan.decisions
    shown = [
        r for r in plan.answer.residuals if r.needed or decisions[r.name] is not Decision.RECOMPUTE
    ]
    columns = list(dict.fromkeys(r.region for r in shown))
    cells: dict[str, dict[str, Decision]] = {}
    for r in shown:
        inner = r.name.removeprefix(r.region).lstrip("/")
        cells.setdefault(inner, {})[r.region] = decisions[r.name]
    return Grid(
        tuple(columns),
        tuple(cells),
        tuple(tuple(row.get(column) for column in columns) for row in cells.values()),
    )
