"""Timeline of live bytes of a program, as a compiler that fuses would allocate it.

A model of XLA, not XLA: it says *where* the peak is and how it moves when decisions change; the
absolute figure is then corrected by a compiled one. Beside what ``buffers.py`` says, an
element-wise result may be written over an input that dies; loop bodies are allocated once,
stacked loop outputs as a whole. What is computed again is computed just before it is read: XLA does
not follow the program there (a ViT's attention is computed again after the backward pass of the MLP
behind it, 5 % of the peak).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from jdelta._src import _jax
from jdelta._src.estimate.buffers import Compiler, last_reads, of_images, read_narrowly, storage
from jdelta._src.program.graph import TRANSFER, Graph, Operation
from jdelta._src.program.primitives import REDUCTIONS


@dataclass(frozen=True)
class Timeline:
    """Live temporary bytes of a program, operation by operation.

    Attributes:
        live: Bytes alive while each operation runs, those of its own body included.
        graph: The program, in the order in which it is taken to run.
        last: For each buffer the index of the last operation that reads it.
        workspace: Bytes that each operation needs for itself while it runs; none for one with a
            body.
    """

    live: tuple[int, ...]
    graph: Graph
    last: dict[int, int]
    workspace: tuple[int, ...]

    @property
    def peak(self) -> int:
        """Largest number of bytes alive at once."""
        return max(self.live, default=0)

    @property
    def peak_index(self) -> int:
        """Index of the operation that runs at the peak."""
        return max(range(len(self.live)), key=self.live.__getitem__, default=0)

    @property
    def peak_workspace(self) -> int:
        """Bytes that the operation at the peak needs for itself."""
        return self.workspace[self.peak_index] if self.workspace else 0

    def alive(self, index: int) -> list[int]:
        """The buffers alive while an operation runs, largest first."""
        producers, values = self.graph.producers(), self.graph.values
        alive = [v for v, end in self.last.items() if producers.get(v, index + 1) <= index <= end]
        return sorted(alive, key=lambda v: -values[v].bytes)


def timeline(
    graph: Graph, compiler: Compiler, rows: Collection[int] = (), stacked: Collection[int] = ()
) -> Timeline:
    """Simulate the temporaries of a program; its inputs and outputs are not counted.

    Args:
        graph: The program.
        compiler: What compiles it.
        rows: Inputs that are rows of stacks, counted as far as the compiler copies them.
        stacked: Outputs that become rows of stacks, counted alike while they are made.
    """
    graph = _recomputed_late(graph)
    roots = storage(graph, compiler)
    sizes = stored_sizes(graph, compiler)
    last = last_reads(graph, roots)
    fixed = {r for v in (*graph.initial_values, *graph.outputs) if v is not None for r in roots[v]}
    producers = graph.producers()
    ends: list[list[int]] = [[] for _ in graph.operations]
    for value, index in last.items():
        if value not in fixed and value in producers:
            ends[index].append(value)
    changes = _conversions(graph, compiler)
    tied = _tied(graph, roots, compiler)
    copied = {v for op in graph.operations if compiler.copies_rows(op) for v in op.inputs}
    copied = {root for v in copied for root in roots[v]}.intersection(rows)
    for value in copied:
        ends[last[value]].append(value)
    copied_out = {root for v in stacked for root in roots[v]}
    live: list[int] = []
    workspace: list[int] = []
    now = sum(sizes[v] for v in copied)
    for index, op in enumerate(graph.operations):
        results = [v for v in op.outputs if v in roots[v] and v not in fixed and v in last]
        new = sum(sizes[v] for v in results)
        shared = 0
        if results and ends[index] and overwrites(op, compiler):
            dying = Counter(sizes[v] for v in ends[index] if v not in results and v not in tied)
            over = dying & Counter(sizes[v] for v in results)  # buffers of one size
            shared = sum(over.elements())
        for before, after in carried_in_place(op):
            if after in results and roots[before].issubset(ends[index]):
                shared += sizes[after]
        body = op.body and body_timeline(op, op.body, compiler)
        frees = any(roots[v] and roots[v].issubset(ends[index]) for v in op.inputs)
        workspace.append(0 if body else compiler.workspace(graph, op, frees=frees))
        inside = body.peak if body else workspace[-1]
        inside += compiler.relaid_bytes(op)
        if compiler.copies_rows(op):
            inside += sum(sizes[v] for v in op.outputs if v in copied_out)
        now += changes[index]
        live.append(now + new - shared + inside)
        now += new - sum(sizes[v] for v in ends[index])
    return Timeline(tuple(live), graph, last, tuple(workspace))


def body_timeline(op: Operation, body: Graph, compiler: Compiler) -> Timeline:
    """Simulate one iteration of a loop, or a branch."""
    if op.primitive != "scan":
        return timeline(body, compiler)
    return iteration(body, *_jax.scan_counts(op.params), compiler)


def iteration(body: Graph, consts: int, carry: int, compiler: Compiler) -> Timeline:
    """Simulate one iteration of a ``scan``."""
    stacked = [v for v in body.outputs[carry:] if v is not None]
    return timeline(body, compiler, body.inputs[consts + carry :], stacked)


def carried_in_place(loop: Operation) -> Iterator[tuple[int, int]]:
    """What a loop carries in one buffer, since each iteration changes at most some rows of it.

    Yields:
        The value that it begins with, and the one that it ends with. There are none of what is no
        loop.
    """
    if loop.primitive not in ("scan", "while") or loop.body is None:
        return
    body, first = loop.body, loop.body.inputs
    if loop.primitive == "scan":
        consts, count = _jax.scan_counts(loop.params)
        outside = consts
    else:
        consts, count = loop.params["body_nconsts"], len(loop.outputs)
        outside = loop.params["cond_nconsts"] + consts
    begun = dict(zip(first, first, strict=True))
    for op in body.operations:
        if op.primitive == "dynamic_update_slice" and op.inputs[0] in begun:
            begun[op.outputs[0]] = begun[op.inputs[0]]
        begun.update({new: begun[old] for old, new in carried_in_place(op) if old in begun})
    for i, result in enumerate(body.outputs[:count]):
        if result is not None and begun.get(result) == first[consts + i]:
            yield loop.inputs[outside + i], loop.outputs[i]


def _recomputed_late(graph: Graph) -> Graph:
    """The same program, in which what is computed again is so just before its first reader."""
    place = list(range(len(graph.operations)))
    first: dict[int, int] = {}
    for index in reversed(place):
        op = graph.operations[index]
        if op.recomputed and op.primitive != TRANSFER:
            place[index] = min((first[v] for v in op.outputs if v in first), default=index)
        first.update((v, min(place[index], first.get(v, place[index]))) for v in op.inputs)
    order = sorted(range(len(place)), key=place.__getitem__)
    return replace(graph, operations=[graph.operations[i] for i in order])


def stored_sizes(graph: Graph, compiler: Compiler) -> list[int]:
    """For each value the bytes it takes in memory, if it is written there."""
    sizes = [compiler.bytes(value) for value in graph.values]
    narrow, images = read_narrowly(graph), of_images(graph)
    for op in graph.operations:
        for v in op.outputs:
            sizes[v] = compiler.stored_bytes(
                graph.values[v], read_narrowly=v in narrow, minor=images.get(v)
            )
    return sizes


def _conversions(graph: Graph, compiler: Compiler) -> list[int]:
    """Bytes of values converted for loops, as what each operation finds more (or less) alive.

    All loops that read a value share its conversion; a stack that a loop made is one already.
    """
    changes = [0] * (len(graph.operations) + 1)
    loop_outputs = {v for op in graph.operations if op.primitive == "scan" for v in op.outputs}
    spans: dict[int, tuple[int, int]] = {}
    for index, op in enumerate(graph.operations):
        if op.primitive == "scan" and op.body is not None:
            only = read_narrowly(op.body)
            consts, carry = _jax.scan_counts(op.params)
            for at, (v, inside) in enumerate(zip(op.inputs, op.body.inputs, strict=True)):
                if v not in loop_outputs and inside in only and not consts <= at < consts + carry:
                    spans[v] = spans.get(v, (index, index))[0], index
    for v, (first, last) in spans.items():
        size = compiler.converted_bytes(graph.values[v])
        changes[first] += size
        changes[last + 1] -= size
    return changes


def _tied(graph: Graph, roots: Sequence[frozenset[int]], compiler: Compiler) -> set[int]:
    """Buffers that nothing is written over: rows that are read for a reduction and its use at once.

    What is made of them with the result has a place of its own then.
    """
    reductions = (op for op in graph.operations if op.primitive in REDUCTIONS)
    reduced = (op.inputs[0] for op in reductions if compiler.reduces_rows_as_it_reads(graph, op))
    return {root for value in reduced for root in roots[value]}


def overwrites(op: Operation, compiler: Compiler) -> bool:
    """Whether the result may be written over an input that dies; a loop's stacked results never."""
    updates = ("dynamic_update_slice", "scatter", "scatter-add")
    return compiler.is_elementwise(op) or op.primitive in updates
