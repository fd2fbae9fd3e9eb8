"""Stacks of units, unrolled and scanned, and what a function of them keeps."""

import jax
import jax.numpy as jnp
import pytest

from jdelta._src import _jax


def unrolled(unit, w, x):
    for row in w:
        x = unit(row, x)
    return jnp.sum(x**2)


def scanned(unit, w, x):
    return jnp.sum(jax.lax.scan(lambda x, w: (unit(w, x), None), x, w)[0] ** 2)


STACKS = pytest.mark.parametrize("stack", [unrolled, scanned])


def kept(loss, *args):
    """What a function keeps: types, places and names, whatever `jax_remat3` says.

    `saved_residuals` of jax 0.10 loses names with the flag on.
    """
    linear = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.linearize(loss, *args)[1]))(*args)
    program = _jax.open_jaxpr(linear)
    maker = {eqn.outvars[0]: eqn for eqn in program.eqns if eqn.outvars}
    values = set()
    for var in filter(_jax.is_var, program.outvars):
        while var in maker and maker[var].primitive.name == "reduce_precision":
            (var,) = maker[var].invars
        values.add((var, _jax.named_value(maker[var]) or "" if var in maker else ""))
    return sorted((str(v.aval), str(v.aval.memory_space), name) for v, name in values)
