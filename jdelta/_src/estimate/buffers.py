"""What a compiler writes to memory: for each value the buffers it is read from, and their bytes.

A model of XLA. Views and broadcasts take no memory. Element-wise results are written only where
something that cannot be fused reads them (a loop, on GPUs a matrix product), or where several read
them and they are heavy to compute (random bits) or more would have to be kept to compute them from.
Where XLA's back ends differ, ``Compiler`` goes by the habits of one of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from jdelta._src._jax import scan_counts
from jdelta._src.backends.backend import Backend
from jdelta._src.estimate.collectives import gathered_bytes
from jdelta._src.program.graph import BARRIER, TRANSFER, Graph, Operation, Value
from jdelta._src.program.primitives import (
    CHEAP,
    EXPENSIVE,
    FREE,
    MATMULS,
    RANDOM,
    REDUCTIONS,
    VIEWS,
    WINDOWS,
)

_MOST_READ = 2  # large values that a fused one may be made from; XLA fuses no more


@dataclass(frozen=True)
class Compiler:
    """What the habits of a compiler come to for the operations and values of a program.

    Attributes:
        backend: The habits.
    """

    backend: Backend

    def bytes(self, value: Value, minor: Collection[int] | None = None) -> int:
        """Bytes of a value, padding of its layout included.

        Of all layouts in tiles the one with the least padding is taken to be chosen.

        Args:
            value: The value.
            minor: Dimensions that the two minor ones are among; by default all.
        """
        shape, tiles = value.local, self.backend.layout.tiles
        if not tiles or len(shape) < 2 or value.bytes == 0:
            return value.bytes
        itemsize = value.bytes // math.prod(shape) or 1
        rows, columns = tiles.get(itemsize, tiles[max(tiles)])
        factors = [
            _waste(a, rows) * _waste(b, columns)
            for i, a in enumerate(shape)
            for j, b in enumerate(shape)
            if i != j and (minor is None or {i, j} <= {*minor})
        ]
        return int(value.bytes * min(factors))

    def stored_bytes(
        self, value: Value, *, read_narrowly: bool, minor: Collection[int] | None = None
    ) -> int:
        """Bytes of a value that the program computes; half if it is narrowed, and only read so."""
        return self.bytes(value, minor) // (2 if read_narrowly and self._narrows(value) else 1)

    def converted_bytes(self, value: Value) -> int:
        """Bytes of a second copy of what loops only slice and read narrowly.

        Where they are narrowed, stacked weights are converted to bfloat16 before the loop, whole.
        """
        return self.bytes(value) // 2 if self._narrows(value) else 0

    def _narrows(self, value: Value) -> bool:
        return self.backend.layout.narrows and value.dtype == "float32"

    def is_cheap(self, op: Operation) -> bool:
        """Whether an operation is element-wise and cheap enough to be done in every reader."""
        if op.primitive in CHEAP:
            return True
        if not self.backend.fusion.scatters_rows or not op.primitive.startswith("scatter"):
            return False
        return bool(getattr(op.params["dimension_numbers"], "operand_batching_dims", ()))

    def is_elementwise(self, op: Operation) -> bool:
        """Whether an operation can be fused into what reads its result."""
        return self.is_cheap(op) or op.primitive in EXPENSIVE

    def is_heavy(self, op: Operation) -> bool:
        """Whether a result is computed once, however many read it."""
        return op.primitive in RANDOM or op.primitive in self.backend.fusion.heavy

    def reduces_rows_as_it_reads(self, graph: Graph, op: Operation) -> bool:
        """Whether a sum over rows, and what reads the rows once more with it, are one kernel."""
        value = graph.values[op.inputs[0]]
        rows = len(value.shape) - 1 in op.params.get("axes", ())
        return rows and value.local[-1] <= self.backend.fusion.longest_row

    def fuses_inputs(self, op: Operation) -> bool:
        """Whether an operation computes element-wise inputs itself."""
        if op.primitive in MATMULS:
            return self.backend.fusion.products_compute_inputs
        if op.primitive == "gather":
            return self.backend.fusion.gathers_compute_inputs
        return op.primitive in REDUCTIONS or op.primitive in FREE or self.is_elementwise(op)

    def runs_sums_along(self, op: Operation) -> bool:
        """Whether reductions of what an operation makes run along with it."""
        if op.primitive in MATMULS:
            return self.backend.fusion.products_run_sums
        return self.is_elementwise(op)

    def bits_work(self, *, rbg: bool) -> float:
        """Operations on integers that an element of random bits takes.

        XLA's own generator takes about half as long as threefry, by `benchmarks.compilers.cycles`.

        Args:
            rbg: Whether that generator makes them.
        """
        return self.backend.fusion.threefry_operations * (0.5 if rbg else 1.0)

    def ragged_groups(self, graph: Graph, op: Operation) -> int:
        """How often a ragged product multiplies all of its rows: 1 for any other operation."""
        if op.primitive != "ragged_dot_general" or not self.backend.fusion.masks_groups:
            return 1
        return graph.values[op.inputs[2]].local[-1]

    def masked_copies(self, graph: Graph, op: Operation) -> int:
        """Bytes of a ragged product's rows, copied for each group with the others' set to zero.

        Of both operands where rows are summed over.
        """
        groups = self.ragged_groups(graph, op)
        if groups == 1:
            return 0
        numbers = op.params["ragged_dot_dimension_numbers"]
        summed = numbers.lhs_ragged_dimensions[0] in numbers.dot_dimension_numbers[0][0]
        copied = op.inputs[: 2 if summed else 1]
        return groups * sum(graph.values[v].bytes for v in copied)

    def copies_rows(self, op: Operation) -> bool:
        """Whether an operation in a loop reads and makes rows of stacks as copies of them."""
        return self.backend.loops.products_copy_rows and op.primitive in MATMULS

    def workspace(self, graph: Graph, op: Operation, *, frees: bool) -> int:
        """Bytes that an operation needs beside what it reads and writes.

        Operands that are gathered from other devices, masked copies for a ragged product, and
        padded ones for a product that is split.

        Args:
            graph: What it stands in.
            op: The operation.
            frees: Whether it is the last to read one of its operands.
        """
        own = self._padded(graph, op, frees) + self.masked_copies(graph, op)
        return gathered_bytes(graph, op) + own

    def relaid_bytes(self, op: Operation) -> int:
        """Bytes that a loop takes beside what its body does, for what it fetches from the host."""
        if not self.backend.loops.relays_fetched or op.primitive != "scan" or op.body is None:
            return 0
        return sum(self.bytes(op.body.values[v]) for _, v in _fetched_ahead(op, op.body))

    def _padded(self, graph: Graph, op: Operation, frees: bool) -> int:
        split = self.backend.fusion.split
        if split is None or op.primitive != "dot_general" or len(op.inputs) < 2:
            return 0
        (contracting, _), _ = op.params["dimension_numbers"]
        shape = graph.values[op.inputs[0]].local
        tiles = math.prod(graph.values[op.outputs[0]].local) / split.tile**2
        if tiles >= split.tiles or all(shape[i] % split.alignment == 0 for i in contracting):
            return 0
        copies = [graph.values[v].bytes for v in op.inputs]
        # The operand that dies is copied first, and is gone when the other is.
        return max(copies) if frees else sum(copies)


def _waste(size: int, tile: int) -> float:
    return math.ceil(size / tile) * tile / size if size else 1.0


def read_narrowly(graph: Graph) -> set[int]:
    """Values read by nothing but matrix products and conversions to bfloat16, in loops too.

    A TPU's matrix products take bfloat16 at default precision. Views are looked through. What a
    loop fetches from the host for its next iteration stays as it was stored.
    """
    only = set(range(len(graph.values))) - {v for v in graph.outputs if v is not None}
    for op in reversed(graph.operations):
        if op.primitive in VIEWS or op.primitive == BARRIER:
            pairs = zip(op.inputs, op.outputs, strict=False)
            only.difference_update(v for v, view in pairs if view not in only)
        elif op.primitive == "scan" and op.body is not None:
            inside = read_narrowly(op.body)
            pairs = zip(op.inputs, op.body.inputs, strict=True)
            only.difference_update(v for v, body_input in pairs if body_input not in inside)
            only.difference_update(op.outputs[i] for i, _ in _fetched_ahead(op, op.body))
        elif op.primitive not in MATMULS and not _is_narrowing(graph, op):
            only.difference_update(op.inputs)
    return only


def _fetched_ahead(loop: Operation, body: Graph) -> list[tuple[int, int]]:
    """What an iteration fetches from the host for the next one: places in the carry, and values."""
    _, carry = scan_counts(loop.params)
    fetched = {v for op in body.operations if op.primitive == TRANSFER for v in op.outputs}
    return [(i, v) for i, v in enumerate(body.outputs[:carry]) if v is not None and v in fetched]


def of_images(graph: Graph) -> dict[int, tuple[int, int]]:
    """Batch and feature dimension of what convolutions make, and of what is made of that in place.

    A TPU's convolutions want these two minor, so no other layout is chosen where it has less
    padding: 64 features of 112 × 112 pixels take the memory of 128.
    """
    dims: dict[int, tuple[int, int]] = {}
    for op in graph.operations:
        if op.primitive == "conv_general_dilated":
            dims[op.outputs[0]] = tuple(op.params["dimension_numbers"].out_spec[:2])
        elif op.primitive in CHEAP | EXPENSIVE | WINDOWS:
            for v in op.outputs:
                rank = len(graph.values[v].shape)
                same = (i for i in op.inputs if len(graph.values[i].shape) == rank)
                image = next((i for i in same if i in dims), None)
                if image is not None:
                    dims[v] = dims[image]
    return dims


def _is_narrowing(graph: Graph, op: Operation) -> bool:
    return (
        op.primitive == "convert_element_type" and graph.values[op.outputs[0]].dtype == "bfloat16"
    )


def storage(graph: Graph, compiler: Compiler) -> list[frozenset[int]]:
    """For each value the buffers it is read from: its own, or those it is fused from.

    A value is fused too where the two large ones that it is made from are there as long as it is
    read: then that costs no memory. How long that is follows from what is written otherwise. Sums
    of more are written: in a chain of residual layers every second one.
    """
    readers = _readers_through_views(graph)
    softmaxes = _softmaxes(graph, compiler, readers) if compiler.backend.fusion.softmax else {}
    first = _Storage(graph, compiler, readers, softmaxes, {}).roots()
    end = len(graph.operations)
    io_roots = (
        root for v in (*graph.initial_values, *graph.outputs) if v is not None for root in first[v]
    )
    last = last_reads(graph, first) | dict.fromkeys(io_roots, end)
    return _Storage(graph, compiler, readers, softmaxes, last).roots()


def last_reads(graph: Graph, roots: Sequence[frozenset[int]]) -> dict[int, int]:
    """For each buffer the index of the last operation that reads it, else of its maker."""
    last: dict[int, int] = {}
    for index, op in enumerate(graph.operations):
        for v in op.inputs:
            for root in roots[v]:
                last[root] = index
        for v in op.outputs:
            if v in roots[v]:
                last.setdefault(v, index)
    return last


@dataclass(frozen=True)
class _Storage:
    """One pass over a program.

    Attributes:
        graph: The program.
        compiler: What compiles it.
        readers: For each value the operations that read it, directly or through views.
        softmaxes: From products that are not written to the exponentials that are instead.
        last: For each buffer the last operation that reads it, as far as that is known.
    """

    graph: Graph
    compiler: Compiler
    readers: Sequence[Sequence[Operation]]
    softmaxes: Mapping[int, int]
    last: Mapping[int, int]

    def roots(self) -> list[frozenset[int]]:
        """For each value the buffers it is read from."""
        graph, compiler = self.graph, self.compiler
        outputs = {v for v in graph.outputs if v is not None}
        written = outputs.union(self.softmaxes.values())
        roots = [frozenset({i}) for i in range(len(graph.values))]
        heavy: set[int] = set()  # of what is not written: what its readers would compute again
        converted: dict[tuple[int, str], int] = {}  # equal ones are one: the first that is written
        for op in graph.operations:
            below = frozenset[int]().union(*(roots[v] for v in op.inputs))
            if op.primitive == BARRIER:
                for v, handed_on in zip(op.outputs, op.inputs, strict=True):
                    roots[v] = roots[handed_on]
                continue
            of_heavy = compiler.backend.fusion.shares_what_is_heavy and not heavy.isdisjoint(
                op.inputs
            )
            is_heavy = compiler.is_heavy(op) or of_heavy
            for v in op.outputs:
                if op.primitive in VIEWS:
                    roots[v] = roots[op.inputs[0]] if op.inputs else frozenset()
                elif (
                    op.primitive in FREE
                    or v in self.softmaxes
                    or (
                        compiler.is_elementwise(op)
                        and v not in written
                        and self._is_fused_away(v, below, is_heavy=is_heavy)
                    )
                ):
                    roots[v] = below
                if is_heavy and v not in roots[v]:
                    heavy.add(v)
            if op.primitive == "convert_element_type" and op.inputs:
                (v,) = op.outputs
                conversion = op.inputs[0], graph.values[v].dtype
                if v in roots[v]:
                    converted.setdefault(conversion, v)
                roots[v] = roots[converted.get(conversion, v)]
        return roots

    def _is_fused_away(self, value: int, below: frozenset[int], *, is_heavy: bool) -> bool:
        """Whether XLA would compute the value inside its readers instead of writing it out."""
        readers = self.readers[value]
        if not all(self.compiler.fuses_inputs(reader) for reader in readers):
            return False
        if len(readers) <= 1:
            return True
        if is_heavy:
            return False
        sizes = self.graph.values
        large = [root for root in below if sizes[root].bytes >= sizes[value].bytes]
        if len(large) > _MOST_READ:
            return False
        read = self.last.get(value, math.inf)
        return len(large) <= 1 or all(self.last.get(root, -1) >= read for root in large)


def _readers_through_views(graph: Graph) -> list[list[Operation]]:
    """Operations that read a value, directly or through views of it."""
    readers: list[list[Operation]] = [[] for _ in graph.values]
    for op in graph.operations:
        for v in set(op.inputs):
            readers[v].append(op)
    seen: list[list[Operation]] = [[] for _ in graph.values]
    for op in reversed(graph.operations):
        for v in op.outputs:
            for reader in readers[v]:
                if reader.primitive in VIEWS:
                    seen[v].extend(seen[reader.outputs[0]])
                else:
                    seen[v].append(reader)
    return seen


def _softmaxes(
    graph: Graph, compiler: Compiler, readers: Sequence[Sequence[Operation]]
) -> dict[int, int]:
    """From products that nothing but a softmax reads to the wider exponentials made of them."""
    outputs = {v for v in graph.outputs if v is not None}

    def exponential(product: int) -> int | None:
        """The one of a product that is masked in a wider type; None if it is read otherwise."""
        size = graph.values[product].bytes
        exponentials, met, seen, todo = set[int](), set[str](), {product}, [product]
        while todo:
            value = todo.pop()
            if value in outputs:
                return None
            for reader in readers[value]:
                result = reader.outputs[0]
                if reader.primitive == "exp":
                    exponentials.add(result)
                elif compiler.is_elementwise(reader):
                    todo += {result} - seen
                    seen.add(result)
                    if graph.values[result].bytes > size:
                        met.add(reader.primitive)
                elif reader.primitive != "reduce_max":
                    return None
        if len(exponentials) != 1 or "select_n" not in met:
            return None
        (result,) = exponentials
        reading = {reader.primitive for reader in readers[result]}
        return result if "reduce_sum" in reading and len(reading) > 1 else None

    products = (op.outputs[0] for op in graph.operations if op.primitive in MATMULS)
    pairs = ((product, exponential(product)) for product in products)
    return {product: exp for product, exp in pairs if exp is not None}
