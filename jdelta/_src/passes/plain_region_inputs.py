"""What enters a region is kept as it is, on CPUs.

JAX rounds each kept value that a policy names to its own precision (``reduce_precision``), so that
XLA does not compute it again in the backward pass. What enters a region needs none of that: it is
computed by the region before it, and no policy names what ``jax.checkpoint`` by hand keeps of it.
XLA:CPU does not fuse such a value with what makes it, but computes it in each of its readers, from
what the layers before have made: all of that stays in memory (eight unrolled residual layers: 13
MiB for 11).
"""

from __future__ import annotations

from jdelta._src import _jax
from jdelta._src._jax import Atom, Eqn, Jaxpr, Var
from jdelta._src.program.names import RegionName


def with_plain_inputs(program: Jaxpr) -> Jaxpr:
    """The program without the rounding of what enters regions outside of loops.

    Args:
        program: A staged step under a policy, calls inlined.

    Returns:
        Such a program; the one that was given where there is nothing to change.
    """
    inner = _jax.open_jaxpr(program)
    inputs: set[Var] = set()
    became: dict[Var, Atom] = {}

    def now(atom: Atom) -> Atom:
        return became.get(atom, atom) if _jax.is_var(atom) else atom

    eqns: list[Eqn] = []
    for eqn in inner.eqns:
        read = list(map(now, eqn.invars))
        if eqn.primitive.name == "reduce_precision" and read[0] in inputs:
            became[eqn.outvars[0]] = read[0]
            continue
        name = _jax.named_value(eqn)
        inputs.update(eqn.outvars if isinstance(name, RegionName) and name.is_input else ())
        eqns.append(eqn.replace(invars=read))
    if not became:
        return program
    return _jax.rebuild(program, eqns, list(map(now, inner.outvars)))
