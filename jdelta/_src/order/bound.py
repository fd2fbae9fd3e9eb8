"""A peak that no order can go below, and the cut of the program that shows it.

When an operator runs, some operators have run and the others have not: a cut of the program, with
what the operator needs on one side and what needs it on the other. What crosses the cut is alive.
The least that can cross is a minimum cut of a flow network (submodular, so found exactly), and no
order has less alive there. ROAM's bound, the tensors made before an operator and needed after it
in every order, is the part of this that needs no flow; it misses that of a value and one
made from it, which may be put off, either has to be alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy

from jdelta._src.order.problem import CORE, Groups, Ints, Order, Problem

Mask = npt.NDArray[np.bool_]

CUTS = 32
"""Operators whose cuts are looked at for a bound."""

_CAPACITY = 2**29
"""What all bytes are scaled to: flows are 32-bit integers."""


@dataclass(frozen=True)
class Cut:
    """The least that can be alive while an operator runs.

    Attributes:
        operator: The operator.
        bytes: What is alive, what it makes included.
        before: Which operators have run; the smallest such set.
    """

    operator: int
    bytes: int
    before: Mask


def forced(problem: Problem, operator: int) -> int:
    """ROAM's bound at an operator: bytes that are alive while it runs, whatever the order.

    A tensor is, if the operator depends on its maker and if a user of it depends on the operator.
    """
    sides = _Sides(problem, operator)
    return int(problem.bytes[sides.alive].sum())


def cut(problem: Problem, operator: int) -> Cut:
    """The least that can be alive while an operator runs."""
    sides = _Sides(problem, operator)
    fixed = int(problem.bytes[sides.alive].sum())
    free = np.flatnonzero(~sides.before & ~sides.after)
    bytes_cut, chosen = _least(problem, sides, free)
    before = sides.before.copy()
    before[free[chosen]] = True
    before[operator] = False
    return Cut(operator, fixed + bytes_cut, before)


class _Sides:
    """What has to come before and after an operator, both with itself, and what is alive for it."""

    def __init__(self, problem: Problem, operator: int):
        self.before = reach(problem.predecessors, operator)
        self.after = reach(problem.successors, operator)
        tensors, users = problem.uses
        self.needed = problem.kept.copy()
        self.needed[tensors[self.after[users]]] = True
        self.needed[list(problem.allocated[operator])] = True
        self.alive = self.needed & self.before[problem.makers]


def reach(neighbours: Sequence[Sequence[int]] | Groups, start: int) -> Mask:
    """Which operators can be reached from one, itself included."""
    seen = np.zeros(len(neighbours), dtype=bool)
    seen[start] = True
    stack = [start]
    while stack:
        for other in neighbours[stack.pop()]:
            if not seen[other]:
                seen[other] = True
                stack.append(other)
    return seen


def _least(problem: Problem, sides: _Sides, free: Ints) -> tuple[int, Mask]:
    """Least bytes that cross beside the fixed ones, and which free operators run before."""
    tensors = _may_cross(problem, sides)
    if not len(free) or not len(tensors):
        return 0, np.zeros(len(free), dtype=bool)
    source = len(free) + len(tensors)
    unit = max(1, -(-int(problem.bytes[tensors].sum()) // _CAPACITY))
    network = _network(problem, sides, free, tensors, unit)
    flow: Any = scipy.sparse.csgraph.maximum_flow(network, source, source + 1)
    left = network - flow.flow
    left.data[left.data < 0] = 0
    left.eliminate_zeros()
    reached = np.zeros(source + 2, dtype=bool)
    order = scipy.sparse.csgraph.breadth_first_order(left, source, return_predecessors=False)
    reached[order] = True
    return int(flow.flow_value) * unit, reached[: len(free)]


def _network(problem: Problem, sides: _Sides, free: Ints, tensors: Ints, unit: int) -> Any:
    """The flow network: free operators, tensors that may cross, source (has run), sink (has not).

    From a tensor's maker to the tensor go its bytes; from a tensor to its users, and from operators
    to what they need, more than anything can carry.
    """
    source, sink = len(free) + len(tensors), len(free) + len(tensors) + 1
    operator = np.where(sides.before, source, sink)
    operator[free] = np.arange(len(free))
    tensor = np.full(len(problem.tensors), -1)
    tensor[tensors] = len(free) + np.arange(len(tensors))
    pairs, users = problem.uses
    used = (tensor[pairs] >= 0) & (operator[users] != sink)  # once to the sink is enough
    needed = tensors[sides.needed[tensors]]
    waits = np.array([(i, p) for i in free for p in problem.predecessors[i]], dtype=np.int64)
    waits = waits.reshape(-1, 2)
    tails = (operator[problem.makers[tensors]], tensor[pairs[used]], tensor[needed])
    heads = (tensor[tensors], operator[users[used]], np.full(len(needed), sink))
    tail = np.concatenate([*tails, operator[waits[:, 0]]])
    head = np.concatenate([*heads, operator[waits[:, 1]]])
    endless = np.full(len(tail) - len(tensors), 2 * _CAPACITY)
    carried = np.concatenate([problem.bytes[tensors] // unit, endless])
    kept = (head != source) & (carried > 0)
    cells = carried[kept].astype(np.int32), (tail[kept], head[kept])
    return scipy.sparse.csr_array(scipy.sparse.coo_array(cells, shape=(sink + 1, sink + 1)))


def _may_cross(problem: Problem, sides: _Sides) -> Ints:
    """Tensors that are alive while the operator runs in some order, but not in every one."""
    made_late = sides.after[problem.makers]
    pairs, users = problem.uses
    outlives = problem.kept.copy()
    outlives[pairs[~sides.before[users]]] = True
    return np.flatnonzero(~made_late & ~sides.alive & outlives & (problem.bytes > 0))


def lower_bound(problem: Problem, order: Order, most: int = CUTS) -> int:
    """The most that is alive in every order, as far as the peaks of one order show it.

    No cut has more alive than any order has at its operator. So operators are looked at from the
    highest of the order down, until one is no higher than the best cut; of those that only results
    depend on a few, since they can run when little is alive.
    """
    timeline = problem.timeline(order)
    branch = problem.branches
    best, left = 0, {True: most - most // 4, False: most // 4}
    for place in np.argsort(-timeline, kind="stable").tolist():
        if timeline[place] <= best or not any(left.values()):
            break
        index = order[place]
        if left[branch[index] == CORE]:
            left[branch[index] == CORE] -= 1
            best = max(best, cut(problem, index).bytes)
    return best
