"""Orders made one operator at a time: as late as it costs nothing, as early as it frees memory."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from jdelta._src.order.problem import Order, Problem, integers

LONGEST = 64
"""Operators that are tried in a row to see whether they free memory in the end."""


def delayed_order(problem: Problem, order: Order) -> list[int]:
    """The order with each operator put off as long as what it reads takes no more than its results.

    Built from the end: an operator whose dependents are all placed is placed in front of them if
    that takes no memory, else when its turn in the given order comes.
    """
    allocated, used, sizes = problem.allocated, problem.used, array("q", problem.bytes.tobytes())
    rank = inverse(order)
    waiting = integers(problem.successors.counts())
    alive = bytearray(problem.kept.tobytes())
    placed = bytearray(len(problem))

    def is_free(index: int) -> bool:
        """Whether memory does not grow, seen from the end, if an operator is placed there."""
        grown = 0
        for t in used[index]:
            if not alive[t]:
                grown += sizes[t]
        for t in allocated[index]:
            if alive[t]:
                grown -= sizes[t]
        return grown <= 0

    ready = [-rank[i] for i in problem.program if not waiting[i]]  # the last one comes first
    heapq.heapify(ready)
    free = [order[-place] for place in ready if is_free(order[-place])]
    backwards: list[int] = []
    while ready or free:
        index = free.pop() if free else order[-heapq.heappop(ready)]
        if placed[index]:
            continue
        placed[index] = True
        backwards.append(index)
        for before in problem.predecessors[index]:
            waiting[before] -= 1
            if not waiting[before]:
                heapq.heappush(ready, -rank[before])
        cheaper = _cheaper(problem, index, alive, waiting)
        free.extend(other for other in cheaper if not placed[other] and is_free(other))
    return backwards[::-1]


def _cheaper(
    problem: Problem, index: int, alive: bytearray, waiting: Sequence[int]
) -> Iterator[int]:
    """Operators that have become ready, or cheaper, since an operator was placed."""
    for t in problem.used[index]:
        if not alive[t]:
            alive[t] = True
            for user in problem.users[t]:
                if not waiting[user]:
                    yield user
    for before in problem.predecessors[index]:
        if not waiting[before]:
            yield before


def inverse(order: Order) -> array[int]:
    """For each operator its place in an order."""
    places = np.empty(len(order), dtype=np.int32)
    places[np.asarray(order, dtype=np.int64)] = np.arange(len(order))
    return integers(places)
