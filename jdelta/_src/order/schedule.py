"""An order of operators with a low peak.

Two passes over the program, each about ``n log n``, make an order that is mostly best already: what
takes memory as late as possible, what leads to results only as early as it fits. Only where that
stays above what every order needs, rows of operators around the peak are solved exactly.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from jdelta._src.order.bound import lower_bound
from jdelta._src.order.exact import solved
from jdelta._src.order.lists import delayed_order
from jdelta._src.order.problem import Order, Problem
from jdelta._src.order.segments import separators
from jdelta._src.order.tails import updated_early

LEAF = (40, 20, 10)
"""Operators in a row that is solved exactly; fewer where it is too wide."""

LEAVES = 64
"""Rows that are solved at most."""

NEAR = 1.0001
"""Times the bound from which on a lower peak is not worth looking for in a large program."""

LARGE = 2000
"""Operators beyond which a program is large."""


@dataclass(frozen=True)
class Arrangement:
    """An order, and how good it is.

    Attributes:
        order: The operators.
        peak: Most bytes alive at once.
        bound: Bytes that no order goes below.
    """

    order: tuple[int, ...]
    peak: int
    bound: int


def arrange(problem: Problem) -> Arrangement:
    """Find an order with a low peak, never a higher one than in program order."""
    first = delayed_order(problem, problem.program)
    bound = lower_bound(problem, first)
    enough = bound * NEAR if len(problem) > LARGE else bound
    orders: list[Order] = [problem.program, first]
    for base in (problem.program, first):
        if problem.peak(orders[-1]) > enough:
            orders.append(updated_early(problem, base, bound))
    order = min(orders, key=problem.peak)
    if problem.peak(order) > enough:
        bound = max(bound, lower_bound(problem, order))
        order = _refined(problem, list(order), bound)
    return Arrangement(tuple(order), problem.peak(order), bound)


def _refined(problem: Problem, order: list[int], bound: int) -> list[int]:
    """The order with rows around its peak solved, until the bound is met or nothing is gained."""
    limits = separators(problem)
    for _ in range(LEAVES):
        timeline = problem.timeline(order)
        place = int(timeline.argmax())
        if timeline[place] <= bound:
            break
        rows = (_leaf(limits, order, place, size) for size in LEAF)
        better = next(filter(None, (_solved(problem, order, row) for row in rows)), None)
        if better is None:
            break
        order = better
    return order


def _solved(problem: Problem, order: list[int], row: range) -> list[int] | None:
    """The order with a row solved, if that lowers the row's peak."""
    better = solved(problem, order, row)
    if better is None:
        return None
    changed = [*order[: row.start], *better, *order[row.stop :]]
    inside = slice(row.start, row.stop)
    before, after = (problem.timeline(o)[inside].max() for o in (order, changed))
    return changed if after < before else None


def _leaf(limits: list[int], order: list[int], place: int, size: int) -> range:
    """Places around one, as far as the next separators; what is beyond them need not be mixed in.

    A separator has the same place in every order.
    """
    at = bisect.bisect_right(limits, place)
    start = max(0, place - size // 2, limits[at - 1] if at else 0)
    stop = min(len(order), start + size, limits[at] + 1 if at < len(limits) else len(order))
    return range(start, stop)
