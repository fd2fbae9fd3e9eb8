"""When gradients of weights are computed: with what comes next in the backward pass, not later.

XLA:GPU puts them off, and what they are made from stays in memory. So what a backward unit results
in shares one barrier (see ``_timing.py``), and gradients of weights outside of units (a head's)
share one with what the next unit or backward loop begins with.

Where units offload nothing, vectors, the gradients of biases and scales, are left alone: XLA fuses
the sums they are (1.3 % of ResNet-50's step, by compiled instructions). Where they do, it may put
them off too (an MLP: 1.5 GiB of 5.4).

All wait in the type that they are computed in, which may be narrower than that of the weights: else
they would take memory in both.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax import lax

from jdelta import _jax
from jdelta._jax import Eqn, Jaxpr, Var
from jdelta._primitives import MATMULS, VIEWS
from jdelta._transfer import is_host


@dataclass(frozen=True)
class Gradients:
    """What of a flat program's backward pass is to be there together.

    Attributes:
        early: Gradients, and what a backward unit or loop (by its index) begins with once all of
            them are there.
        wide: From a gradient among these to what it is converted to.
        results: Of each backward unit, what ends together.
    """

    early: Mapping[int, list[Var]]
    wide: Mapping[Var, Var]
    results: list[list[Var]]

    @classmethod
    def of(cls, program: Jaxpr, units: Sequence[int], *, loops: bool, vectors: bool) -> Gradients:
        """Read a flat program.

        Args:
            program: The program.
            units: Indices of its backward units, in program order.
            loops: Whether gradients are there before backward loops too.
            vectors: Whether those of biases and scales are tied as well.
        """
        inner = _jax.open_jaxpr(program)
        read = _read(inner.eqns) | set(filter(_jax.is_var, inner.outvars))
        tied = {v for v in read if not is_host(v) and (vectors or v.aval.ndim > 1)}
        backward = (i for i, eqn in enumerate(inner.eqns) if loops and is_backward_loop(eqn))
        early, wide = _early(inner.eqns, sorted([*units, *backward]), tied)
        bodies = [inner.eqns[index] for index in units]
        ending = tied | _read(bodies)  # what units hand on ends with them in any case
        return cls(early, wide, [[v for v in unit.outvars if v in ending] for unit in bodies])


def _early(
    eqns: Sequence[Eqn], regions: Sequence[int], tied: set[Var]
) -> tuple[dict[int, list[Var]], dict[Var, Var]]:
    """Tie gradients to what comes next, where only what follows all units and loops reads them.

    Such as those of a head's weights, made of values that are large; products also where something
    between two regions reads them (weights of a head that are those of two embeddings). What a stem
    before all units keeps for itself is none: it is left alone, so that XLA may fuse it into its
    readers.
    """
    waiting = tied - _read(eqns[: max(regions, default=-1) + 1])
    products = tied & _products(eqns)
    early: dict[int, list[Var]] = {}
    wide: dict[Var, Var] = {}
    for begin, end in itertools.pairwise([-1, *regions]):
        between = eqns[begin + 1 : end]
        made = [v for eqn in between if _jax.is_backward(eqn) for v in eqn.outvars]
        read = _read(eqns[begin + 1 : end + 1])
        gradients = [v for v in made if v in waiting or (v in products and v not in read)]
        first, narrow = start(eqns[end]), _widened(between)
        if gradients and first:
            early[end] = [*first, *(narrow.get(v, v) for v in gradients)]
            wide.update((narrow[v], v) for v in gradients if v in narrow)
    return early, wide


def _products(eqns: Sequence[Eqn]) -> set[Var]:
    """Results of products, and views of them."""
    found: set[Var] = set()
    for eqn in eqns:
        is_view = eqn.primitive.name in VIEWS and not found.isdisjoint(_read([eqn]))
        if is_view or eqn.primitive.name in MATMULS:
            found.update(eqn.outvars)
    return found


def start(region: Eqn) -> list[Var]:
    """What a backward unit or loop has to have on the device before it begins."""
    if not is_backward_loop(region):
        return [v for v in region.invars if _jax.is_var(v) and not is_host(v)][-1:]
    n_consts, n_carry = _jax.scan_counts(region.params)
    carried = region.invars[n_consts : n_consts + n_carry]
    return [v for v in carried if _jax.is_var(v) and not is_host(v)]


def is_backward_loop(eqn: Eqn) -> bool:
    """Whether an equation is a loop of the backward pass."""
    return eqn.primitive.name == "scan" and _jax.is_backward(eqn)


def has_regions(closed: Jaxpr) -> bool:
    """Whether there are backward units or loops in a program, other loops looked into."""
    return any(
        _jax.is_shielded(eqn)
        or is_backward_loop(eqn)
        or (eqn.primitive.name == "scan" and has_regions(eqn.params["jaxpr"]))
        for eqn in _jax.open_jaxpr(_jax.inline(closed)).eqns
    )


def narrowed(body: Jaxpr) -> tuple[Jaxpr, list[bool]]:
    """A program without its last conversions to wider types, and which results lack one."""
    inner = _jax.open_jaxpr(body)
    narrow = _widened(inner.eqns)
    results = [narrow.get(v, v) if _jax.is_var(v) else v for v in inner.outvars]
    is_narrow = [v is not result for v, result in zip(inner.outvars, results, strict=True)]
    return _jax.rebuild(body, inner.eqns, results), is_narrow


def widen(names: Mapping[Var, Var], env: _jax.Env) -> None:
    """Convert values to the type of a variable: from that to the one whose value it is."""
    for wide, narrow in names.items():
        env[wide] = lax.convert_element_type(env[narrow], wide.aval.dtype)


def tie(names: Sequence[Var], env: _jax.Env) -> None:
    """Put values behind one barrier: none of them is used before all of them are there."""
    names = list(dict.fromkeys(names))
    values = lax.optimization_barrier([env[v] for v in names])
    env.update(zip(names, values, strict=True))


def _widened(eqns: Sequence[Eqn]) -> dict[Var, Var]:
    """What some equations convert to a type of more bytes: from that to what they convert."""
    conversions = (eqn for eqn in eqns if eqn.primitive.name == "convert_element_type")
    pairs = ((eqn.outvars[0], eqn.invars[0]) for eqn in conversions)
    return {v: x for v, x in pairs if _jax.is_var(x) and _itemsize(x) < _itemsize(v)}


def _itemsize(v: Var) -> int:
    return v.aval.dtype.itemsize


def _read(eqns: Sequence[Eqn]) -> set[Var]:
    return {v for eqn in eqns for v in eqn.invars if _jax.is_var(v)}
