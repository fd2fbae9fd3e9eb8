"""A staged program as operators and tensors: what runs by itself, and what takes memory."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from jdelta._src.estimate.buffers import Compiler, storage
from jdelta._src.estimate.memory import overwrites, stored_sizes
from jdelta._src.order.problem import Problem, Tensor
from jdelta._src.order.schedule import arrange
from jdelta._src.program.graph import BARRIER, Graph, Operation
from jdelta._src.program.primitives import FREE, VIEWS
from jdelta._src.sizes import format_array

_Buffers = list[frozenset[int]]

_NONE: Mapping[int, int] = MappingProxyType({})


def problem_of(
    graph: Graph, compiler: Compiler | None, taken: Mapping[int, int] = _NONE
) -> Problem:
    """The problem that a program poses.

    A loop is one operator. What its body needs at its peak, in the best order found for it, is
    taken while it runs.

    Args:
        graph: The program.
        compiler: Whose fusion decides what is an operator; without one each equation that is no
            view is, and writes its results in full, as in a framework that runs them one by one.
        taken: From results to the arguments whose place they take.
    """
    return _problem(graph, compiler, taken, with_results=True)


def places_taken(graph: Graph, donated: Iterable[int]) -> dict[int, int]:
    """Which results take the place of which donated arguments, as JAX pairs them: first come."""
    waiting: dict[object, deque[int]] = defaultdict(deque)
    for argument in donated:
        waiting[graph.values[argument]].append(argument)
    taken: dict[int, int] = {}
    for result in graph.outputs:
        if result is not None and result not in taken and waiting[graph.values[result]]:
            taken[result] = waiting[graph.values[result]].popleft()
    return taken


def _problem(
    graph: Graph, compiler: Compiler | None, taken: Mapping[int, int], *, with_results: bool
) -> Problem:
    buffers = storage(graph, compiler) if compiler else _unfused(graph)
    sizes = stored_sizes(graph, compiler) if compiler else [v.bytes for v in graph.values]
    builder = _Builder(graph, compiler, buffers, sizes)
    builder.written_over_arguments = _union(buffers[v] for v in taken)
    for op in graph.operations:
        builder.add(op)
    builder.keep(with_bytes=with_results)
    builder.take(taken)
    return builder.problem()


def _unfused(graph: Graph) -> _Buffers:
    """For each value the buffer it is read from, where nothing is fused."""
    buffers = [frozenset({i}) for i in range(len(graph.values))]
    for op in graph.operations:
        if op.primitive == BARRIER:
            for v, handed_on in zip(op.outputs, op.inputs, strict=True):
                buffers[v] = buffers[handed_on]
        elif op.primitive in VIEWS or op.primitive in FREE:
            buffers[op.outputs[0]] = _union(buffers[v] for v in op.inputs)
    return buffers


def _union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset[int]().union(*sets)


@dataclass
class _Buffer:
    """A tensor in the making."""

    bytes: int
    maker: int
    users: dict[int, None] = field(default_factory=dict[int, None])
    kept: bool = False


class _Builder:
    """Goes through a program and notes operators, what each waits for, and buffers."""

    def __init__(
        self, graph: Graph, compiler: Compiler | None, buffers: _Buffers, sizes: Sequence[int]
    ):
        self._graph = graph
        self._compiler = compiler
        self._buffers = buffers
        self._sizes = sizes
        self._tensors: dict[int, _Buffer] = {}
        self._readers: dict[int, list[int]] = defaultdict(list)
        self._waits: _Buffers = [frozenset()] * len(graph.values)
        self._predecessors: list[set[int]] = []
        self._names: list[str] = []
        self._inside: list[int] = []
        self._effect: frozenset[int] = frozenset()
        self._read_once = _read_once(graph, buffers)
        self.written_over_arguments: frozenset[int] = frozenset()

    def add(self, op: Operation) -> None:
        """An operation: an operator if it writes memory or has an effect, else a part of others."""
        waits = _union(self._waits[v] for v in op.inputs)
        if not _is_operator(op, self._buffers):
            for v in op.outputs:
                self._waits[v] = waits
            return
        index = len(self._predecessors)
        if op.has_effects:
            waits |= self._effect
            self._effect = frozenset({index})
        self._predecessors.append(set(waits))
        self._names.append("/".join((*op.scope, op.name or op.primitive)))
        self._inside.append(self._needed_inside(op))
        for buffer in _union(self._buffers[v] for v in op.inputs):
            self._readers[buffer].append(index)
            if buffer in self._tensors:
                self._tensors[buffer].users[index] = None
        for v in op.outputs:
            self._waits[v] = frozenset({index})
            if v in self._buffers[v]:
                self._tensors[v] = self._overwritten(op, v) or _Buffer(self._sizes[v], index)

    def _needed_inside(self, op: Operation) -> int:
        """Bytes that an operation needs beside what it reads and writes."""
        bodies = (_problem(b, self._compiler, _NONE, with_results=False) for b in op.bodies)
        inside = max((arrange(body).peak for body in bodies), default=0)
        if inside or self._compiler is None:
            return inside
        return self._compiler.workspace(self._graph, op, frees=False)  # not in every order

    def _overwritten(self, op: Operation, result: int) -> _Buffer | None:
        """A buffer that dies at an operation in every order, and that its result is written over.

        Only a compiler does that. What has other readers too may or may not die here.
        """
        if self._compiler is None or not overwrites(op, self._compiler):
            return None
        if result in self.written_over_arguments:
            return None
        index = len(self._predecessors) - 1
        for buffer in sorted(_union(self._buffers[v] for v in op.inputs)):
            tensor = self._tensors.get(buffer) if buffer in self._read_once else None
            if tensor and tensor.bytes == self._sizes[result] and list(tensor.users)[-1] == index:
                self._read_once.discard(buffer)  # taken
                return tensor
        return None

    def keep(self, *, with_bytes: bool) -> None:
        """Results stay; those of a body are in memory that its loop has."""
        for buffer in _union(self._buffers[v] for v in self._graph.outputs if v is not None):
            if buffer in self._tensors:
                self._tensors[buffer].kept = True
                self._tensors[buffer].bytes *= with_bytes

    def take(self, taken: Mapping[int, int]) -> None:
        """Results in the place of an argument take no memory of their own.

        Such a result is written when nothing reads the argument any more. Where that is not so in
        program order, it has a buffer of its own.
        """
        for result, argument in taken.items():
            buffers = self._buffers[result]
            tensor = self._tensors.get(next(iter(buffers))) if len(buffers) == 1 else None
            readers = self._readers[argument]
            if tensor is not None and all(reader <= tensor.maker for reader in readers):
                tensor.bytes = 0
                self._predecessors[tensor.maker].update(set(readers) - {tensor.maker})

    def problem(self) -> Problem:
        """What was noted."""
        shared = {id(tensor): (v, tensor) for v, tensor in self._tensors.items()}
        tensors = [
            Tensor(tensor.bytes, tensor.maker, tuple(tensor.users), tensor.kept, self._kind(v))
            for v, tensor in shared.values()
        ]
        inside = (Tensor(b, i, name="inside") for i, b in enumerate(self._inside) if b)
        return Problem(
            tuple(tuple(sorted(before)) for before in self._predecessors),
            (*tensors, *inside),
            tuple(self._names),
        )

    def _kind(self, value: int) -> str:
        shown = self._graph.values[value]
        return format_array(shown.dtype, shown.shape)


def _is_operator(op: Operation, buffers: _Buffers) -> bool:
    """Whether an operation runs by itself: it writes memory, has an effect, or is a barrier."""
    writes = any(v in buffers[v] for v in op.outputs)
    return writes or op.has_effects or op.primitive == BARRIER


def _read_once(graph: Graph, buffers: _Buffers) -> set[int]:
    """Buffers that a single operator reads, and that are no results."""
    readers: dict[int, int] = defaultdict(int)
    for op in graph.operations:
        if _is_operator(op, buffers):
            for buffer in _union(buffers[v] for v in op.inputs):
                readers[buffer] += 1
    results = _union(buffers[v] for v in graph.outputs if v is not None)
    return {buffer for buffer, count in readers.items() if count == 1} - results
