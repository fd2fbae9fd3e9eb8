"""The recompute of a region waits for its forward pass where no cotangent makes it wait.

A cotangent usually depends on what the forward pass results in, so recompute comes after it. That
of a region which ends in the loss is the constant 1, that of a sum of its results an array of ones:
nothing says which comes first, XLA may interleave the two and fuse what both compute, and the
values of both are in memory at once (dropout in the last of three layers, ``cuda:h100``: 656 MiB
for 496).
"""

from __future__ import annotations

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
    barriers = {index - 1: [tie] for index, tie in _ties(_jax.open_jaxpr(flat)).items()}
    return _jax.with_barriers(flat, barriers) if barriers else flat


def _with_forward_first_inside(eqn: Eqn) -> Eqn:
    if eqn.primitive.name != "scan":
        return eqn
    body = _jax.inline(eqn.params["jaxpr"])
    changed = _with_forward_first(body)
    return eqn if changed is body else eqn.replace(params={**eqn.params, "jaxpr": changed})


def _ties(inner: Jaxpr) -> dict[int, list[Var]]:
    """For each backward region that waits for nothing, what to tie before it, by its index."""
    sources = _Sources()
    ties: dict[int, list[Var]] = {}
    for index, eqn in enumerate(inner.eqns):
        region = _region_of(eqn) if index and _jax.is_shielded(eqn) else None
        if region and (tie := _tie(inner, index, sources, region)):
            ties[index] = tie
        sources.add(eqn)
    return ties


def _tie(inner: Jaxpr, index: int, sources: _Sources, region: str) -> list[Var]:
    """An operand of a backward region and what it has to wait for; empty if it waits already.

    A barrier holds only if all that leaves it is used: so these are results of the forward pass
    that something reads later on.
    """
    operands = [v for v in inner.eqns[index].invars if _jax.is_var(v) and not _jax.on_host(v.aval)]
    entering = [v for v in operands if not sources.makes(region, v)]
    if not entering or any(sources.is_behind(region, v) for v in entering):
        return []
    later = {v for eqn in inner.eqns[index:] for v in eqn.invars if _jax.is_var(v)}
    later.update(filter(_jax.is_var, inner.outvars))
    later.difference_update(operands)
    before = (v for eqn in inner.eqns[:index] for v in eqn.outvars)
    ended = [v for v in before if v in later and sources.is_behind(region, v)]
    return [entering[-1], *ended] if ended else []


class _Sources:
    """What each region has made in the equations so far, read in one pass over them.

    A bit stands for a region, ``{"h_3#0": 0b100}``; of each value it is kept which regions made it,
    and which it depends on: ``{a: 0b101}``.
    """

    def __init__(self):
        self._bits: dict[str, int] = {}
        self._makers: dict[Var, int] = {}
        self._behind: dict[Var, int] = {}

    def makes(self, region: str, value: Var) -> bool:
        """Whether a region computes a value, or it is a copy of one."""
        return bool(self._makers.get(value, 0) & self._bits.get(region, 0))

    def is_behind(self, region: str, value: Var) -> bool:
        """Whether a value is one of the region's, or is computed from one."""
        return bool(self._behind.get(value, 0) & self._bits.get(region, 0))

    def add(self, eqn: Eqn) -> None:
        """Read the next equation. Inputs of a region are none of its values."""
        makers = behind = 0
        for v in _jax.variables(eqn):
            makers |= self._makers.get(v, 0)
            behind |= self._behind.get(v, 0)
        name = _jax.named_value(eqn)
        makers = makers if eqn.primitive.name in _COPIES else 0
        if isinstance(name, RegionName) and not name.is_input:
            makers |= self._bits.setdefault(name.region, 1 << len(self._bits))
        if makers:
            self._makers.update(dict.fromkeys(eqn.outvars, makers))
        if makers | behind:
            self._behind.update(dict.fromkeys(eqn.outvars, makers | behind))


def _region_of(backward: Eqn) -> str | None:
    names = map(_jax.named_value, _jax.equations(_jax.subjaxpr(backward)))
    return next((name.region for name in names if isinstance(name, RegionName)), None)
