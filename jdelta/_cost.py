"""Roofline seconds of operations: the larger of arithmetic and memory traffic.

Matrix products and convolutions are priced by their floating-point operations at the rate of
their dtype, everything else by the bytes it moves and a rough count of operations per element. A
value that is fused into its readers is not written, so a fused element-wise chain pays for its
outer inputs and its result once. What devices send each other is added: nothing hides it here.
Of a whole program it also counts which reads are one, and what loops move for stacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.lax import Precision

from jdelta._chips import Rates, product_kind
from jdelta._collective import collective_seconds, contracted
from jdelta._fusion import Compiler, storage
from jdelta._graph import BARRIER, RESHARD, TRANSFER, Graph, Operation, graph_of
from jdelta._primitives import BITS, CHEAP, FREE, MATMULS, RANDOM, VIEWS
from jdelta._shardy import parts
from jdelta._traffic import moved_bytes, read_along, stacked_bytes

_RULES: dict[str, Callable[[Graph, Operation], float]] = {}


def _rule(*primitives: str) -> Callable[[Any], Any]:
    def register(fun: Callable[[Graph, Operation], float]) -> Any:
        _RULES.update(dict.fromkeys(primitives, fun))
        return fun

    return register


@_rule("dot_general")
def _dot(graph: Graph, op: Operation) -> float:
    (contracting, _), _ = op.params["dimension_numbers"]
    left, result = (graph.values[v] for v in (op.inputs[0], op.outputs[0]))
    multiplies = math.prod(left.shape[i] for i in contracting) * math.prod(result.shape)
    # What is summed over an axis may be scattered over it afterwards: it divides the work once.
    axes = {*(axis for axes in result.spec for axis in axes), *contracted(graph, op)}
    return 2.0 * multiplies / parts(tuple(axes))


@_rule("conv_general_dilated")
def _convolution(graph: Graph, op: Operation) -> float:
    kernel = graph.values[op.inputs[-1]].shape
    out_features = kernel[op.params["dimension_numbers"].rhs_spec[0]]
    multiplies = math.prod(kernel) / out_features  # kernel already holds in / groups features
    return 2.0 * multiplies * _elements(graph, op.outputs[:1])


@_rule("sort", "top_k", "approx_top_k")
def _sort(graph: Graph, op: Operation) -> float:
    elements = _elements(graph, op.inputs)
    return elements * math.log2(max(2.0, elements))


@_rule("fft")
def _fft(graph: Graph, op: Operation) -> float:
    length = math.prod(op.params["fft_lengths"])
    return 5.0 * _elements(graph, op.outputs) * math.log2(max(2, length))


@_rule("cholesky", "lu", "qr", "eigh", "eig", "svd", "geqrf", "householder_product")
def _linear_algebra(graph: Graph, op: Operation) -> float:
    shape = graph.values[op.inputs[0]].local
    return 2.0 * math.prod(shape) * shape[-1]


@_rule(RESHARD)
def _reshard(*_: Any) -> float:
    return 0.0  # only sent about


@_rule("triangular_solve", "custom_linear_solve", "tridiagonal_solve")
def _solve(graph: Graph, op: Operation) -> float:
    """As many products as a matrix times the right-hand sides: one triangle or two."""
    return 2.0 * _elements(graph, op.outputs) * graph.values[op.inputs[0]].local[-1]


@_rule("dot_product_attention_fwd_wrapper")
def _attention(graph: Graph, op: Operation) -> float:
    """cuDNN's: two products of every query with every key, half of them behind a causal mask."""
    queries, keys = (graph.values[v].local for v in op.inputs[:2])
    rows = 1 if op.params["layout"] == 0 else 2  # BTNH or BNTH
    causal = "CAUSAL" in str(op.params["mask_type"])
    return (2.0 if causal else 4.0) * math.prod(queries) * keys[rows]


@_rule("dot_product_attention_bwd_wrapper")
def _attention_backward(graph: Graph, op: Operation) -> float:
    return 2.5 * _attention(graph, op)  # five products instead of two


_NOTHING = VIEWS | FREE | {BARRIER, TRANSFER}
"""Take no time; transfers are priced by the link, elsewhere."""

