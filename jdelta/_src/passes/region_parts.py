"""Where regions are in a recorded step: the equations of their forward and backward parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jdelta._src import _jax
from jdelta._src._jax import Eqn, Var
from jdelta._src.program.hlo_names import RegionMarks
from jdelta._src.program.rewriting import Equations


@dataclass(frozen=True)
class Parts:
    """Where a region is in a program: indices of equations.

    Attributes:
        forward: Its forward part.
        backward: Its backward part.
        around_forward: Equations with its forward part in a body.
        around_backward: Equations with its backward part in a body.
    """

    forward: list[int] = field(default_factory=list[int])
    backward: list[int] = field(default_factory=list[int])
    around_forward: list[int] = field(default_factory=list[int])
    around_backward: list[int] = field(default_factory=list[int])


NO_PARTS = Parts()
"""Those of a region that is not there."""


def parts_of(
    eqns: Sequence[Eqn | None], marks: RegionMarks, *, is_backward: bool
) -> dict[str, Parts]:
    """The parts of each region that is in a program, by its name.

    Args:
        eqns: The equations of the program.
        marks: What tells regions.
        is_backward: Whether the whole program is a part of a backward pass.
    """
    regions = defaultdict[str, Parts](Parts)
    for index, eqn in enumerate(eqns):
        if eqn is None:
            continue
        back = is_backward or _jax.is_backward(eqn)
        if own := marks.region(eqn):
            (regions[own].backward if back else regions[own].forward).append(index)
            continue
        for body in _jax.subjaxprs(eqn):
            inside = parts_of(_jax.open_jaxpr(body).eqns, marks, is_backward=back)
            for name, inner in inside.items():
                if inner.forward or inner.around_forward:
                    regions[name].around_forward.append(index)
                if inner.backward or inner.around_backward:
                    regions[name].around_backward.append(index)
    return dict(regions)


def backward_runs(regions: Mapping[str, Parts], eqns: Equations) -> dict[str, list[list[int]]]:
    """The backward parts of each region: one for each time that something is differentiated.

    A part ends before cotangents from elsewhere are added to what it results in, as JAX leaves that
    out of what it computes again.
    """
    every = {i: name for name, parts in regions.items() for i in parts.backward}
    runs = defaultdict[str, list[list[int]]](list)
    before = None
    for index, name in sorted(every.items()):
        if name != before:
            runs[name].append([])
        runs[name][-1].append(index)
        before = name
    return {
        name: [part for run in some if (part := _without_sums(run, eqns))]
        for name, some in runs.items()
    }


def _without_sums(run: Sequence[int], eqns: Equations) -> list[int]:
    """A backward part without the sums of its results and cotangents from elsewhere."""
    part = list(run)
    for index in reversed(run):
        eqn = eqns[index]
        if eqn.primitive.name != "add_any":
            continue
        others = [i for i in part if i != index]
        own = {v for i in others for v in (*eqns[i].outvars, *_jax.variables(eqns[i]))}
        elsewhere = [v for v in _jax.variables(eqn) if v not in own]
        (result,) = eqn.outvars
        readers = [i for i in others if result in _jax.variables(eqns[i])]
        if elsewhere and (not readers or _added_last(index, readers, elsewhere[0], part, eqns)):
            part.remove(index)
    return part


def _added_last(
    index: int, readers: Sequence[int], elsewhere: Var, part: Sequence[int], eqns: Equations
) -> bool:
    """Whether a sum inside of a part can be done after it: ``(x + y) + z`` as ``(y + z) + x``.

    If so the other sum is changed, and the last one added behind it.

    Args:
        index: The sum of ``x``, which is from elsewhere, and ``y``.
        readers: What reads it in the part.
        elsewhere: ``x``.
        part: The part.
        eqns: The equations that its indices are of.
    """
    first = eqns[index]
    (sum_of_both,) = first.outvars
    rest = [v for v in _jax.variables(first) if v is not elsewhere]
    if len(readers) != 1 or len(rest) != 1 or eqns.is_read_outside(sum_of_both, part):
        return False
    last = eqns[readers[0]]
    if last.primitive.name != "add_any" or last.invars[0] is last.invars[1]:
        return False
    (result,) = last.outvars
    if any(result in _jax.variables(eqns[i]) for i in part):
        return False
    inside = _jax.new_var(result.aval)
    operands = [rest[0] if v is sum_of_both else v for v in last.invars]
    eqns.eqns[index] = None
    eqns.eqns[readers[0]] = last.replace(invars=operands, outvars=[inside])
    eqns.add(readers[0], last.replace(invars=[inside, elsewhere], outvars=[result]))
    return True
