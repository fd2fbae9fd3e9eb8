"""Boundaries: values that the step computes and hands to a region.

``jax.checkpoint`` keeps of a region's inputs what its backward pass reads, or computes again from
them. To the solver a region input is there: it can be offloaded under a budget below what recompute
alone reaches, or be computed again from earlier regions (``search/chain.py``). Weights, constants
and slices of a loop's inputs are none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jdelta._src import _jax
from jdelta._src.backends.target import Target
from jdelta._src.program.graph import Graph, Operation, Value
from jdelta._src.program.loop_nest import OUTSIDE, Nest
from jdelta._src.program.names import RegionName
from jdelta._src.program.primitives import CHEAP, FREE
from jdelta._src.regions.trace import Trace
from jdelta._src.residuals.residual import Residual, needed_inputs, residuals, with_consumers

INPUT_OF_REGION = "input"
"""What stands for the producer of a region input that no region makes."""


def with_region_inputs(trace: Trace, target: Target) -> tuple[Residual, ...]:
    """The residuals of a step and its region inputs, in the order of the forward pass.

    A region input that is a residual of the region it comes out of is one item: that residual.
    """
    entries = list(_entries(trace.graph, {}, OUTSIDE))
    shared = Counter(entry.buffer for entry in entries)
    alone = [entry for entry in entries if shared[entry.buffer] == 1]
    by_name = {r.name: r for region in trace.regions for r in residuals(region, target)}
    read = {name for region in trace.regions for name in needed_inputs(region, target)}
    items = {name: name for name in by_name}
    for entry in alone:
        name = trace.plan_name(entry.name)
        maker = trace.plan_name(entry.maker) if entry.maker else None
        if maker in by_name and by_name[maker].loops == 0:
            items[name] = maker
            by_name[maker] = replace(
                by_name[maker],
                region_input=True,
                entering=name,
                needed=by_name[maker].needed or name in read,
                sources=(),
                seconds=0.0,
                user_name=by_name[maker].user_name or entry.user_name,
            )
        else:
            items[name] = name
            region = trace.aliases[entry.name.region]
            by_name[name] = _residual(entry, name, region, needed=name in read)
    known = (
        replace(r, sources=tuple(items[s] for s in r.sources if s in items))
        for r in by_name.values()
    )
    return with_consumers(_ordered(list(known), trace))


def users_names(trace: Trace, residuals: Sequence[Residual]) -> dict[str, list[str]]:
    """From each name that the user gives to the names of the residuals that have it.

    A value may have several: where one layer ends, where the next one begins.

    Args:
        trace: The step.
        residuals: Its residuals and region inputs.

    Returns:
        For example ``{"layer_out": ["h_1/layer_out", "h_2/layer_out"]}``.
    """
    items = {r.name: r.name for r in residuals}
    items |= {r.entering: r.name for r in residuals if r.entering}
    by_user_name: dict[str, dict[str, None]] = {}
    for user_name, name in _given_names(trace.graph, {}):
        if item := items.get(trace.plan_name(name)):
            by_user_name.setdefault(user_name, {})[item] = None
    return {user_name: list(names) for user_name, names in by_user_name.items()}


def _given_names(
    graph: Graph, carried: Mapping[int, int | None]
) -> Iterator[tuple[str, RegionName]]:
    """Each name that the user gives to a buffer, with each that it has here."""
    buffers, called = graph.buffers(), _called(graph, carried)
    for op in graph.operations:
        if isinstance(op.name, RegionName) and op.inputs and not op.backward:
            for user_name in called.get(buffers[op.inputs[0]], ()):
                yield user_name, op.name
        for body in op.bodies:
            yield from _given_names(body, _carried(op) if body is op.body else {})


@dataclass(frozen=True)
class _Entry:
    """An input of a region that the step computes.

    Attributes:
        name: Its name while tracing.
        buffer: What tells the buffer from others.
        value: The value.
        maker: Name of the same buffer in the region that makes it, if one does.
        nest: The loops around it.
        user_name: The user's own ``checkpoint_name`` of it; empty where it has none.
        line: Where the user's code computes it.
    """

    name: RegionName
    buffer: tuple[int, int]
    value: Value
    maker: RegionName | None
    nest: Nest
    user_name: str
    line: str


def _entries(graph: Graph, carried: Mapping[int, int | None], nest: Nest) -> Iterator[_Entry]:
    """What enters the regions of a graph.

    Args:
        graph: The graph of the step, or of a loop's body.
        carried: From the inputs of a body that an iteration takes from the one before to what that
            one hands on.
        nest: The loops around it.
    """
    buffers, called = graph.buffers(), _called(graph, carried)
    makers: dict[int, RegionName] = {}
    makes = {v: op for op in graph.operations for v in op.outputs}
    for op in graph.operations:
        if isinstance(op.name, RegionName) and op.inputs and not op.backward:
            buffer = buffers[op.inputs[0]]
            if not op.name.is_input:
                makers.setdefault(buffer, op.name)
            elif buffer in carried or _is_computed(makes.get(buffer), graph):
                value = graph.values[op.outputs[0]]
                yield _Entry(
                    name=op.name,
                    buffer=(id(graph), buffer),
                    value=value,
                    maker=makers.get(buffer),
                    nest=nest,
                    user_name=op.name.user_name or next(iter(called.get(buffer, ())), ""),
                    line=_jax.line_of(makes.get(buffer, op).equation),
                )
        if op.body is not None and op.primitive != "cond":
            inside = nest.inside(op)
            # A loop around the gradient carries weights.
            yield from _entries(op.body, _carried(op) if inside.loops else {}, inside)


def _called(graph: Graph, carried: Mapping[int, int | None]) -> Mapping[int, Sequence[str]]:
    """The user's own names of buffers, in program order; first those inside of an iteration."""
    buffers = graph.buffers()
    called: defaultdict[int, list[str]] = defaultdict(list)
    for op in graph.operations:
        user_name = op.name.user_name if isinstance(op.name, RegionName) else op.name
        if user_name and op.inputs and user_name not in called[buffers[op.inputs[0]]]:
            called[buffers[op.inputs[0]]].append(user_name)
    handed = {v: called[buffers[out]] for v, out in carried.items() if out is not None}
    return {v: [*called[v], *handed.get(v, ())] for v in {*called, *handed}}


def _is_computed(op: Operation | None, graph: Graph) -> bool:
    """Whether an operation makes a value that is not just an argument of the step, converted."""
    if op is None or op.primitive in FREE:
        return False
    return op.primitive not in CHEAP or not set(op.inputs) <= set(graph.initial_values)


def _carried(op: Operation) -> dict[int, int | None]:
    """From what an iteration of a loop takes from the one before to what it hands on for it."""
    if op.primitive != "scan" or op.body is None:
        return {}
    consts, carry = _jax.scan_counts(op.params)
    return dict(zip(op.body.inputs[consts : consts + carry], op.body.outputs[:carry], strict=True))


def _residual(entry: _Entry, name: str, region: str, *, needed: bool) -> Residual:
    return Residual(
        name=name,
        region=region,
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
        region_input=True,
        user_name=entry.user_name,
        line=entry.line,
    )


def _ordered(residuals: Sequence[Residual], trace: Trace) -> tuple[Residual, ...]:
    """Region by region, what enters it first."""
    order = {region.name: index for index, region in enumerate(trace.regions)}
    return tuple(sorted(residuals, key=lambda r: (order[r.region], r.producer != INPUT_OF_REGION)))
