"""Roofline seconds of operations: the larger of arithmetic and memory traffic.

What they compute is said in ``flops.py``, what they move in ``traffic.py``. A value that is
fused into its readers is not written, so a fused element-wise chain pays for its outer inputs and
its result once. What devices send each other is added: nothing hides it here.
Of a whole program it also counts which reads are one, and what loops move for stacks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jax.lax import Precision

from jdelta._src._jax import scan_counts
from jdelta._src.backends.backend import Backend
from jdelta._src.backends.chips import Rates, product_kind
from jdelta._src.estimate.buffers import Compiler, storage
from jdelta._src.estimate.collectives import collective_seconds
from jdelta._src.estimate.flops import is_free, programs, work
from jdelta._src.estimate.traffic import moved_bytes, spared_reads, stacked_bytes
from jdelta._src.program.graph import Graph, Operation, graph_of
from jdelta._src.program.primitives import BITS, MATMULS

_REFERENCES = frozenset("get swap addupdate program_id num_programs".split())
"""What a kernel reads and writes its blocks with: counted with its operands."""


def operation_seconds(
    graph: Graph,
    op: Operation,
    roots: Sequence[frozenset[int]],
    rates: Rates,
    backend: Backend,
    spared: frozenset[int] = frozenset(),
) -> float:
    """Seconds of one execution of an operation on one device.

    Args:
        graph: The program the operation is part of.
        op: The operation.
        roots: For each value the buffers it is read from, as ``storage`` gives them.
        rates: Rates of the target.
        backend: Compiler and devices of the target.
        spared: Buffers that it need not read: it runs along with what does, or changes a part of
            them in place.
    """
    if op.body is not None:
        return max(_loop_seconds(op, body, rates, backend) for body in op.bodies)
    if is_free(op):
        return 0.0
    moved = moved_bytes(graph, op, roots, spared) / rates.bandwidth
    compiler = Compiler(backend)
    arithmetic = _arithmetic(graph, op, rates, compiler)
    masked = compiler.masked_copies(graph, op) / rates.bandwidth
    return max(arithmetic, moved) + masked + collective_seconds(graph, op, rates)


def _loop_seconds(op: Operation, body: Graph, rates: Rates, backend: Backend) -> float:
    """Seconds of all iterations of a loop, or of a branch."""
    compiler = Compiler(backend)
    roots = storage(body, compiler)
    stacked = stacked_bytes(op, body, roots, compiler) / rates.bandwidth
    return op.trips * (stacked + sum(_each(body, roots, rates, backend, _carried(op, body))))


def _carried(op: Operation, body: Graph) -> Sequence[int]:
    """What the body of a loop is given that it may overwrite."""
    if op.primitive == "while":
        return body.inputs[op.params["body_nconsts"] :]
    if op.primitive != "scan":
        return ()
    consts, carry = scan_counts(op.params)
    return body.inputs[consts : consts + carry]


def _arithmetic(graph: Graph, op: Operation, rates: Rates, compiler: Compiler) -> float:
    """Seconds of the operations of a single execution."""
    if op.primitive == "pallas_call":
        return _kernel(op, rates, compiler)
    if op.primitive in BITS:
        elements = math.prod(graph.values[op.outputs[-1]].local)  # a new key comes before it
        return compiler.bits_work(rbg=_is_by_xla(graph, op)) * elements / rates.integer
    if bodies := programs(op):
        return max(_inside(graph_of(body), rates, compiler) for body in bodies)
    done = work(graph, op)
    if done.unit == "matrix":
        passes = compiler.ragged_groups(graph, op)
        return passes * done.operations / rates.flops(_product_kind(graph, op))
    return done.operations / (rates.integer if done.unit == "integer" else rates.vector)


def _is_by_xla(graph: Graph, op: Operation) -> bool:
    """Whether XLA's own generator makes random bits, not threefry written out."""
    if op.primitive.startswith("rng"):
        return "THREE_FRY" not in str(op.params.get("algorithm"))
    return "rbg" in graph.values[op.inputs[0]].dtype


def _product_kind(graph: Graph, op: Operation) -> str:
    """The kind of matrix product that an operation is: of its widest operand, as asked for."""
    operands = [graph.values[v].dtype for v in op.inputs[:2]]
    dtype = max(operands, key=lambda name: np.dtype(name).itemsize)
    asked: object = op.params.get("precision")
    first = asked[0] if isinstance(asked, tuple) else asked  # JAX gives each operand one
    name = str(getattr(first, "name", "default"))
    if isinstance(first, Precision):
        return product_kind(dtype, name.lower())
    return _BY_ALGORITHM.get(name, dtype)


_BY_ALGORITHM = {
    "F16_F16_F16": "float16",
    "F16_F16_F32": "float16",
    "BF16_BF16_BF16": "bfloat16",
    "BF16_BF16_F32": "bfloat16",
    "BF16_BF16_F32_X3": "float32 high",
    "BF16_BF16_F32_X6": "float32 highest",
    "BF16_BF16_F32_X9": "float32 highest",
    "TF32_TF32_F32_X3": "float32 high",
    "F32_F32_F32": "float32 highest",
    "F64_F64_F64": "float64",
}
"""What ``jax.lax.DotAlgorithmPreset`` makes of a product, where that is not its operands' own."""


def _kernel(op: Operation, rates: Rates, compiler: Compiler) -> float:
    """Seconds of a Pallas kernel: as its author says, else as its body does at each point."""
    body = graph_of(op.params["jaxpr"])
    said = op.params.get("cost_estimate")
    if said is not None:
        products = (o for o in body.operations if o.primitive in MATMULS)
        kinds = [_product_kind(body, o) for o in products]
        rate = rates.flops(kinds[0]) if kinds else rates.vector
        return max(said.flops / rate, 10.0 * said.transcendentals / rates.vector)
    points = math.prod(n for n in op.params["grid_mapping"].grid if isinstance(n, int))
    return points * _inside(body, rates, compiler)


def _inside(body: Graph, rates: Rates, compiler: Compiler) -> float:
    """Seconds of the operations in the body of a kernel, or of a program within an operation."""
    seconds = 0.0
    for op in body.operations:
        if op.body is not None:
            seconds += op.trips * _inside(op.body, rates, compiler)
        elif op.primitive not in _REFERENCES and not is_free(op):
            seconds += _arithmetic(body, op, rates, compiler)
    return seconds


def each_seconds(graph: Graph, rates: Rates, backend: Backend) -> list[float]:
    """Seconds of each operation of a whole program, one after the other, nothing overlapped."""
    return _each(graph, storage(graph, Compiler(backend)), rates, backend)


def _each(
    graph: Graph,
    roots: Sequence[frozenset[int]],
    rates: Rates,
    backend: Backend,
    own: Sequence[int] = (),
) -> list[float]:
    spared = spared_reads(graph, roots, Compiler(backend), own)
    return [
        operation_seconds(graph, op, roots, rates, backend, spared.get(index, frozenset()))
        for index, op in enumerate(graph.operations)
    ]


def program_seconds(graph: Graph, rates: Rates, backend: Backend) -> float:
    """Seconds of a whole program, operation after operation, nothing overlapped."""
    return sum(each_seconds(graph, rates, backend))
