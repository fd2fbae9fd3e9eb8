"""Gradients of weights in backward loops: which of an iteration's are not put off to its end.

XLA:GPU computes them when it likes, and what they are made from stays in memory: in a Transformer
those of the MLP wait until the attention's backward pass is over, which is where an iteration needs
most. Where that would raise an iteration's peak, such a gradient shares a barrier with the next
operand of a product on the way to the iteration's cotangents. The others are left alone, so that
XLA may compute several in one kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jdelta._src import _jax
from jdelta._src._jax import Eqn, Jaxpr, Var
from jdelta._src._jax.sharding import Shardings
from jdelta._src.backends.backend import Backend
from jdelta._src.estimate.buffers import Compiler, storage
from jdelta._src.estimate.memory import iteration, stored_sizes
from jdelta._src.passes.weight_gradients import is_backward_loop
from jdelta._src.program.graph import Graph, graph_of
from jdelta._src.program.primitives import LOOPS, MATMULS
from jdelta._src.program.scan import operands_on_path

TOLERANCE = 1.01
"""Times its least that the peak of an iteration may be."""


def with_gradients_in_place(program: Jaxpr, backend: Backend, shardings: Shardings) -> Jaxpr:
    """A flat program with such gradients tied in the bodies of its backward loops, if any."""
    inner = _jax.open_jaxpr(program)
    eqns = [
        _with_ties(eqn, Compiler(backend), shardings) if is_backward_loop(eqn) else eqn
        for eqn in inner.eqns
    ]
    if all(new_eqn is eqn for new_eqn, eqn in zip(eqns, inner.eqns, strict=True)):
        return program
    return _jax.rebuild(program, eqns, inner.outvars)


def _with_ties(loop: Eqn, compiler: Compiler, shardings: Shardings) -> Eqn:
    """A backward loop with the gradients tied that would raise the peak of an iteration."""
    n_consts, n_carry = _jax.scan_counts(loop.params)
    staged = loop.params["jaxpr"]
    body = _jax.with_outputs(_jax.inline(staged), [True] * len(loop.outvars))
    eqns = _jax.open_jaxpr(body).eqns
    path = operands_on_path(body, n_consts, n_carry)
    stops = [(i, v) for i, eqn in enumerate(eqns) for v in eqn.outvars if v in path]
    products = [i for i, eqn in enumerate(eqns) if eqn.primitive.name in MATMULS]
    kept = _Iteration.of(graph_of(staged, shardings), n_consts, n_carry, compiler)
    if _jax.consts_of(body) or len(kept.products) != len(products):  # some in calls: as it is
        return loop
    following = {
        number: next_stop
        for number, index in enumerate(products)
        if (next_stop := next((stop for stop in stops if stop[0] > index), None))
    }
    ties: dict[int, list[Var]] = {}
    for number in kept.early(following.keys()):
        stop, value = following[number]
        ties.setdefault(stop, [value]).append(eqns[products[number]].outvars[0])
    if not ties:
        return loop
    tied = _jax.with_barriers(body, {index: [values] for index, values in ties.items()})
    return loop.replace(params={**loop.params, "jaxpr": tied})


@dataclass(frozen=True)
class _Iteration:
    """What an iteration keeps in memory.

    Attributes:
        live: Bytes alive while each operation runs.
        products: For each product, in program order, the buffers that it reads if nothing but
            results of the iteration are made of it; else none.
        last: For each buffer the last place at which it is read.
        sizes: For each buffer its bytes.
    """

    live: np.ndarray[tuple[int], np.dtype[np.int64]]
    products: Sequence[Collection[int]]
    last: Mapping[int, int]
    sizes: Sequence[int]

    @classmethod
    def of(cls, body: Graph, consts: int, carry: int, compiler: Compiler) -> _Iteration:
        """Simulate the body of a loop with so many constants and carried values."""
        line = iteration(body, consts, carry, compiler)
        roots = storage(line.graph, compiler)
        ends, inputs = _ends(body), set(body.initial_values)
        products = [
            {r for v in op.inputs for r in roots[v]} - inputs if id(op) in ends else set[int]()
            for op in body.operations
            if op.primitive in MATMULS
        ]
        return cls(np.array(line.live), products, line.last, stored_sizes(body, compiler))

    def early(self, may: Collection[int]) -> list[int]:
        """Which of some products (by number) have to be in place for the peak to stay."""
        delayed_products = {number for number in may if self.products[number]}
        early_products: list[int] = []
        limit = TOLERANCE * self.live.max(initial=0)
        while delayed_products:
            grown = self.live.copy()
            for buffer in {r for number in delayed_products for r in self.products[number]}:
                grown[self.last[buffer] + 1 :] += self.sizes[buffer]
            peak = int(grown.argmax())
            if grown[peak] <= limit:
                break
            worst = max(
                delayed_products, key=lambda number: (self._bytes_held(number, peak), number)
            )
            delayed_products.remove(worst)
            early_products.append(worst)
        return sorted(early_products)

    def _bytes_held(self, number: int, place: int) -> int:
        """Bytes that a product holds at a place if it is put off."""
        read = self.products[number]
        return sum(self.sizes[buffer] for buffer in read if self.last[buffer] < place)


def _ends(body: Graph) -> set[int]:
    """Operations (their ids) that no product or loop depends on."""
    needed: set[int] = set()
    ends: set[int] = set()
    for op in reversed(body.operations):
        if needed.isdisjoint(op.outputs):
            ends.add(id(op))
        if op.primitive in MATMULS | LOOPS or id(op) not in ends:
            needed.update(op.inputs)
    return ends
