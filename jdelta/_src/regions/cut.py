"""Where a program may be cut into regions: few bytes cross, and little lies between.

Recomputing region after region takes what crosses each cut, which is kept, and what the largest
region holds while it is computed again. The cuts that are found here make the sum of both small:
the checkpointing problem of Chen et al. 2016 ("Training Deep Nets with Sublinear Memory Cost",
section 4) with real sizes, solved exactly over the places where the fewest bytes cross.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from jdelta._src import _jax
from jdelta._src._jax import Eqn, Var
from jdelta._src.program.primitives import CHEAP, FREE, LOOPS, MATMULS, VIEWS

MOST_CUTS = 384
"""Places for cuts that are looked at."""

SMALLER = 0.9
"""Of the largest region: what the next cuts allow at most."""

LEAST_REGION = 1 / 1024
"""The smallest size that is tried, as a part of the whole program's."""

SMALL = 1 / 256
"""Part of what the largest region holds below which a run of equations is no region."""

SCORES = 1 / 8
"""Of the bytes that cross in front of it: what a product makes that is part of the loss is less."""

AS_GOOD = 1.002
"""Times the least that is as good, if its regions are larger: much of what a region is taken to
hold XLA fuses, but it keeps what crosses each cut."""

COARSE = 1.3
"""Times the least that larger regions may come to: XLA often computes a part of a region again when
its turn comes, and does not hold all at once. Halves of attention layers with dropout (cuda:h100)
took 404 MiB for 392 of whole layers."""

TIE = 1e-6
"""Part of the bytes that cross a cut by which it is dearer than another at which as many are kept:
equal layers are cut alike, where their results are made."""

_Sizes = npt.NDArray[np.float64]


class Cuts(enum.Enum):
    """Which cuts are best. XLA holds less than either sum says, so neither is always right."""

    AT_ONCE = "at once"
    """Those with the least sum of all that is kept at cuts, and of the largest region."""

    IN_TURN = "in turn"
    """Those with the least that is held in the turn of a region, when what later regions make is
    gone. Seven dense layers (cuda:h100) took 2.29 GiB so, and 2.79 with the least sum."""

    FEW = "few"
    """Fewer than have the least sum, and so larger regions."""

    APART = "apart"
    """Those with the least that a region holds with what enters it, where what enters the others
    may be computed again, too (``solver/nested.py``)."""


def cut_into_regions(
    eqns: Sequence[Eqn], trips: int = 1, *, is_whole: bool = True, best: Cuts = Cuts.AT_ONCE
) -> list[range]:
    """Cut a program into regions: runs of equations.

    Args:
        eqns: The equations of a forward pass, calls inlined.
        trips: How often it runs in a loop: what crosses is kept for each, what lies between once.
        is_whole: Whether they are all of the forward pass, so that nothing follows them; else
            regions have no turn.
        best: Which cuts are best.

    Returns:
        Ranges of equation indices, in order; together they are all equations.
    """
    count = len(eqns)
    cumulative_bytes = np.array([0.0, *itertools.accumulate(bytes_held(eqns))])
    if count < 2 or not cumulative_bytes[-1]:
        return [range(count)]
    lives = _lives(eqns)
    crossing = _crossing(lives, count)
    places = _places(crossing)
    kept = trips * _kept(lives, places) + TIE * crossing[places]
    choices = list(_choices(kept, cumulative_bytes[places]))
    sizes = {"kept": kept, "cumulative_bytes": cumulative_bytes[places]}
    at_once = functools.partial(_held_at_once, **sizes)
    apart = functools.partial(
        _held_apart, crossing=crossing[places], cumulative_bytes=cumulative_bytes[places]
    )
    in_turn = functools.partial(_held_in_turn, **sizes)
    if best is Cuts.FEW:
        choices = _least(choices, at_once, COARSE)
    elif not is_whole:
        choices = _least(choices, at_once)
    elif best is Cuts.APART:
        choices = _least(choices, apart)
    elif best is Cuts.IN_TURN:
        choices = _least(_least(choices, in_turn), at_once)
    else:
        choices = _least(_least(choices, at_once), in_turn)
    regions = [range(places[a], places[b]) for a, b in itertools.pairwise(choices[0])]
    return _joined(eqns, regions) if best is Cuts.APART else regions


def loss_begins(eqns: Sequence[Eqn]) -> int:
    """Where the loss at the end of a program begins: after the last product, made small.

    Its backward pass is next, so it is no part of a region: a region that ended in it would have to
    compute all of the model's last values again before the first of its gradients. It begins where
    the fewest bytes cross, in front of what makes them fewer, and after all that the user has
    named: a name is there to be decided about. A product that makes far less than crosses in front
    of it (a score of each row) is part of the loss.

    Args:
        eqns: The equations of a program that results in a scalar.
    """
    crossing = _crossing(_lives(eqns), len(eqns))

    def is_ours(i: int) -> bool:
        is_large = _bytes_made(eqns[i]) >= SCORES * crossing[i]
        return bool(_jax.named_value(eqns[i])) or (is_large and has_products(eqns[i]))

    begin = max(filter(is_ours, range(len(eqns))), default=-1) + 1
    reduced = (i for i in range(begin, len(eqns)) if _is_reduction(eqns[i]))
    places = range(begin, next(reduced, len(eqns) - 1) + 1)
    return min(places, key=lambda i: crossing[i], default=len(eqns)) if begin else len(eqns)


