"""Orders made one operator at a time: as late as it costs nothing, as early as it frees memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from jdelta._order.problem import Order, Problem

LONGEST = 64
"""Operators that are tried in a row to see whether they free memory in the end."""


def late(problem: Problem, order: Order) -> list[int]:
    """The order with each operator put off as long as what it reads takes no more than its results.

    Built from the end: an operator whose dependents are all placed is placed in front of them if
    that takes no memory, else when its turn in the given order comes.
    """
    rank = inverse(order)
    waiting = [len(after) for after in problem.successors]
    alive = [t.kept for t in problem.tensors]
    placed = [False] * len(problem)
    ready = [(-rank[i], i) for i in problem.program if not waiting[i]]
    heapq.heapify(ready)
    free = [i for _, i in ready if _growth(problem, i, alive) <= 0]
    backwards: list[int] = []
    while ready or free:
        index = free.pop() if free else heapq.heappop(ready)[1]
        if placed[index]:
            continue
        placed[index] = True
        backwards.append(index)
        for before in problem.predecessors[index]:
            waiting[before] -= 1
            if not waiting[before]:
                heapq.heappush(ready, (-rank[before], before))
        free += [
            candidate
            for candidate in _cheaper(problem, index, alive, waiting)
            if not placed[candidate] and _growth(problem, candidate, alive) <= 0
        ]
    return backwards[::-1]


def _growth(problem: Problem, index: int, alive: Sequence[bool]) -> int:
    """Bytes by which memory grows, seen from the end, if an operator is placed there."""
    tensors = problem.tensors
    grown = sum(tensors[t].bytes for t in problem.used[index] if not alive[t])
    return grown - sum(tensors[t].bytes for t in problem.made[index] if alive[t])


def _cheaper(
    problem: Problem, index: int, alive: list[bool], waiting: Sequence[int]
) -> Iterator[int]:
    """Operators that have become ready, or cheaper, since an operator was placed."""
    for t in problem.used[index]:
        if not alive[t]:
            alive[t] = True
            yield from (u for u in problem.tensors[t].users if not waiting[u])
    yield from (p for p in problem.predecessors[index] if not waiting[p])


def inverse(order: Order) -> list[int]:
    """For each operator its place in an order."""
    places = [0] * len(order)
    for place, index in enumerate(order):
        places[index] = place
    return places
