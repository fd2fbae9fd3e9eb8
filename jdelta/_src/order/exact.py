"""The best order of a few operators: a shortest path through the sets that may have run."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from jdelta._src.order.problem import Order, Problem

MOST_SETS = 20_000
"""Sets of operators looked at before the search is given up."""


def solved(problem: Problem, order: Order, row: range, most: int = MOST_SETS) -> list[int] | None:
    """The operators in a row of an order, so that their peak is lowest; the others stay.

    Sets that may have run are the nodes of a graph, operators its edges; a path is as long as its
    highest operator. An operator that fits under the peak so far and leaves no more alive than was
    is run at once: what is alive is submodular, so that is never worse.

    Args:
        problem: The program.
        order: An order of it.
        row: Places in that order.
        most: Sets to look at.

    Returns:
        The operators of the row; None if there were too many sets.
    """
    chosen = [order[place] for place in row]
    leaf = _Leaf(problem, chosen, set(order[row.stop :]))
    everything = (1 << len(chosen)) - 1
    heap: list[tuple[int, int, int, int, tuple[int, ...]]] = [(0, 0, 0, 0, ())]
    seen: set[int] = set()
    while heap and len(seen) < most:
        peak, _, done, live, path = heapq.heappop(heap)
        if done in seen:
            continue
        seen.add(done)
        if done == everything:
            return [chosen[i] for i in path]
        for step in leaf.steps(done, live, peak):
            if step.done not in seen:
                entry = max(peak, step.peak), -len(path) - 1, step.done, step.live
                heapq.heappush(heap, (*entry, (*path, step.operator)))
    return None


@dataclass(frozen=True)
class _Step:
    """One more operator.

    Attributes:
        operator: Its place among the chosen.
        done: The set that has run then, as bits.
        peak: Bytes alive while it runs, beside what was when the first one ran.
        live: Bytes alive after it, likewise.
    """

    operator: int
    done: int
    peak: int
    live: int


class _Leaf:
    """The chosen operators: what each waits for, and what each makes and frees."""

    def __init__(self, problem: Problem, chosen: Sequence[int], later: set[int]):
        place = {index: i for i, index in enumerate(chosen)}
        self._waits = [
            sum(1 << place[p] for p in problem.predecessors[i] if p in place) for i in chosen
        ]
        self._takes = [sum(problem.tensors[t].bytes for t in problem.allocated[i]) for i in chosen]
        self._frees: list[list[tuple[int, int]]] = [[] for _ in chosen]
        for t in dict.fromkeys(
            t for i in chosen for t in (*problem.allocated[i], *problem.used[i])
        ):
            tensor = problem.tensors[t]
            inside = [place[i] for i in (tensor.maker, *tensor.users) if i in place]
            if not tensor.kept and later.isdisjoint(tensor.users):
                users = sum(1 << i for i in inside)
                for i in inside:
                    self._frees[i].append((users, tensor.bytes))

    def steps(self, done: int, live: int, peak: int) -> list[_Step]:
        """The operators that can run next; a single one where it is never worse to run it."""
        steps: list[_Step] = []
        for i, waits in enumerate(self._waits):
            if done >> i & 1 or waits & ~done:
                continue
            now = done | 1 << i
            taken = live + self._takes[i]
            left = taken - sum(size for users, size in self._frees[i] if not users & ~now)
            step = _Step(i, now, taken, left)
            if step.live <= live and step.peak <= peak:
                return [step]
            steps.append(step)
        return steps
