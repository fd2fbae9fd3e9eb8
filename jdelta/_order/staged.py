"""A staged program as operators and tensors: what runs by itself, and what takes memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jdelta._fusion import Compiler, storage
from jdelta._graph import BARRIER, Graph, Operation
from jdelta._order.problem import Problem, Tensor
from jdelta._peak import stored_sizes
from jdelta._primitives import FREE, VIEWS

Buffers = list[frozenset[int]]


def problem_of(
    graph: Graph,
    compiler: Compiler | None,
    inner: Callable[[Graph], int],
    donated: Mapping[int, int] = {},
) -> Problem:
    """The problem that a program poses.

    Args:
        graph: The program.
        compiler: Whose fusion decides what is an operator; without one each equation that is no
            view is, and writes its results in full, as in a framework that runs them one by one.
        inner: Bytes that a body needs beside what it is given.
        donated: From results to the arguments whose place they take.
    """
    buffers = storage(graph, compiler) if compiler else _unfused(graph)
    sizes = stored_sizes(graph, compiler) if compiler else [v.bytes for v in graph.values]
    builder = _Builder(graph, compiler, buffers, sizes)
    for op in graph.operations:
        builder.add(op, inner)
    builder.keep(donated)
    return builder.problem()


def _unfused(graph: Graph) -> Buffers:
    """For each value the buffer it is read from, where nothing is fused."""
    buffers = [frozenset({i}) for i in range(len(graph.values))]
    for op in graph.operations:
        if op.primitive == BARRIER:
            for v, handed_on in zip(op.outputs, op.inputs, strict=True):
                buffers[v] = buffers[handed_on]
        elif op.primitive in VIEWS or op.primitive in FREE:
            read = frozenset[int]().union(*(buffers[v] for v in op.inputs))
            buffers.__setitem__(op.outputs[0], read)
    return buffers


@dataclass
class _Buffer:
    """A tensor in the making."""

    bytes: int
    maker: int
    users: dict[int, None] = field(default_factory=dict[int, None])
    kept: bool = False


class _Builder:
    def __init__(
        self, graph: Graph, compiler: Compiler | None, buffers: Buffers, sizes: Sequence[int]
    ):
        self.graph = graph
        self.compiler = compiler
        self.buffers = buffers
        self.sizes = sizes
        self.made: dict[int, _Buffer] = {}
        self.readers: dict[int, list[int]] = {}
        self.waits: list[frozenset[int]] = [frozenset()] * len(graph.values)
        self.predecessors: list[set[int]] = []
        self.workspace: list[int] = []
        self.names: list[str] = []
        self.effect: int | None = None

    def add(self, op: Operation, inner: Callable[[Graph], int]) -> None:
        """An operation: an operator if it writes memory or has an effect, else a part of others."""
        waits = frozenset[int]().union(*(self.waits[v] for v in op.inputs))
        writes = [v for v in op.outputs if v in self.buffers[v]]
        if not writes and op.primitive != BARRIER and not op.has_effects:
            for v in op.outputs:
                self.waits[v] = waits
            return
        index = len(self.predecessors)
        if op.has_effects:
            waits |= {self.effect} if self.effect is not None else frozenset()
            self.effect = index
        self.predecessors.append(set(waits))
        self.names.append("/".join((*op.scope, op.name or op.primitive)))
        self.workspace.append(self._workspace(op, inner))
        for v in writes:
            self.made[v] = _Buffer(self.sizes[v], index)
        for v in op.outputs:
            self.waits[v] = frozenset({index})
        for buffer in frozenset[int]().union(*(self.buffers[v] for v in op.inputs)):
            self.readers.setdefault(buffer, []).append(index)
            if buffer in self.made:
                self.made[buffer].users[index] = None

    def _workspace(self, op: Operation, inner: Callable[[Graph], int]) -> int:
        inside = max(map(inner, op.bodies), default=0)
        return inside + (self.compiler.workspace(self.graph, op) if self.compiler else 0)

    def keep(self, donated: Mapping[int, int]) -> None:
        """Results stay; those that take the place of an argument take no memory of their own.

        Such a result is written when nothing reads the argument any more. Where that is not so in
        program order, it has a buffer of its own.
        """
        for v in self.graph.outputs:
            for buffer in self.buffers[v] if v is not None else ():
                if buffer in self.made:
                    self.made[buffer].kept = True
        for result, argument in donated.items():
            buffer = self.made.get(result)
            readers = self.readers.get(argument, [])
            if buffer is not None and all(r <= buffer.maker for r in readers):
                buffer.bytes = 0
                self.predecessors[buffer.maker].update(set(readers) - {buffer.maker})

    def problem(self) -> Problem:
        tensors = (
            Tensor(b.bytes, b.maker, tuple(b.users), b.kept, str(v)) for v, b in self.made.items()
        )
        return Problem(
            tuple(tuple(sorted(p)) for p in self.predecessors),
            tuple(tensors),
            tuple(self.workspace),
            tuple(self.names),
        )