def has_products(eqn: Eqn) -> bool:
    """Whether an equation is a product, or has one or a loop inside."""
    inside = (e for body in _jax.subjaxprs(eqn) for e in _jax.equations(body))
    return any(e.primitive.name in MATMULS | LOOPS for e in (eqn, *inside))


def _is_reduction(eqn: Eqn) -> bool:
    read = max((_jax.bytes_of(v) for v in eqn.invars if _jax.is_var(v)), default=0)
    return 2 * _bytes_made(eqn) < read


def _bytes_made(eqn: Eqn) -> int:
    return sum(map(_jax.bytes_of, eqn.outvars))


@dataclass(frozen=True)
class _Life:
    """A value between the equation that makes it and the last that reads it.

    Attributes:
        maker: Index of its equation.
        read: Index of the last reader.
        bytes: Its size.
    """

    maker: int
    read: int
    bytes: int


def bytes_held(eqns: Sequence[Eqn]) -> list[float]:
    """Bytes that a region holds for each equation while it is computed again and differentiated.

    What is cheap to compute is part of whatever reads it, and so are rows that are gathered and
    what has no derivative (noise), but products read memory. A product that was computed before is
    held once: XLA makes one of two.
    """
    operands: set[Var] = set()
    sizes: list[float] = []
    same_as, differentiated = _computed_before(eqns), _differentiated(eqns)
    for eqn in reversed(eqns):
        name = eqn.primitive.name
        is_operand = not operands.isdisjoint(eqn.outvars)
        if name in MATMULS or (name in VIEWS and is_operand):
            operands.update(filter(_jax.is_var, eqn.invars))
        bodies = list(map(_jax.open_jaxpr, _jax.subjaxprs(eqn)))
        inside = sum(sum(bytes_held(body.eqns)) for body in bodies)
        has_none = differentiated.isdisjoint(eqn.outvars)
        fused = has_none or name in CHEAP or name == "gather" or bool(bodies)
        is_new = same_as.keys().isdisjoint(eqn.outvars)
        written = is_new and not (name in VIEWS or name in FREE) and (is_operand or not fused)
        result = _bytes_made(eqn) if written else 0
        trips = eqn.params["length"] if name == "scan" else 1
        sizes.append(max(inside * trips, result))
    return sizes[::-1]


def _differentiated(eqns: Sequence[Eqn]) -> set[Var]:
    """What has a derivative by what enters a program."""
    computed = {v for eqn in eqns for v in eqn.outvars}
    differentiated: set[Var] = set()
    for eqn in eqns:
        read = (v for v in eqn.invars if _jax.is_var(v) and _jax.is_inexact(v))
        if any(v in differentiated or v not in computed for v in read):
            differentiated.update(filter(_jax.is_inexact, eqn.outvars))
    return differentiated


def _computed_before(eqns: Sequence[Eqn]) -> dict[Var, Var]:
    """From the result of a product to that of an equal one before it, if there is one."""
    firsts: dict[Any, Var] = {}
    same_as: dict[Var, Var] = {}
    for eqn in eqns:
        if eqn.primitive.name in MATMULS and all(map(_jax.is_var, eqn.invars)):
            read = tuple(same_as.get(v, v) for v in eqn.invars)
            first = firsts.setdefault((eqn.primitive, str(eqn.params), read), eqn.outvars[0])
            if first is not eqn.outvars[0]:
                same_as[eqn.outvars[0]] = first
    return same_as


def _lives(eqns: Sequence[Eqn]) -> list[_Life]:
    makers = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    same_as = _computed_before(eqns)
    read: dict[Var, int] = {}
    for i, eqn in enumerate(eqns):
        read.update((same_as.get(v, v), i) for v in eqn.invars if _jax.is_var(v) and v in makers)
    return [_Life(makers[v], i, _jax.bytes_of(v)) for v, i in read.items() if i > makers[v]]


