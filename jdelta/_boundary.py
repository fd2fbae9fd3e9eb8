"""Boundaries: values that the step computes and hands to a region.

``jax.checkpoint`` keeps of a region's inputs what its backward pass reads, or computes again from
them. A boundary cannot be recomputed, but it can be offloaded: under a budget that is below what
recompute alone reaches. Weights, constants and slices of a loop's inputs are no boundaries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jdelta import _jax
from jdelta._graph import Graph, Operation, Value
from jdelta._naming import RegionName
from jdelta._nest import OUTSIDE, Nest
from jdelta._primitives import CHEAP, FREE, VIEWS
from jdelta._residual import Residual, needed_inputs, residuals, with_consumers
from jdelta._target import Target
from jdelta._trace import Trace

INPUT_OF_REGION = "input"
"""What stands for the producer of a boundary that no region makes."""


def with_boundaries(trace: Trace, target: Target) -> tuple[Residual, ...]:
    """The residuals of a step and its boundaries, in the order of the forward pass.

    A boundary that is a residual of the region it comes out of is one item: that residual.
    """
    entries = list(_entries(trace.graph, set(), OUTSIDE))
    shared = Counter(entry.buffer for entry in entries)
    alone = [entry for entry in entries if shared[entry.buffer] == 1]
    found = {r.name: r for region in trace.regions for r in residuals(region, target)}
    read = {name for region in trace.regions for name in needed_inputs(region, target)}
    items = {name: name for name in found}
    for entry in alone:
        name = trace.plan_name(entry.name)
        maker = trace.plan_name(entry.maker) if entry.maker else None
        if maker in found and found[maker].loops == 0:
            items[name] = maker
            found[maker] = replace(
                found[maker],
                boundary=True,
                entering=name,
                needed=found[maker].needed or name in read,
                sources=(),
                seconds=0.0,
            )
        else:
            items[name] = name
            found[name] = _residual(entry, name, needed=name in read)
    known = (
        replace(r, sources=tuple(items[s] for s in r.sources if s in items)) for r in found.values()
    )
    return with_consumers(_ordered(list(known), trace))


@dataclass(frozen=True)
class _Entry:
    """An input of a region that the step computes.

    Attributes:
        name: Its name while tracing.
        buffer: What tells the buffer from others.
        value: The value.
        maker: Name of the same buffer in the region that makes it, if one does.
        nest: The loops around it.
    """

    name: RegionName
    buffer: tuple[int, int]
    value: Value
    maker: RegionName | None
    nest: Nest


def _entries(graph: Graph, carried: set[int], nest: Nest) -> Iterator[_Entry]:
    base = list(range(len(graph.values)))
    makers: dict[int, RegionName] = {}
    makes = {v: op for op in graph.operations for v in op.outputs}
    for op in graph.operations:
        if op.primitive in VIEWS and op.inputs:
            base[op.outputs[0]] = base[op.inputs[0]]
        if isinstance(op.name, RegionName) and op.inputs and not op.backward:
            buffer = base[op.inputs[0]]
            if not op.name.is_input:
                makers.setdefault(buffer, op.name)
            elif buffer in carried or _is_computed(makes.get(buffer), graph):
                value = graph.values[op.outputs[0]]
                yield _Entry(op.name, (id(graph), buffer), value, makers.get(buffer), nest)
        if op.body is not None and op.primitive != "cond":
            inside = nest.inside(op)
            # A loop around the gradient carries weights.
            yield from _entries(op.body, _carried(op) if inside.loops else set(), inside)


def _is_computed(op: Operation | None, graph: Graph) -> bool:
    """Whether an operation makes a value that is not just an argument of the step, converted."""
    if op is None or op.primitive in FREE:
        return False
    return op.primitive not in CHEAP or not set(op.inputs) <= set(graph.given)


def _carried(op: Operation) -> set[int]:
    """The inputs of a loop's body that an iteration takes from the one before."""
    if op.primitive != "scan" or op.body is None:
        return set()
    consts, carry = _jax.scan_counts(op.params)
    return set(op.body.inputs[consts : consts + carry])


def _residual(entry: _Entry, name: str, *, needed: bool) -> Residual:
    return Residual(
        name=name,
        region=name.removesuffix("/" + name.rsplit("/", 1)[1]),
        shape=entry.value.shape,
        dtype=entry.value.dtype,
        count=entry.nest.kept,
        bytes=entry.value.bytes * entry.nest.kept,
        producer=INPUT_OF_REGION,
        consumers=(),
        sources=(),
        needed=needed,
        read_narrowly=False,
        seconds=0.0,
        loops=entry.nest.loops,
        repeats=entry.nest.repeats,
        spec=entry.value.spec,
        boundary=True,
    )


def _ordered(residuals: Sequence[Residual], trace: Trace) -> tuple[Residual, ...]:
    """Region by region, what enters it first."""
    order = {region.name: index for index, region in enumerate(trace.regions)}
    return tuple(sorted(residuals, key=lambda r: (order[r.region], r.producer != INPUT_OF_REGION)))
