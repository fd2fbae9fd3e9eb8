"""Checks an order and a layout. Shares no code with what makes them."""

from __future__ import annotations

from collections.abc import Sequence

from jdelta._src.order.problem import Problem


def complaints(
    problem: Problem, order: Sequence[int], peak: int, offsets: Sequence[int], arena: int
) -> list[str]:
    """What is wrong with an order and a layout; empty if nothing is.

    Args:
        problem: What was ordered.
        order: Operators, each once.
        peak: The most bytes said to be alive at once.
        offsets: For each tensor the first of its bytes.
        arena: Bytes said to be taken altogether.
    """
    if sorted(order) != list(range(len(problem.predecessors))):
        return ["the order does not hold every operator once"]
    return [
        *_not_topological(problem, order),
        *_memory(problem, order, peak, offsets),
        *_extent(problem, offsets, arena),
    ]


def _not_topological(problem: Problem, order: Sequence[int]) -> list[str]:
    wrong: list[str] = []
    ran: set[int] = set()
    for index in order:
        needed = {p for p in problem.predecessors[index] if p not in ran}
        needed |= {t.maker for t in problem.tensors if index in t.users and t.maker not in ran}
        wrong += [f"operator {index} runs before {other}" for other in sorted(needed)]
        ran.add(index)
    return wrong


def _memory(problem: Problem, order: Sequence[int], peak: int, offsets: Sequence[int]) -> list[str]:
    """Runs the operators one by one, with the bytes that each tensor takes."""
    wrong: list[str] = []
    waiting = [{*t.users} for t in problem.tensors]
    taken: dict[int, range] = {}
    highest = 0
    for index in order:
        for t, tensor in enumerate(problem.tensors):
            if tensor.maker == index and tensor.bytes:
                span = range(offsets[t], offsets[t] + tensor.bytes)
                wrong += [
                    f"tensors {other} and {t} share bytes at operator {index}"
                    for other, other_span in taken.items()
                    if span.start < other_span.stop and other_span.start < span.stop
                ]
                taken[t] = span
        highest = max(highest, sum(map(len, taken.values())))
        for t in waiting:
            t.discard(index)
        taken = {t: s for t, s in taken.items() if waiting[t] or problem.tensors[t].kept}
    return wrong if highest == peak else [*wrong, f"the peak is {highest}, not {peak}"]


def _extent(problem: Problem, offsets: Sequence[int], arena: int) -> list[str]:
    ends = [o + t.bytes for o, t in zip(offsets, problem.tensors, strict=True)]
    if min(offsets, default=0) >= 0 and max(ends, default=0) == arena:
        return []
    return [f"tensors reach from {min(offsets)} to {max(ends)}, not from 0 to {arena}"]
