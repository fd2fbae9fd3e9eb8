"""Random bits are written to memory before anything reads them.

Left alone, a TPU's compiler may fuse the making of a dropout mask into the matrix product beside
it, and then writes out every constant that the bits are made with, as large as the mask: two layers
of GPT-2 in bfloat16 took 13 GiB instead of 3, with ``jax.checkpoint`` by hand too. A barrier
between the mask and its readers keeps the two apart. See ``benchmarks/xla/dropout.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from jdelta import _jax
from jdelta._jax import Atom, Eqn, Jaxpr, Var
from jdelta._primitives import CHEAP, EXPENSIVE, FREE, VIEWS

_SOURCES = frozenset({"random_bits", "threefry2x32"})
_ELEMENTWISE = CHEAP | EXPENSIVE | VIEWS


def with_written_bits(closed: Jaxpr) -> Jaxpr:
    """The program with a barrier behind every value that is made of random bits alone.

    Of a chain of such values (bits, uniform numbers, a mask) only the last one is written: the one
    that something else reads. Calls have to be inlined; loops are rewritten inside too.
    """
    inner = _jax.open_jaxpr(closed)
    random = _made_of_bits(inner.eqns)
    behind: dict[Var, Var] = {}
    eqns: list[Eqn] = []

    def shielded(atoms: Sequence[Atom], like: Eqn) -> list[Atom]:
        for atom in atoms:
            if _jax.is_var(atom) and atom in random and atom not in behind:
                behind[atom] = _jax.new_var(atom.aval)
                eqns.append(_jax.barrier_equation(atom, behind[atom], like))
        return [behind.get(a, a) if _jax.is_var(a) else a for a in atoms]

    for eqn in inner.eqns:
        if random.isdisjoint(v for v in eqn.outvars if _jax.is_var(v)):
            eqn = eqn.replace(invars=shielded(eqn.invars, eqn))
        if eqn.primitive.name == "scan":
            body = with_written_bits(eqn.params["jaxpr"])
            eqn = eqn.replace(params={**eqn.params, "jaxpr": body})
        eqns.append(eqn)
    return _jax.rebuild(closed, eqns, inner.outvars)


def _made_of_bits(eqns: Sequence[Eqn]) -> set[Var]:
    """Values that depend element by element on random bits, and else on scalars only."""
    random: set[Var] = set()
    uniform: set[Var] = set()  # made on the fly, from no array
    for eqn in eqns:
        read = [v for v in eqn.invars if _jax.is_var(v)]
        rest = [v for v in read if v not in random]
        plain = all(v in uniform or getattr(v.aval, "size", 0) == 1 for v in rest)
        made = {v for v in eqn.outvars if _jax.is_var(v)}
        if eqn.primitive.name in _SOURCES:
            random |= made
        elif plain and eqn.primitive.name in FREE and len(rest) == len(read):
            uniform |= made
        elif plain and eqn.primitive.name in _ELEMENTWISE and len(rest) < len(read):
            random |= made
    return random
