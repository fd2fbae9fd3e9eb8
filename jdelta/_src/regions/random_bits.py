"""Masks of random bits are written to memory before anything reads them.

Left alone, a TPU's compiler may fuse the making of a dropout mask into the matrix product beside
it, and then writes out every constant that the bits are made with, as large as the mask: two layers
of GPT-2 in bfloat16 took 13 GiB instead of 3, with ``jax.checkpoint`` by hand too. A barrier
between the mask and its readers keeps the two apart. See ``benchmarks/compilers/recompute.py``.
Noise that a model is multiplied with, or that is added to it, is four times as large as a mask and
is left to the compiler: written, it took three layers from 174 MiB to 222.
"""

from __future__ import annotations

from collections.abc import Sequence

from jdelta._src import _jax
from jdelta._src._jax import Eqn, Jaxpr, Var
from jdelta._src.program.primitives import CHEAP, EXPENSIVE, FREE, VIEWS

_SOURCES = frozenset({"random_bits", "threefry2x32"})
_ELEMENTWISE = CHEAP | EXPENSIVE | VIEWS


def with_written_bits(closed: Jaxpr) -> Jaxpr:
    """The program with a barrier behind every mask that is made of random bits alone.

    Of a chain of such values (bits, uniform numbers, a mask) only the last one is written: the one
    that something else reads. The barrier comes before its name, so that what a plan keeps is what
    was written; a copy from before it would be made of the bits once more. Calls have to be
    inlined; loops are rewritten inside too.
    """
    eqns = [_with_written_bits_inside(eqn) for eqn in _jax.open_jaxpr(closed).eqns]
    last = _last_made_of_bits(eqns)
    barriers = {
        index: [[v] for v in eqn.outvars if _jax.is_var(v) and v in last]
        for index, eqn in enumerate(eqns)
    }
    return _jax.with_barriers(_jax.with_equations(closed, eqns), barriers)


def _with_written_bits_inside(eqn: Eqn) -> Eqn:
    if eqn.primitive.name != "scan":
        return eqn
    return eqn.replace(params={**eqn.params, "jaxpr": with_written_bits(eqn.params["jaxpr"])})


def _last_made_of_bits(eqns: Sequence[Eqn]) -> set[Var]:
    """The buffers made of random bits that something else reads, maybe as a view."""
    random = _made_of_bits(eqns)
    buffer: dict[Var, Var] = {}
    last: set[Var] = set()
    for eqn in eqns:
        read = [v for v in eqn.invars if _jax.is_var(v) and v in random]
        outputs = [v for v in eqn.outvars if _jax.is_var(v) and v in random]
        if not outputs:
            last.update(buffer.get(v, v) for v in read if not _jax.is_inexact(v))
        elif eqn.primitive.name in VIEWS:
            buffer[outputs[0]] = buffer.get(read[0], read[0])
    return last


def _made_of_bits(eqns: Sequence[Eqn]) -> set[Var]:
    """Values that depend element by element on random bits, and else on scalars only."""
    random: set[Var] = set()
    uniform: set[Var] = set()  # made on the fly, from no array
    for eqn in eqns:
        read = _jax.variables(eqn)
        rest = [v for v in read if v not in random]
        plain = all(v in uniform or getattr(v.aval, "size", 0) == 1 for v in rest)
        outputs = {v for v in eqn.outvars if _jax.is_var(v)}
        if eqn.primitive.name in _SOURCES:
            random |= outputs
        elif plain and eqn.primitive.name in FREE and len(rest) == len(read):
            uniform |= outputs
        elif plain and eqn.primitive.name in _ELEMENTWISE and len(rest) < len(read):
            random |= outputs
    return random
