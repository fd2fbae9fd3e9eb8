"""Operations that one execution of a primitive takes, and the unit of the device that does them.

A primitive of a newer JAX belongs into the class of ``program/primitives.py`` that compilers treat
it like, or here into ``_MOVED``, ``_NOTHING``, ``_EACH``, ``_CALLS`` or a rule. What is in none of
them (a kernel that JAX does not know, a callback) takes ten operations an element.

Factorizations take what LAPACK's do (Golub and Van Loan, "Matrix Computations", 4th edition),
special functions what XLA makes of them (``compiled.cost_analysis()``; loops in them run until they
have converged, for which a usual number is taken).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from jdelta._src import _jax
from jdelta._src._jax import Jaxpr
from jdelta._src._jax.sharding import parts
from jdelta._src.backends.chips import multiply_add_flops
from jdelta._src.estimate.collectives import COLLECTIVES, contracted
from jdelta._src.program.graph import BARRIER, RESHARD, TRANSFER, Graph, Operation
from jdelta._src.program.primitives import (
    CHEAP,
    EXPENSIVE,
    FREE,
    LOOPS,
    RANDOM,
    SUMS,
    VIEWS,
)
from jdelta._src.program.windows import taps_inside

Unit: TypeAlias = Literal["matrix", "vector", "integer"]


@dataclass(frozen=True)
class Work:
    """What an operation takes beside the bytes that it moves.

    Attributes:
        operations: How many: FLOPs on the matrix and vector units, else operations on integers.
        unit: What does them.
    """

    operations: float
    unit: Unit = "vector"


_Rule: TypeAlias = Callable[[Graph, Operation], float]

_RULES: dict[str, tuple[str, Unit, _Rule]] = {}
"""From a primitive to what it is called, the unit that runs it, and its operations."""


def _rule(kind: str, *primitives: str, unit: Unit = "vector") -> Callable[[_Rule], _Rule]:
    def register(fun: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(primitives, (kind, unit, fun)))
        return fun

    return register


_NOTHING = frozenset(
    f"{BARRIER} {TRANSFER} after_all axis_index check custom_lin dce_sink debug_callback"
    " debug_print empty2 empty_ref free_ref freeze from_edtype inspect_sharding layout_constraint"
    " log_extend log_read new_box new_log new_ref platform_index preduced program_order"
    " random_clone reduced_vary_cast reduced_vary_cast_p relayout shard_alike stage tie to_edtype"
    " unreachable vary_unreduced_cast vary_unreduced_cast_p xla_metadata_value zeros_like".split()
)
"""Take no time; transfers are priced by the link, elsewhere."""

_MOVED = COLLECTIVES | frozenset(
    f"{RESHARD} box_get box_set concatenate dynamic_update_slice gather get scatter stack swap tile"
    " lu_pivots_to_permutation".split()
)
"""Bytes that go elsewhere, in this memory or another device's."""

_CALLS = frozenset(
    "call call_hi_primitive call_hi_primitive_linearized closed_call composite compute_on"
    " core_call cond custom_jvp_call custom_jvp_call_jaxpr custom_partitioning custom_vjp_call"
    " custom_vmap_call eval_jaxpr jit linear_call remat2 remat_opt shard_map"
    f" xla_metadata_call {_jax.REGION}".split()
)
"""Cost what the programs in their parameters do: of several, what the dearest one does."""

_EACH: Mapping[str, float] = {
    "asin": 25.0,
    "asinh": 40.0,
    "acos": 25.0,
    "acosh": 45.0,
    "atanh": 30.0,
    "sinh": 40.0,
    "cosh": 40.0,
    "erf_inv": 60.0,
    "bessel_i0e": 90.0,
    "bessel_i1e": 90.0,
    "digamma": 105.0,
    "lgamma": 180.0,
    "zeta": 240.0,
    "polygamma": 460.0,
    "igamma": 900.0,
    "igammac": 900.0,
    "igamma_grad_a": 1100.0,
    "random_gamma": 2000.0,
    "regularized_incomplete_beta": 700.0,
}
"""Operations for an element of the result, where it is neither one nor about twenty."""


