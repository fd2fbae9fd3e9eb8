"""Checks an order and a layout. Shares no code with what makes them."""

from __future__ import annotations

from collections.abc import Sequence

from jdelta._order.problem import Problem


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
    wrong: list[str] = []
    if sorted(order) != list(range(len(problem.predecessors))):
        return ["the order does not hold every operator once"]
    highest, ran = 0, set[int]()
    waiting = [set(t.users) for t in problem.tensors]
    taken: dict[int, tuple[int, int]] = {}
    for index in order:
        wrong += [
            f"operator {index} runs before {p}" for p in problem.predecessors[index] if p not in ran
        ]
        ran.add(index)
        for t, tensor in enumerate(problem.tensors):
            if tensor.maker == index and tensor.bytes:
                span = offsets[t], offsets[t] + tensor.bytes
                wrong += [
                    f"tensors {t} and {other} share bytes while operator {index} runs"
                    for other, there in taken.items()
                    if span[0] < there[1] and there[0] < span[1]
                ]
                taken[t] = span
            if index in tensor.users and tensor.maker not in ran:
                wrong.append(f"operator {index} uses tensor {t}, which is not made")
        held = sum(end - begin for begin, end in taken.values())
        highest = max(highest, held)
        for t in list(taken):
            waiting[t].discard(index)
            if not waiting[t] and not problem.tensors[t].kept:
                del taken[t]
    if highest != peak:
        wrong.append(f"the peak is {highest}, not {peak}")
    top = max((o + t.bytes for o, t in zip(offsets, problem.tensors, strict=True)), default=0)
    if top != arena or min(offsets, default=0) < 0:
        wrong.append(f"the tensors take {min(offsets, default=0)} to {top}, not 0 to {arena}")
    return wrong
