"""What would lower the peak of a step: what takes it, and what may be donated and is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import jax

from jdelta._src import _jax
from jdelta._src.decision import Decision
from jdelta._src.estimate.memory import Timeline
from jdelta._src.passes.emit import Step
from jdelta._src.program.graph import Graph, Value, labels
from jdelta._src.residuals.residual import Residual
from jdelta._src.search.candidate import CompiledCandidate
from jdelta._src.sizes import format_array, format_bytes, format_some

WORTH_DONATING = 0.01
"""Part of the peak that donation has to spare for it to be advised."""

MUCH_DONATED = 0.1
"""Part of the peak from which on a hint is about donation, whatever else takes the peak."""

MUCH = 0.3
"""Part of the peak from which on a single value, or an argument, is named as what takes it."""

IN_PARTS = "a smaller batch, or jax.lax.map with batch_size="
"""How a value is made in parts."""


def arguments(graph: Graph, step: Step) -> dict[str, list[Value]]:
    """What the program is given, by what the user calls each argument: ``{"params": […]}``."""
    inputs = iter(graph.inputs)
    counts = [len(jax.tree.leaves(arg)) for arg in step.args]
    names = step.names or [f"argument {i}" for i in range(len(counts))]
    return {
        name: [graph.values[v] for v in islice(inputs, count)]
        for name, count in zip(names, counts, strict=True)
    }


def donatable(graph: Graph, step: Step) -> dict[str, int]:
    """Arguments that are not donated, and of each the bytes whose place results could take.

    Args:
        graph: The program.
        step: What it is of.
    """
    inputs = set(graph.inputs)
    results = Counter(
        _kind(graph.values[v]) for v in graph.outputs if v is not None and v not in inputs
    )
    named = list(arguments(graph, step).items())
    for place in step.donate:
        results -= Counter(map(_kind, named[place][1]))
    spared: dict[str, int] = {}
    for place, (name, values) in enumerate(named):
        if place in step.donate:
            continue
        for value in values:
            if results[_kind(value)] and value.bytes:
                results[_kind(value)] -= 1
                spared[name] = spared.get(name, 0) + value.bytes
    return spared


def donation(graph: Graph, step: Step, peak: int, least: float = WORTH_DONATING) -> str:
    """What to donate: ``params and state (donate_argnums; up to 1.00 GiB less)``.

    Args:
        graph: The program.
        step: What it is of.
        peak: Its peak, bytes per device.
        least: Part of the peak that has to be spared.

    Returns:
        Nothing where that is donated already, or would spare next to nothing.
    """
    spared = donatable(graph, step)
    spared = {name: size for name, size in spared.items() if size >= WORTH_DONATING * peak}
    total = sum(spared.values())
    if total < max(least * peak, 1):
        return ""
    names = format_some(sorted(spared, key=lambda name: -spared[name]), 3, " and ")
    return f"{names} (donate_argnums; up to {format_bytes(total)} less)"


def hint(best: CompiledCandidate, step: Step, residuals: Sequence[Residual]) -> str:
    """A sentence on what would lower the peak of a plan that costs something; else nothing.

    Args:
        best: The plan.
        step: The step.
        residuals: What the plan decides about.
    """
    takes = best.overhead > 0 or best.measurement.host or best.emission.spilled.bytes
    if best.decisions is None or not takes or not best.peak:
        return ""
    graph = best.emission.timeline.graph
    part, text = max(_takers(best, step, residuals), default=(0.0, ""))
    if part < MUCH or donation(graph, step, best.peak, MUCH_DONATED):
        text = f"Donate {advice}." if (advice := donation(graph, step, best.peak)) else ""
    return text


def _takers(
    best: CompiledCandidate, step: Step, residuals: Sequence[Residual]
) -> Iterator[tuple[float, str]]:
    """What takes the peak but for what the plan keeps: its part, and what to do about it."""
    timeline = best.emission.timeline
    for name, values in arguments(timeline.graph, step).items():
        part = sum(value.bytes for value in values) / best.peak
        takes = f"The argument {name} takes {100 * part:.0f} % of the peak, which no plan lowers"
        yield part, f"{takes}: shard it over more devices, or keep it in fewer bytes (bfloat16)."
    names, kept = labels(timeline.graph), _kept(best.decisions or {}, residuals)
    stacked = {v for op in timeline.graph.operations if op.primitive == "scan" for v in op.outputs}
    for v in timeline.alive(timeline.peak_index):
        if v not in stacked and names.get(v) not in kept:  # what loops stack is kept, mostly
            part = timeline.graph.values[v].bytes / best.peak
            takes = f"{described(timeline, v)} takes {100 * part:.0f} % of the peak"
            yield part, f"{takes}: make it in parts ({IN_PARTS})."
            return  # the others are smaller


def _kept(decisions: Mapping[str, Decision], residuals: Sequence[Residual]) -> frozenset[str]:
    """What the values that a plan keeps may be called in its program."""
    kept = [r for r in residuals if decisions.get(r.name) is Decision.SAVE]
    inside = (r.name.removeprefix(f"{r.region}/") for r in kept)
    return frozenset((*inside, *(r.name for r in kept), *(r.user_name for r in kept)))


def described(timeline: Timeline, value: int) -> str:
    """A value for messages: ``logits float32[8,512] 16.0 KiB (model.py:31)``."""
    graph = timeline.graph
    what, index = graph.values[value], graph.producers().get(value)
    line = "" if index is None else _jax.line_of(graph.operations[index].equation)
    place = f" ({line})" if line else ""
    name = labels(graph).get(value, "a value")
    return f"{name} {format_array(what.dtype, what.shape)} {format_bytes(what.bytes)}{place}"


def _kind(value: Value) -> tuple[Any, ...]:
    return value.shape, value.dtype
