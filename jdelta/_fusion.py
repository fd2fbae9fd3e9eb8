"""What a fusing compiler writes to memory: for each value the buffers it is read from.

A model of XLA on GPU and TPU. Views and broadcasts take no memory. Element-wise results are
written only where something that cannot be fused reads them (a matrix product, a loop), where an
expensive function has several readers, or where keeping what they are made from would cost more.
"""

from __future__ import annotations

from collections.abc import Callable

from jdelta._graph import BARRIER, Graph, Operation, Value
from jdelta._primitives import CHEAP, EXPENSIVE, FREE, REDUCTIONS, VIEWS

_FUSIBLE = CHEAP | EXPENSIVE | REDUCTIONS | FREE


def storage(graph: Graph, size: Callable[[Value], int]) -> list[frozenset[int]]:
    """For each value the buffers it is read from: its own, or those it is fused from."""
    readers: list[list[Operation]] = [[] for _ in graph.values]
    for op in graph.operations:
        for v in set(op.inputs):
            readers[v].append(op)
    outputs = {v for v in graph.outputs if v is not None}
    seen = _readers_through_views(graph, readers)
    roots = [frozenset({i}) for i in range(len(graph.values))]
    for op in graph.operations:
        below = frozenset[int]().union(*(roots[v] for v in op.inputs))
        if op.primitive == BARRIER:
            for v, handed_on in zip(op.outputs, op.inputs, strict=True):
                roots[v] = roots[handed_on]
            continue
        for v in op.outputs:
            if op.primitive in VIEWS:
                roots[v] = roots[op.inputs[0]] if op.inputs else frozenset()
            elif op.primitive in FREE or (
                v not in outputs and _is_fused_away(graph, op, v, seen[v], below, size)
            ):
                roots[v] = below
    return roots


def _readers_through_views(graph: Graph, readers: list[list[Operation]]) -> list[list[Operation]]:
    """Operations that read a value, directly or through views of it."""
    seen: list[list[Operation]] = [[] for _ in graph.values]
    for op in reversed(graph.operations):
        for v in op.outputs:
            for reader in readers[v]:
                if reader.primitive in VIEWS:
                    seen[v].extend(seen[reader.outputs[0]])
                else:
                    seen[v].append(reader)
    return seen


def _is_fused_away(
    graph: Graph,
    op: Operation,
    value: int,
    readers: list[Operation],
    below: frozenset[int],
    size: Callable[[Value], int],
) -> bool:
    """Whether XLA would compute the value inside its readers instead of writing it out."""
    if op.primitive not in CHEAP and op.primitive not in EXPENSIVE:
        return False
    if not all(reader.primitive in _FUSIBLE for reader in readers):
        return False
    if len(readers) <= 1:
        return True
    if op.primitive in EXPENSIVE:
        return False
    own = size(graph.values[value])
    return sum(size(graph.values[r]) >= own for r in below) <= 1
