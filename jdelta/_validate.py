"""Checks a solution against its problem, sharing no code with what made it.

The recompute closure is derived here a second time, as a walk up from each value that the backward
pass reads, where ``Problem.recomputed`` sweeps the items in reverse: the two have to agree.
"""

import math

from jdelta._decision import Decision
from jdelta._problem import Problem
from jdelta._solution import Solution


def validate(problem: Problem, solution: Solution) -> list[str]:
    """List everything that is wrong with a solution.

    Args:
        problem: What was to be solved.
        solution: What a solver answered.

    Returns:
        One sentence for each fault, naming what was expected and what came; empty if there is none.
    """
    given, expected = len(solution.decisions), len(problem.items)
    if given != expected:
        return [f"there are {expected} items, but {given} decisions"]
    return [
        *_forbidden(problem, solution),
        *_overfull(problem, solution),
        *_figures(problem, solution),
    ]


def _forbidden(problem: Problem, solution: Solution) -> list[str]:
    """Items offloaded although a direction of the link is closed to them."""
    return [
        f"item {item.name!r} is offloaded, but needs {item.seconds_out} s to leave and "
        f"{item.seconds_in} s to return"
        for item, decision in zip(problem.items, solution.decisions, strict=True)
        if decision is Decision.OFFLOAD and not math.isfinite(item.seconds_out + item.seconds_in)
    ]


def _overfull(problem: Problem, solution: Solution) -> list[str]:
    """Memories that hold more than their capacity."""
    device, host = _bytes(problem, solution)
    used = (("device", device, problem.capacity), ("host", host, problem.host_capacity))
    return [
        f"{memory} memory holds {held} bytes, above its capacity of {capacity} bytes"
        for memory, held, capacity in used
        if not held <= capacity
    ]


def _figures(problem: Problem, solution: Solution) -> list[str]:
    """Figures of the solution that differ from what its decisions give."""
    device, host = _bytes(problem, solution)
    figures = (
        ("overhead", solution.overhead, _seconds(problem, solution)),
        ("kept_bytes", solution.kept_bytes, device),
        ("host_bytes", solution.host_bytes, host),
    )
    return [
        f"{name} says {said}, but the decisions give {true}"
        for name, said, true in figures
        if not math.isclose(said, true, rel_tol=1e-9, abs_tol=1e-15)
    ]


def _bytes(problem: Problem, solution: Solution) -> tuple[float, float]:
    """Bytes on the device and on the host."""
    held: dict[Decision, list[float]] = {decision: [] for decision in Decision}
    for item, decision in zip(problem.items, solution.decisions, strict=True):
        held[decision].append(item.host_bytes if decision is Decision.OFFLOAD else item.bytes)
    return math.fsum(held[Decision.SAVE]), math.fsum(held[Decision.OFFLOAD])


def _seconds(problem: Problem, solution: Solution) -> float:
    """Seconds added to the step: each direction's exposed transfers, and what is computed again."""
    moved = [
        item
        for item, decision in zip(problem.items, solution.decisions, strict=True)
        if decision is Decision.OFFLOAD
    ]
    bare = math.fsum(item.seconds_exposed for item in moved)
    late_out = math.fsum(item.seconds_out for item in moved) - problem.hidden_out
    late_in = math.fsum(item.seconds_in for item in moved) - problem.hidden_in
    again = math.fsum(problem.items[index].seconds for index in _again(problem, solution))
    return again + bare + max(late_out, 0.0) + max(late_in, 0.0)


def _again(problem: Problem, solution: Solution) -> set[int]:
    """Indices of the dropped items that some value read in the backward pass cannot do without."""
    wanted = [index for index, item in enumerate(problem.items) if item.needed]
    found: set[int] = set()
    while wanted:
        index = wanted.pop()
        if solution.decisions[index] is Decision.RECOMPUTE and index not in found:
            found.add(index)
            wanted.extend(problem.items[index].sources)
    return found
