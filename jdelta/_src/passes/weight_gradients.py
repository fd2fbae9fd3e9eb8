"""When gradients of weights are computed: with what comes next in the backward pass, not later.

XLA:GPU puts them off, and what they are made from stays in memory. So what a backward region
results in shares one barrier (see ``timed_transfers.py``), and gradients of weights outside of
regions (a head's) share one with what the next region or backward loop begins with.

Gradients of biases and scales are among them. What such a sum reads is as large as what a product
does, and it stays until XLA runs the sum, which may be after the backward pass: in a plan for a
U-Net the three largest cotangents stayed so (``benchmarks/plans/savings.py``, step ``unet``).

All wait as small as they are on their way: in the type that they are computed in, which may be
narrower than that of the weights, and without the zeros around the gradient of one layer's slice of
stacked weights. What makes them larger comes after the barrier, where XLA fuses it into what reads
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jdelta._src import _jax
from jdelta._src._jax import Eqn, Jaxpr, Var
from jdelta._src._jax.transfers import is_host
from jdelta._src.program.primitives import MATMULS, VIEWS

_GROWS = frozenset("broadcast_in_dim convert_element_type pad reshape squeeze transpose".split())
"""What may make a gradient larger, or stands between what does."""


@dataclass(frozen=True)
class Growth:
    """How a gradient is made of a smaller value: of the gradient of a slice, with zeros around it.

    Attributes:
        of: The smaller value.
        eqns: What makes the gradient of it, in order.
    """

    of: Var
    eqns: tuple[Eqn, ...]

    def __call__(self, small: Any) -> Any:
        """The gradient, of the smaller value."""
        program = _jax.program_of(self.eqns, [self.eqns[-1].outvars[0]])
        return _jax.evaluate(program, small)[0]


@dataclass(frozen=True)
class Gradients:
    """What of a flat program's backward pass is to be there together.

    Attributes:
        early: Gradients, as small as they are on their way, and what a backward region or loop (by
            its index) begins with once all of them are there.
        grown: For the same indices, how gradients are made of what is small among these.
        results: Of each backward region, what ends together.
    """

    early: Mapping[int, list[Var]]
    grown: Mapping[int, Mapping[Var, Growth]]
    results: list[list[Var]]

    @classmethod
    def of(cls, program: Jaxpr, regions: Sequence[int], *, loops: bool) -> Gradients:
        """Read a flat program.

        Args:
            program: The program.
            regions: Indices of its backward regions, in program order.
            loops: Whether gradients are there before backward loops too.
        """
        inner = _jax.open_jaxpr(program)
        needed = _needed(inner)
        tied = {v for v in needed if not is_host(v)}
        backward = (i for i, eqn in enumerate(inner.eqns) if loops and is_backward_loop(eqn))
        early, grown = _early(inner.eqns, sorted([*regions, *backward]), tied)
        bodies = [inner.eqns[index] for index in regions]
        ending = tied | _read(bodies)  # what regions hand on ends with them in any case
        return cls(early, grown, [[v for v in region.outvars if v in ending] for region in bodies])


def _early(
    eqns: Sequence[Eqn], regions: Sequence[int], tied: set[Var]
) -> tuple[dict[int, list[Var]], dict[int, dict[Var, Growth]]]:
    """Tie gradients to what comes next, where only what follows all regions and loops reads them.

    Such as those of a head's weights, made of values that are large; products also where something
    between two regions reads them (weights of a head that are those of two embeddings). What a stem
    before all regions keeps for itself is none: it is left alone, so that XLA may fuse it into its
    readers.
    """
    waiting = tied - _read(eqns[: max(regions, default=-1) + 1])
    products = tied & _products(eqns)
    early: dict[int, list[Var]] = {}
    grown: dict[int, dict[Var, Growth]] = {}
    for begin, end in itertools.pairwise([-1, *regions]):
        between = eqns[begin + 1 : end]
        results = [v for eqn in between if _jax.is_backward(eqn) for v in eqn.outvars]
        read = _read(eqns[begin + 1 : end + 1])
        gradients = [v for v in results if v in waiting or (v in products and v not in read)]
        first = start(eqns[end])
        if gradients and first:
            growths = _growths(between)
            grown[end] = {v: growths[v] for v in gradients if v in growths}
            early[end] = [*first, *(growths[v].of if v in growths else v for v in gradients)]
    return early, grown


def _products(eqns: Sequence[Eqn]) -> set[Var]:
    """Results of products, and views of them."""
    results: set[Var] = set()
    for eqn in eqns:
        is_view = eqn.primitive.name in VIEWS and not results.isdisjoint(_read([eqn]))
        if is_view or eqn.primitive.name in MATMULS:
            results.update(eqn.outvars)
    return results


def start(region: Eqn) -> list[Var]:
    """What a backward region or loop has to have on the device before it begins."""
    if not is_backward_loop(region):
        return [v for v in region.invars if _jax.is_var(v) and not is_host(v)][-1:]
    n_consts, n_carry = _jax.scan_counts(region.params)
    carried = region.invars[n_consts : n_consts + n_carry]
    return [v for v in carried if _jax.is_var(v) and not is_host(v)]


def is_backward_loop(eqn: Eqn) -> bool:
    """Whether an equation is a loop of the backward pass."""
    return eqn.primitive.name == "scan" and _jax.is_backward(eqn)


def has_regions(closed: Jaxpr) -> bool:
    """Whether there are backward regions or loops in a program, other loops looked into."""
    return any(
        _jax.is_shielded(eqn)
        or is_backward_loop(eqn)
        or (eqn.primitive.name == "scan" and has_regions(eqn.params["jaxpr"]))
        for eqn in _jax.open_jaxpr(_jax.inline(closed)).eqns
    )


def without_growth(body: Jaxpr) -> tuple[Jaxpr, list[Growth | None]]:
    """A program without what makes its results larger in the end, and what that is for each."""
    inner = _jax.open_jaxpr(body)
    growths = _growths(inner.eqns)
    grown = [growths.get(v) if _jax.is_var(v) else None for v in inner.outvars]
    small = [g.of if g else v for v, g in zip(inner.outvars, grown, strict=True)]
    return _jax.rebuild(body, inner.eqns, small), grown


def _growths(eqns: Sequence[Eqn]) -> dict[Var, Growth]:
    """How what some equations make is made of something smaller, where it is.

    Of the smallest on the way; the last of equal ones.
    """
    ways: dict[Var, Growth] = {}
    for eqn in eqns:
        read = _jax.variables(eqn)
        if eqn.primitive.name in _GROWS and len(read) == 1:
            (source,), (result,) = read, eqn.outvars
            before = ways.get(source, Growth(source, ()))
            smallest = min((source, before.of), key=_jax.bytes_of)
            way = before if smallest is not source else Growth(source, ())
            ways[result] = Growth(way.of, (*way.eqns, eqn))
    return {v: way for v, way in ways.items() if _jax.bytes_of(way.of) < _jax.bytes_of(v)}


def _needed(program: Jaxpr) -> set[Var]:
    """What its results depend on; gradients of weights that are not trained are none of it."""
    results = list(filter(_jax.is_var, program.outvars))
    return _read(_jax.open_jaxpr(_jax.program_of(program.eqns, results)).eqns) | set(results)


def _read(eqns: Sequence[Eqn]) -> set[Var]:
    return {v for eqn in eqns for v in eqn.invars if _jax.is_var(v)}