# Products


@_rule("matrix product", "dot_general", "scaled_dot", unit="matrix")
def _dot(graph: Graph, op: Operation) -> float:
    (contracting, _), _ = op.params["dimension_numbers"]
    left, result = (graph.values[v] for v in (op.inputs[0], op.outputs[0]))
    multiplies = math.prod(left.shape[i] for i in contracting) * math.prod(result.shape)
    # What is summed over an axis may be scattered over it afterwards: it divides the work once.
    axes = {*(axis for axes in result.spec for axis in axes), *contracted(graph, op)}
    return multiply_add_flops(left.dtype) * multiplies / parts(tuple(axes))


@_rule("ragged product", "ragged_dot_general", unit="matrix")
def _ragged_dot(graph: Graph, op: Operation) -> float:
    """Each row of the left operand meets one group's matrix, whichever dimension is ragged.

    If that is a contracted one, each group has a result of its own, of the rows that are its own.
    """
    numbers = op.params["ragged_dot_dimension_numbers"]
    (_, contracting), (_, batch) = numbers.dot_dimension_numbers
    left, right = (graph.values[v] for v in op.inputs[:2])
    met = {*contracting, *batch, *numbers.rhs_group_dimensions}
    columns = math.prod(n for i, n in enumerate(right.local) if i not in met)
    return multiply_add_flops(left.dtype) * math.prod(left.local) * columns


@_rule("matrix product", "scaled_matmul_wrapper", unit="matrix")
def _scaled_matmul(graph: Graph, op: Operation) -> float:
    """cuDNN's: (batch, m, k) by (batch, n, k)."""
    return 2.0 * _size(graph, op.outputs) * graph.values[op.inputs[0]].local[-1]


@_rule("product with itself", "symmetric_product", unit="matrix")
def _symmetric_product(graph: Graph, op: Operation) -> float:
    """One triangle of it, and the other one copied."""
    return math.prod(graph.values[op.outputs[0]].local) * graph.values[op.inputs[0]].local[-1]


@_rule("convolution", "conv_general_dilated", unit="matrix")
def _convolution(graph: Graph, op: Operation) -> float:
    """What falls on padding or between dilated elements left out."""
    numbers = op.params["dimension_numbers"]
    image, kernel = (graph.values[v] for v in (op.inputs[0], op.inputs[-1]))
    result = graph.values[op.outputs[0]]
    taps = math.prod(
        taps_inside(
            image.shape[i],
            kernel.shape[k],
            result.shape[o],
            stride=op.params["window_strides"][axis],
            dilation=op.params["lhs_dilation"][axis],
            spacing=op.params["rhs_dilation"][axis],
            padding=op.params["padding"][axis][0],
        )
        for axis, (i, k, o) in enumerate(
            zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
        )
    )
    batch, features = (result.shape[i] for i in numbers.out_spec[:2])
    # The kernel holds in / groups features already.
    multiplies = batch * features * kernel.shape[numbers.rhs_spec[1]] * taps
    share = math.prod(result.local) / max(1, math.prod(result.shape))
    return multiply_add_flops(image.dtype) * multiplies * share


@_rule("attention", "dot_product_attention_fwd_wrapper", unit="matrix")
def _attention(graph: Graph, op: Operation) -> float:
    """cuDNN's: two products of every query with every key, half of them behind a causal mask."""
    queries, keys = (graph.values[v].local for v in op.inputs[:2])
    rows = 1 if op.params["layout"] == 0 else 2  # BTNH or BNTH
    causal = "CAUSAL" in str(op.params["mask_type"])
    return (2.0 if causal else 4.0) * math.prod(queries) * keys[rows]


@_rule("attention", "dot_product_attention_bwd_wrapper", unit="matrix")
def _attention_backward(graph: Graph, op: Operation) -> float:
    return 2.5 * _attention(graph, op)  # five products instead of two


