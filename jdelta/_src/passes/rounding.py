"""``jax.checkpoint`` rounds what it saves, but not where that does harm.

It rounds each value that a policy names to as many bits as its type has (``reduce_precision``), so
that the backward pass reads what the forward pass did, even if the compiler computes with more, and
so that XLA does not compute the value again in the backward pass. Two kinds of values are better
off without:

- Numbers of eight bits. JAX rounds as for IEEE 754: in a type that has no infinity, as
  ``float8_e4m3fn``, the largest numbers become one, and NaN when they are stored; the smallest of
  most such types become zero.
- What enters a region, on CPUs. It is computed by the region before it, and no policy names what
  ``jax.checkpoint`` by hand keeps of it. XLA:CPU does not fuse a rounded value with what makes it,
  but computes it in each of its readers, from what the layers before have made: all of that stays
  in memory (eight unrolled residual layers: 13 MiB for 11).
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from jdelta._src import _jax
from jdelta._src._jax import Atom, Eqn, Jaxpr, Var
from jdelta._src.passes.program import Context, Program
from jdelta._src.program.names import RegionName

_WIDE = {"exponent_bits": 8, "mantissa_bits": 23}
"""Rounds no number of eight bits."""


def without_harmful_rounding(program: Program, context: Context) -> Program:
    """The program without the rounding of narrow numbers and, on CPUs, of region inputs."""
    flat = program.flat
    plain = _with_plain_inputs(flat) if context.backend.passes.plain_region_inputs else flat
    changed = _jax.with_replaced(plain, _rounds_narrow, _without_rounding)
    return program if changed is flat else program.rewritten(changed)


def _with_plain_inputs(flat: Jaxpr) -> Jaxpr:
    """The program without the rounding of what enters regions outside of loops."""
    inner = _jax.open_jaxpr(flat)
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
    return _jax.rebuild(flat, eqns, list(map(now, inner.outvars))) if became else flat


def _without_rounding(eqn: Eqn) -> list[Eqn]:
    return [eqn.replace(params={**eqn.params, **_WIDE})]


def _rounds_narrow(eqn: Eqn) -> bool:
    """Whether ``jax.checkpoint`` put an equation there to round a narrow number."""
    if eqn.primitive.name != "reduce_precision":
        return False
    bits = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
    dtype = eqn.outvars[0].aval.dtype
    return dtype.itemsize == 1 and bits == _bits(dtype)


@functools.cache
def _bits(dtype: jnp.dtype) -> tuple[int, int]:
    info = jnp.finfo(dtype)
    return info.nexp, info.nmant
