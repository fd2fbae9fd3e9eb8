"""Branches that lead to results only, such as weight updates, and when they run.

An update frees a gradient, and what the gradient is made from; but while it runs it takes memory
of its own, so near the peak it has to wait.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from jdelta._src.order.lists import delayed_order, inverse
from jdelta._src.order.problem import CORE, Order, Problem

ROUNDS = 8
"""Times that branches which make the peak are put off."""

_AT_ONCE: Mapping[int, int] = MappingProxyType({})


def early(problem: Problem, order: Order, wait: Mapping[int, int] = _AT_ONCE) -> list[int]:
    """The order with each branch run as soon as what it needs from outside is there.

    Args:
        problem: The operators.
        order: Where the others stay.
        wait: From branches to places in the order that they wait for.
    """
    branch, rank = problem.branches, inverse(order)
    anchor, turn = list(rank), [-1] * len(rank)
    for index, end in enumerate(branch):
        if end != CORE:
            before = [anchor[p] for p in problem.predecessors[index]]
            anchor[index] = max(*before, wait.get(end, -1), -1)
            turn[index] = rank[end]
    return np.lexsort((rank, turn, anchor)).tolist()


def updated_early(problem: Problem, order: Order, target: int) -> list[int]:
    """The order with its branches run early, but where that would make a peak above the target.

    Such a branch waits until it fits under the target beside what is alive then.
    """
    branch, rank = problem.branches, inverse(order)
    wait: dict[int, int] = {}
    tried: list[list[int]] = []
    for _ in range(ROUNDS):
        tried.append(delayed_order(problem, early(problem, order, wait)))
        heights = _heights(problem, tried[-1], branch, target)
        if not heights:
            break
        wait |= _later(problem, tried[-1], branch, rank, heights, target)
    return min(tried, key=problem.peak)


def _heights(problem: Problem, order: Order, branch: list[int], target: int) -> dict[int, int]:
    """What the branches that go above the target take beside what the core has alive."""
    heights: dict[int, int] = {}
    core = 0
    for index, live in zip(order, problem.timeline(order).tolist(), strict=True):
        if branch[index] == CORE:
            core = live
        elif live > target:
            heights[branch[index]] = max(heights.get(branch[index], 0), live - core)
    return heights


def _later(
    problem: Problem,
    order: Order,
    branch: list[int],
    rank: array[int],
    heights: Mapping[int, int],
    target: int,
) -> dict[int, int]:
    """For branches the place of the first core operator after them beside which they fit."""
    places = inverse(order)
    core = np.array([i for i in order if branch[i] == CORE], dtype=np.int64)
    live = problem.timeline(order)[np.array(places)[core]]
    ranks: dict[int, int] = {}
    for end, height in heights.items():
        after = np.array(places)[core] > places[end]
        fitting = core[after & (live + height <= target)]
        ranks[end] = rank[int(fitting[0])] if len(fitting) else len(problem)
    return ranks
