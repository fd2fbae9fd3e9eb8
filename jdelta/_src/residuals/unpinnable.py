"""Why a named value of a step cannot be decided about, for who pins it."""

from __future__ import annotations

from collections.abc import Collection

from jdelta._src.program.graph import Graph, Operation
from jdelta._src.program.loop_nest import walk
from jdelta._src.program.names import RegionName
from jdelta._src.program.primitives import CHEAP, FREE
from jdelta._src.regions.trace import Region, Trace


def why_unpinnable(trace: Trace, known: Collection[str], name: str) -> str | None:
    """Why what is called so is no residual.

    Args:
        trace: The step.
        known: Names of its residuals.
        name: A name as plans print it, or the user's own ``checkpoint_name``.

    Returns:
        A part of a sentence; None if nothing in the step is called so.
    """
    for region in trace.regions:
        for op in region.graph.operations:
            if isinstance(op.name, RegionName) and name in (
                trace.plan_name(op.name),
                op.name.user_name,
            ):
                return _why(trace, known, region, op)
    named = (op for graph in _graphs(trace) for op, _ in walk(graph) if op.name == name)
    if next(named, None) is None:
        return None
    return (
        "it names a value outside of all regions, or in a loop or rule of its own that keeps "
        "nothing; mark a region around it with jdelta.remat"
    )


def _graphs(trace: Trace) -> list[Graph]:
    return [trace.graph, *(region.graph for region in trace.regions)]


def _why(trace: Trace, known: Collection[str], region: Region, op: Operation) -> str:
    graph, buffers = region.graph, region.graph.buffers()
    buffer = buffers[op.inputs[0]]
    others = (
        trace.plan_name(other.name)
        for other in graph.operations
        if isinstance(other.name, RegionName) and buffers[other.inputs[0]] == buffer
    )
    if same := next((other for other in others if other in known), None):
        return f"it is another name of {same!r}; pin that"
    if op.name not in region.copies:
        return "neither the backward pass nor a result of the step reads it"
    producers = graph.producers()
    if buffer not in producers:
        return (
            "it enters a region as an argument of the step (a weight, the batch) or as a part of "
            "one, so it stays"
        )
    primitive = graph.operations[producers[buffer]].primitive
    if primitive in FREE:
        return f"compilers make it where it is read ({primitive}), so it takes no memory"
    if primitive in CHEAP:
        return f"the backward pass does not read it, and it is cheap to compute ({primitive})"
    return "it depends on nothing that the step is given, or the backward pass does not read it"