_ATTENTION = frozenset(f"dot_product_attention_{way}_wrapper" for way in ("fwd", "bwd"))
"""cuDNN's, which run on the matrix unit."""

_REFERENCES = frozenset("get swap addupdate program_id num_programs".split())
"""What a kernel reads and writes its blocks with: counted with its operands."""


def _elements(graph: Graph, values: Sequence[int]) -> float:
    return float(sum(math.prod(graph.values[v].local) for v in values))


def operation_seconds(
    graph: Graph,
    op: Operation,
    roots: Sequence[frozenset[int]],
    rates: Rates,
    platform: str,
    there: frozenset[int] = frozenset(),
) -> float:
    """Seconds of one execution of an operation on one device.

    Args:
        graph: The program the operation is part of.
        op: The operation.
        roots: For each value the buffers it is read from, as ``storage`` gives them.
        rates: Rates of the target.
        platform: Platform of the target.
        there: Buffers that it need not read, as it runs along with what does.
    """
    if op.body is not None:
        return _loop_seconds(op, op.body, rates, platform)
    if op.primitive in _NOTHING:
        return 0.0
    moved = moved_bytes(graph, op, roots, there) / rates.bandwidth
    arithmetic = _arithmetic(graph, op, rates, Compiler(platform))
    return max(arithmetic, moved) + collective_seconds(graph, op, rates)


def _loop_seconds(op: Operation, body: Graph, rates: Rates, platform: str) -> float:
    """Seconds of all iterations of a loop, or of a branch."""
    compiler = Compiler(platform)
    roots = storage(body, compiler)
    stacked = stacked_bytes(op, body, roots, compiler) / rates.bandwidth
    return op.trips * (stacked + sum(_each(body, roots, rates, platform)))


def _arithmetic(graph: Graph, op: Operation, rates: Rates, compiler: Compiler) -> float:
    """Seconds of the operations of a single execution."""
    if op.primitive == "pallas_call":
        return _kernel(op, rates, compiler)
    if op.primitive in BITS:
        each = compiler.bits_work(rbg="rbg" in graph.values[op.inputs[0]].dtype)
        return each * _elements(graph, op.outputs[:1]) / rates.integer
    rule = _RULES.get(op.primitive)
    work = rule(graph, op) if rule else _default_work(graph, op)
    if op.primitive in MATMULS | _ATTENTION:
        return work / rates.flops(_product_kind(graph, op))
    return work / (rates.integer if op.primitive in RANDOM else rates.vector)


def _product_kind(graph: Graph, op: Operation) -> str:
    """The kind of matrix product that an operation is, by its first operand."""
    asked = op.params.get("precision")
    first = asked[0] if isinstance(asked, tuple) else asked  # JAX gives each operand one
    precision = first.name.lower() if isinstance(first, Precision) else "default"
    return product_kind(graph.values[op.inputs[0]].dtype, precision)


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
    """Seconds of the operations in the body of a kernel."""
    seconds = 0.0
    for op in body.operations:
        if op.body is not None:
            seconds += op.trips * _inside(op.body, rates, compiler)
        elif op.primitive not in _NOTHING | _REFERENCES:
            seconds += _arithmetic(body, op, rates, compiler)
    return seconds


def _default_work(graph: Graph, op: Operation) -> float:
    """Operations: one an element if cheap, else some ten; unknown kernels read each input often."""
    return (1.0 if op.primitive in CHEAP else 10.0) * _elements(graph, (*op.inputs, *op.outputs))


def each_seconds(graph: Graph, rates: Rates, platform: str) -> list[float]:
    """Seconds of each operation of a whole program, one after the other, nothing overlapped."""
    return _each(graph, storage(graph, Compiler(platform)), rates, platform)


def _each(
    graph: Graph, roots: Sequence[frozenset[int]], rates: Rates, platform: str
) -> list[float]:
    along = read_along(graph, roots, Compiler(platform))
    return [
        operation_seconds(graph, op, roots, rates, platform, along.get(index, frozenset()))
        for index, op in enumerate(graph.operations)
    ]


def program_seconds(graph: Graph, rates: Rates, platform: str) -> float:
    """Seconds of a whole program, operation after operation, nothing overlapped."""
    return sum(each_seconds(graph, rates, platform))