def _places(crossing: _Sizes) -> list[int]:
    """Where to cut at all: in front of an equation that fewer bytes cross than both neighbours.

    Where those are too many, the best of each neighbourhood: a part of the program in which values
    are small has no more of them than another.
    """
    count = len(crossing) - 1
    inside = [
        i
        for i in range(1, count)
        if crossing[i] <= crossing[i - 1] and crossing[i] <= crossing[i + 1]
    ]
    together = -(-len(inside) // MOST_CUTS) or 1
    neighbours = (inside[i : i + together] for i in range(0, len(inside), together))
    return [0, *(min(some, key=lambda i: crossing[i]) for some in neighbours), count]


def _crossing(lives: Sequence[_Life], count: int) -> _Sizes:
    """Bytes made before each equation, and before the end, that are read there or later."""
    crossing = np.zeros(count + 1)
    for life in lives:
        crossing[life.maker + 1] += life.bytes
        crossing[life.read + 1] -= life.bytes
    return np.cumsum(crossing)


def _kept(lives: Sequence[_Life], places: Sequence[int]) -> _Sizes:
    """Bytes that a region between two places (row, column) makes for what comes after it."""
    size = len(places)
    corners = np.zeros((size + 1, size + 1))
    after = np.searchsorted(places, [life.maker for life in lives], side="right")
    until = np.searchsorted(places, [life.read for life in lives], side="right")
    for life, first, last in zip(lives, after, until, strict=True):
        # Regions that begin at a place up to its equation, and end at one up to its last reader.
        corners[0, first] += life.bytes
        corners[0, last] -= life.bytes
        corners[first, first] -= life.bytes
        corners[first, last] += life.bytes
    return corners.cumsum(0).cumsum(1)[:size, :size]


def _choices(kept: _Sizes, cumulative_bytes: _Sizes) -> Iterator[list[int]]:
    """Cuts at which the fewest bytes are kept, from large regions to small ones."""
    limit = cumulative_bytes[-1]
    while limit > LEAST_REGION * cumulative_bytes[-1]:
        cuts = _fewest_kept(kept, cumulative_bytes, limit)
        yield cuts
        largest = max(
            cumulative_bytes[b] - cumulative_bytes[a] for a, b in itertools.pairwise(cuts)
        )
        limit = SMALLER * min(limit, largest)


def _fewest_kept(kept: _Sizes, cumulative_bytes: _Sizes, limit: float) -> list[int]:
    """The cuts at which the fewest bytes are kept: indices of places, the program's ends included.

    No region holds more than ``limit``, but for those without a place to cut them.
    """
    size = len(cumulative_bytes)
    least = np.full(size, np.inf)
    least[0] = 0.0
    before = np.zeros(size, dtype=int)
    for end in range(1, size):
        sizes = cumulative_bytes[end] - cumulative_bytes[:end]
        allowed = sizes <= limit
        allowed[-1] = True
        costs = np.where(allowed, least[:end] + kept[:end, end], np.inf)
        # The last of equal ones: what a region begins with is made by the one before, and so kept
        # already when it is computed again.
        before[end] = end - 1 - int(costs[::-1].argmin())
        least[end] = costs[before[end]]
    cuts = [size - 1]
    while cuts[-1]:
        cuts.append(int(before[cuts[-1]]))
    return cuts[::-1]


def _least(
    choices: Sequence[list[int]], size: Callable[[list[int]], float], times: float = AS_GOOD
) -> list[list[int]]:
    """Those of the cuts that are about as good as the best."""
    sizes = [size(cuts) for cuts in choices]
    enough = times * min(sizes)
    return [cuts for cuts, needed in zip(choices, sizes, strict=True) if needed <= enough]


def _joined(eqns: Sequence[Eqn], regions: Sequence[range]) -> list[range]:
    """The regions, those that hold next to nothing by themselves joined to the one after them.

    They would be none, and what their own backward pass reads would stay, whatever is dropped.
    """
    sizes = [sum(bytes_held(eqns[run.start : run.stop])) for run in regions]
    joined: list[range] = []
    for run, size in zip(reversed(regions), reversed(sizes), strict=True):
        if joined and size <= SMALL * max(sizes):
            joined[-1] = range(run.start, joined[-1].stop)
        else:
            joined.append(run)
    return joined[::-1]


def _held_at_once(cuts: Sequence[int], kept: _Sizes, cumulative_bytes: _Sizes) -> float:
    """Bytes of all that is kept at the cuts, and of the largest region."""
    regions = list(itertools.pairwise(cuts))
    largest = max(cumulative_bytes[b] - cumulative_bytes[a] for a, b in regions)
    return sum(float(kept[region]) for region in regions) + largest


def _held_in_turn(cuts: Sequence[int], kept: _Sizes, cumulative_bytes: _Sizes) -> float:
    """The same, but that what later regions make is gone when a region is computed again."""
    regions = list(itertools.pairwise(cuts))
    before = itertools.accumulate((float(kept[region]) for region in regions[:-1]), initial=0.0)
    return max(
        cumulative_bytes[b] - cumulative_bytes[a] + more
        for (a, b), more in zip(regions, before, strict=True)
    )


def _held_apart(cuts: Sequence[int], crossing: _Sizes, cumulative_bytes: _Sizes) -> float:
    """Bytes of the region that holds the most with what enters it."""
    return max(
        float(cumulative_bytes[b] - cumulative_bytes[a] + crossing[a])
        for a, b in itertools.pairwise(cuts)
    )
