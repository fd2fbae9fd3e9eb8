"""The gradient of a pooled maximum is scattered into zeros of its own.

XLA:GPU makes a scatter of it, into an array of zeros. It finds that a ``relu`` of the same shape
compares with such an array too, makes one for both, and keeps it from the first ``relu`` to the end
of the backward pass (``tests/passes/test_pooled_gradients.py``). A zero behind a barrier is no
other's, so its array lives as long as the scatter. Where what is pooled is padded, the zeros are
larger than what a ``relu`` reads, and no other's as they are.
"""

from __future__ import annotations

from jdelta._src import _jax
from jdelta._src._jax import Eqn
from jdelta._src.passes.program import Context, Program


def with_own_zeros(program: Program, context: Context) -> Program:
    """The program with a zero behind a barrier for each gradient of a pooled maximum."""
    if not context.backend.passes.own_zeros:
        return program
    flat = program.flat
    changed = _jax.with_replaced(flat, _scatters, _jax.scattered_into_own_zeros)
    return program if changed is flat else program.rewritten(changed)


def _scatters(eqn: Eqn) -> bool:
    """Whether an equation is scattered into zeros of the shape of what was pooled."""
    if eqn.primitive.name != "select_and_scatter_add":
        return False
    return not any(map(any, eqn.params["padding"]))