# Windows, sums, sorts and transforms


@_rule(
    "window",
    "reduce_window",
    "reduce_window_sum",
    "reduce_window_max",
    "reduce_window_min",
    "select_and_gather_add",
)
def _pooling(graph: Graph, op: Operation) -> float:
    """As many as the window has elements, for each of its positions."""
    return _size(graph, op.outputs) * math.prod(op.params["window_dimensions"])


@_rule("window", "select_and_scatter", "select_and_scatter_add")
def _unpooling(graph: Graph, op: Operation) -> float:
    """Each position of the window, one for each element of the source, is searched again."""
    return _size(graph, op.inputs[:1]) * math.prod(op.params["window_dimensions"])


@_rule("prefix sum", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _prefixes(graph: Graph, op: Operation) -> float:
    """As a tree, up and down again: two for an element; those of exponentials take thirty."""
    each = 60.0 if op.primitive == "cumlogsumexp" else 2.0
    return each * _size(graph, op.outputs)


@_rule("sort", "sort")
def _sort(graph: Graph, op: Operation) -> float:
    """Comparisons of the first ``num_keys`` operands, moves of all of them."""
    length = graph.values[op.inputs[0]].local[op.params["dimension"]]
    return _size(graph, op.inputs) * _log2(length)


@_rule("selection", "top_k")
def _top_k(graph: Graph, op: Operation) -> float:
    """Every element goes through a heap of the best ones."""
    return _size(graph, op.inputs) * _log2(op.params["k"])


@_rule("selection", "approx_top_k")
def _approximate_top_k(graph: Graph, op: Operation) -> float:
    """One pass that keeps the best of each bin, and a sort of the bins (arXiv 2206.14286)."""
    return 2.0 * _size(graph, op.inputs[:1])


def _log2(count: int) -> float:
    return math.log2(max(2, count))


@_rule("Fourier transform", "fft")
def _fft(graph: Graph, op: Operation) -> float:
    """5 n log n for complex values, half of it where one side is real."""
    length = math.prod(op.params["fft_lengths"])
    sides = (graph.values[v] for v in (op.inputs[0], op.outputs[0]))
    sizes = [math.prod(side.local) * (1.0 if "complex" in side.dtype else 0.5) for side in sides]
    return 5.0 * min(sizes) * _log2(length)


@_rule("reduction", "reduce")
def _reduce(graph: Graph, op: Operation) -> float:
    """What is said to make one of two, for each element."""
    elements = _size(graph, op.inputs[:1])
    return elements * max(1, len(_jax.open_jaxpr(op.params["jaxpr"]).eqns))


@_rule("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def _scatter(graph: Graph, op: Operation) -> float:
    return _size(graph, op.inputs[-1:])


@_rule("addition in place", "addupdate", "accum_grad_in_ref")
def _add_in_place(graph: Graph, op: Operation) -> float:
    return _size(graph, op.inputs[1:2])


# Matrices of (..., m, n) with m >= n


def _matrices(graph: Graph, op: Operation) -> tuple[float, float, float]:
    """How many there are, and the longer and the shorter side of each."""
    *many, rows, columns = graph.values[op.inputs[0]].local
    return float(math.prod(many)), float(max(rows, columns)), float(min(rows, columns))


def _real(graph: Graph, op: Operation) -> float:
    """FLOPs of real numbers in one."""
    return multiply_add_flops(graph.values[op.inputs[0]].dtype) / 2.0


_FACTORIZATIONS: Mapping[str, Callable[[float, float], float]] = {
    "cholesky": lambda m, n: n**3 / 3,
    "cholesky_update": lambda m, n: 6 * n**2,
    "lu": lambda m, n: m * n**2 - n**3 / 3,
    "qr": lambda m, n: 4 * m * n**2 - 4 * n**3 / 3,
    "geqrf": lambda m, n: 2 * m * n**2 - 2 * n**3 / 3,
    "geqp3": lambda m, n: 2 * m * n**2 - 2 * n**3 / 3,
    "householder_product": lambda m, n: 2 * m * n**2 - 2 * n**3 / 3,
    "tridiagonal": lambda m, n: 4 * n**3 / 3,
    "hessenberg": lambda m, n: 10 * n**3 / 3,
    "schur": lambda m, n: 25 * n**3,
    "eigh": lambda m, n: 9 * n**3,
    "eig": lambda m, n: 25 * n**3,
    "svd": lambda m, n: 14 * m * n**2 + 8 * n**3,
}
"""FLOPs for a real m x n matrix, vectors included."""


@_rule("factorization", *_FACTORIZATIONS)
def _factorization(graph: Graph, op: Operation) -> float:
    many, m, n = _matrices(graph, op)
    return _real(graph, op) * many * _FACTORIZATIONS[op.primitive](m, n)


@_rule("factorization", "ormqr")
def _reflections(graph: Graph, op: Operation) -> float:
    """Each of the reflections goes over the whole other matrix: four for an element."""
    reflections = graph.values[op.inputs[0]].local[-1]
    return 4.0 * _real(graph, op) * reflections * _size(graph, op.outputs)


@_rule("solution", "triangular_solve")
def _triangular_solve(graph: Graph, op: Operation) -> float:
    """As many as the product of the square matrix with the right-hand sides, zeros included."""
    matrix = graph.values[op.inputs[0]]
    return multiply_add_flops(matrix.dtype) * _size(graph, op.outputs) * matrix.local[-1]


@_rule("solution", "tridiagonal_solve")
def _tridiagonal_solve(graph: Graph, op: Operation) -> float:
    return 8.0 * _size(graph, op.outputs)


def _size(graph: Graph, values: Sequence[int]) -> float:
    return float(sum(math.prod(graph.values[v].local) for v in values))


def work(graph: Graph, op: Operation) -> Work:
    """What one execution of an operation takes, the bytes that it moves left out.

    Args:
        graph: What it stands in.
        op: The operation; neither a loop nor random bits, which ask for what runs them.
    """
    name = op.primitive
    if name in _RULES:
        _, unit, rule = _RULES[name]
        return Work(rule(graph, op), unit)
    if name in VIEWS | FREE | _NOTHING | _MOVED:
        return Work(0.0)
    if name in _EACH:
        return Work(_EACH[name] * _size(graph, op.outputs))
    each = 1.0 if name in CHEAP or name in SUMS else 10.0
    elements = _size(graph, (*op.inputs, *op.outputs))
    return Work(each * elements, "integer" if name in RANDOM else "vector")


def programs(op: Operation) -> Sequence[Jaxpr]:
    """The programs in an operation's parameters, the dearest of which is what it does."""
    if op.primitive == "custom_linear_solve":
        return (op.params["jaxprs"].solve,)
    return tuple(_jax.programs_in(op.params)) if op.primitive in _CALLS else ()


def is_free(op: Operation) -> bool:
    """Whether an operation takes no time at all: it names, groups or waits for values."""
    return op.primitive in VIEWS or op.primitive in FREE or op.primitive in _NOTHING


def how_priced(primitive: str) -> str | None:
    """By which kind of rule a primitive is priced; ``None`` where it is by none.

    >>> how_priced("dot_general"), how_priced("tanh"), how_priced("somebody_elses_kernel")
    ('matrix product', 'element by element', None)
    """
    if primitive in _RULES:
        return _RULES[primitive][0]
    kinds = {
        "nothing": VIEWS | FREE | _NOTHING,
        "bytes moved": _MOVED,
        "its programs": _CALLS | LOOPS | {"custom_linear_solve"},
        "random bits": RANDOM,
        "its kernel": {"pallas_call"},
        "reduction": SUMS,
        "element by element": CHEAP | EXPENSIVE | _EACH.keys(),
    }
    return next((kind for kind, names in kinds.items() if primitive in names), None)
