"""The recompute of a region waits for its forward pass where no cotangent makes it wait.

A cotangent usually depends on what the forward pass results in, so recompute comes after it. That
of a region which ends in the loss is the constant 1, that of a sum of its results an array of ones:
nothing says which comes first, XLA may interleave the two and fuse what both compute, and the
values of both are in memory at once (dropout in the last of three layers, ``cuda:h100``: 656 MiB
for 496).
"""

from __future__ import annotations

from collections.abc import Sequence

from jdelta._src import _jax
from jdelta._src._jax import Eqn, Jaxpr, Var
from jdelta._src.passes.program import Context, Program
from jdelta._src.program.names import RegionName

_COPIES = frozenset({"name", "reduce_precision", "optimization_barrier"})
"""Primitives whose results are their operands: ``jax.checkpoint`` keeps such copies of values."""


def with_forward_first(program: Program, _: Context) -> Program:
    """The program with barriers between forward passes and recompute that waits for nothing.

    Loops around forward and backward pass are rewritten inside.
    """
    flat = program.flat
    changed = _with_forward_first(flat)
    return program if changed is flat else program.rewritten(changed)


def _with_forward_first(flat: Jaxpr) -> Jaxpr:
    inner = _jax.open_jaxpr(flat)
    eqns = [_with_forward_first_inside(eqn) for eqn in inner.eqns]
    is_changed = any(a is not b for a, b in zip(eqns, inner.eqns, strict=True))
    flat = _jax.with_equations(flat, eqns) if is_changed else flat
    shielded = (index for index, eqn in enumerate(eqns) if _jax.is_shielded(eqn))
    ties = {index - 1: _tie(_jax.open_jaxpr(flat), index) for index in shielded if index}
    barriers = {index: [tie] for index, tie in ties.items() if tie}
    return _jax.with_barriers(flat, barriers) if barriers else flat


def _with_forward_first_inside(eqn: Eqn) -> Eqn:
    if eqn.primitive.name != "scan":
        return eqn
    body = _jax.inline(eqn.params["jaxpr"])
    changed = _with_forward_first(body)
    return eqn if changed is body else eqn.replace(params={**eqn.params, "jaxpr": changed})


def _tie(inner: Jaxpr, index: int) -> list[Var]:
    """An operand of a backward region and what it has to wait for; empty if it waits already.

    A barrier holds only if all that leaves it is used: so these are results of the forward pass
    that something reads later on.
    """
    region, before = inner.eqns[index], inner.eqns[:index]
    own_values = _made_by(before, _region_of(region))
    operands = [v for v in region.invars if _jax.is_var(v) and not _jax.on_host(v.aval)]
    entering = {v for v in operands if v not in own_values}
    if not own_values or not entering or not own_values.isdisjoint(_ancestors(before, entering)):
        return []
    results = {
        v for i in _jax.dependents(before, own_values) for v in before[i].outvars
    } | own_values
    later = {v for eqn in inner.eqns[index:] for v in eqn.invars if _jax.is_var(v)}
    later.update(filter(_jax.is_var, inner.outvars))
    ended = [
        v for eqn in before for v in eqn.outvars if v in results and v in later - set(operands)
    ]
    operand = next(v for v in reversed(operands) if v in entering)
    return [operand, *ended] if ended else []


def _region_of(backward: Eqn) -> str | None:
    names = map(_jax.named_value, _jax.equations(_jax.subjaxpr(backward)))
    return next((name.region for name in names if isinstance(name, RegionName)), None)


def _made_by(eqns: Sequence[Eqn], region: str | None) -> set[Var]:
    """Values that a region computes, and copies of these; not its inputs."""
    values: set[Var] = set()
    for eqn in eqns:
        name = _jax.named_value(eqn)
        is_own = isinstance(name, RegionName) and name.region == region and not name.is_input
        is_copy = eqn.primitive.name in _COPIES and not values.isdisjoint(_jax.variables(eqn))
        values.update(eqn.outvars if is_own or is_copy else ())
    return values


def _ancestors(eqns: Sequence[Eqn], values: set[Var]) -> set[Var]:
    """The values, and all that they are computed from."""
    needed = set(values)
    for eqn in reversed(eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(_jax.variables(eqn))
    return needed
