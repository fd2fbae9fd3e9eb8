"""Which product of a step makes the logits: it makes much more than it reads of the tokens.

Tokens are in its first operand, ``hidden @ weights``, or in its second, where only the first is
given: ``jnp.einsum("vd,btd->btv", weights, hidden)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from jdelta._src import _jax
from jdelta._src._jax import Jaxpr
from jdelta._src.program.graph import Graph, Value
from jdelta._src.regions.modules import PASSED_ON

MANY = 4
"""Times as much as it reads a product must make to be a head."""


@dataclass(frozen=True)
class LargeHead:
    """The last product of a step that makes much more than it reads of the tokens.

    Attributes:
        bytes: Of what it makes, on one device.
        tokens: How many there are.
    """

    bytes: int
    tokens: int


def large_head(graph: Graph) -> LargeHead | None:
    """The head of a step, as far as the size of its product tells.

    Returns:
        None without one, and where tokens are cut over devices: a piece would be gathered.
    """
    product: tuple[Value, Value, list[int]] | None = None
    for body in _around_gradients(graph):
        ops = body.operations
        same = {
            op.outputs[0]: op.inputs[0] for op in ops if op.primitive in PASSED_ON and op.inputs
        }
        computed = {v for op in ops for v in op.outputs}
        for op in ops:
            if op.primitive != "dot_general" or op.backward or len(op.inputs) < 2:
                continue
            operand = _tokens(op.inputs, same, computed)
            logits, read = body.values[op.outputs[0]], body.values[op.inputs[operand]]
            if logits.bytes >= MANY * read.bytes > 0:
                product = logits, read, free_axes(op.params, operand, len(read.shape))
    if product is None:
        return None
    logits, read, free = product
    if any(read.local[i] != read.shape[i] for i in free):
        return None
    return LargeHead(logits.bytes, math.prod(read.shape[i] for i in free))


def _around_gradients(graph: Graph) -> Iterator[Graph]:
    """A step, and the bodies of loops in it that no derivative goes through: micro-batches."""
    yield graph
    for op in graph.operations:
        if op.primitive == "scan" and not (op.differentiated or op.backward):
            for body in op.bodies:
                yield from _around_gradients(body)


def _tokens(operands: Sequence[Any], same: Mapping[Any, Any], computed: Set[Any]) -> int:
    """The operand of a product that tokens are in: the second where only the first is given.

    Args:
        operands: Both of them.
        same: From what is still the weight that it was made of to that.
        computed: All values that are computed.
    """

    def is_given(value: Any) -> bool:
        while value in same:
            value = same[value]
        return value not in computed

    first, second = map(is_given, operands)
    return int(first and not second)


def head_product(program: Jaxpr) -> tuple[int, int] | None:
    """The number of the product that makes the logits, and its operand that tokens are in.

    It is the last that makes much more than it reads of the tokens. Whether it is part of a model
    that goes on, ``head_of`` finds out.

    Returns:
        None without one.
    """
    eqns = _jax.open_jaxpr(program).eqns
    of_arrays = [(i, eqn) for i, eqn in enumerate(eqns) if all(map(_jax.is_var, eqn.invars))]
    passed_on = [e for _, e in of_arrays if e.primitive.name in PASSED_ON and e.invars]
    same = {e.outvars[0]: e.invars[0] for e in passed_on}
    computed = {v for eqn in eqns for v in eqn.outvars}
    product: tuple[int, int] | None = None
    for i, eqn in of_arrays:
        if eqn.primitive.name == "dot_general":
            operand = _tokens(eqn.invars, same, computed)
            read, logits = eqn.invars[operand], eqn.outvars[0]
            if _jax.bytes_of(logits) >= MANY * _jax.bytes_of(read) > 0:
                product = i, operand
    return product


def free_axes(params: Mapping[str, Any], operand: int, rank: int) -> list[int]:
    """The axes of an operand of a product that its result has, too, and the other has not."""
    contracting, batch = (numbers[operand] for numbers in params["dimension_numbers"])
    return [i for i in range(rank) if i not in contracting and i not in batch]
