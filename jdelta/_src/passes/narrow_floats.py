"""Numbers of eight bits and less are saved as they are.

``jax.checkpoint`` rounds what it saves to as many bits as its type has, so that the backward pass
reads what the forward pass did, even if the compiler computes with more. But it rounds as for
IEEE 754: in a type that has no infinity, as ``float8_e4m3fn``, the largest numbers become one, and
NaN when they are stored; the smallest of most such types become zero.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from jdelta._src import _jax
from jdelta._src._jax import Eqn, Jaxpr

_WIDE = {"exponent_bits": 8, "mantissa_bits": 23}
"""Rounds no number of eight bits."""


def with_narrow_as_they_are(program: Jaxpr) -> Jaxpr:
    """The program without the rounding of narrow numbers; the one given if it has none."""
    if not any(map(_rounds_narrow, _jax.equations(program))):
        return program
    return _unrounded(program)


def _unrounded(program: Jaxpr) -> Jaxpr:
    eqns = _jax.open_jaxpr(program).eqns
    return _jax.with_equations(program, list(map(_without_rounding, eqns)))


def _without_rounding(eqn: Eqn) -> Eqn:
    if _rounds_narrow(eqn):
        return eqn.replace(params={**eqn.params, **_WIDE})
    return _jax.with_bodies(eqn, _unrounded)


def _rounds_narrow(eqn: Eqn) -> bool:
    """Whether ``jax.checkpoint`` put an equation there to round a narrow number."""
    if eqn.primitive.name != "reduce_precision":
        return False
    given = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
    dtype = eqn.outvars[0].aval.dtype
    return dtype.itemsize == 1 and given == _bits(dtype)


@functools.cache
def _bits(dtype: jnp.dtype) -> tuple[int, int]:
    info = jnp.finfo(dtype)
    return info.nexp, info.nmant
