"""Checks a solution against its problem, sharing no code with what made it.

The recompute closure is derived here a second time, as a walk up from each value that the backward
pass reads, where ``Problem.recomputed`` sweeps the items in reverse: the two have to agree.
"""

import math

from jdelta._src.decision import Decision
from jdelta._src.solver.problem import Memory, Problem
from jdelta._src.solver.solution import Solution


def validate(problem: Problem, solution: Solution) -> list[str]:
    """List everything that is wrong with a solution.

    Args:
        problem: What was to be solved.
        solution: What a solver answered.

    Returns:
        One sentence for each fault, naming what was expected and what came; empty if there is none.
    """
    actual, expected = len(solution.decisions), len(problem.items)
    if actual != expected:
        return [f"there are {expected} items, but {actual} decisions"]
    return [
        *_forbidden(problem, solution),
        *_overfull(problem, solution),
        *_figures(problem, solution),
    ]


def _forbidden(problem: Problem, solution: Solution) -> list[str]:
    """Items in a memory that they have no way to, or that is not there."""
    tiers = {memory.decision for memory in problem.memories} | {Decision.SAVE, Decision.RECOMPUTE}
    stay = {Decision.SAVE, Decision.RECOMPUTE}
    return [
        f"the decision for item {item.name!r} is {decision.value}, but it may only be "
        f"{', '.join(d.value for d in Decision if d in allowed)}"
        for item, decision in zip(problem.items, solution.decisions, strict=True)
        if decision not in (allowed := tiers & (stay | {move.to for move in item.moves}))
    ]


def _overfull(problem: Problem, solution: Solution) -> list[str]:
    """Memories that hold more than their capacity."""
    used = [
        (Decision.SAVE, problem.capacity),
        *((t.decision, t.capacity) for t in problem.memories),
    ]
    totals = _bytes(problem, solution)
    return [
        f"{totals[d]} bytes have the decision {d.value}, above the capacity of {capacity} bytes"
        for d, capacity in used
        if not totals[d] <= capacity
    ]


def _figures(problem: Problem, solution: Solution) -> list[str]:
    """Figures of the solution that differ from what its decisions give."""
    totals = _bytes(problem, solution)
    if len(solution.moved_bytes) != len(problem.memories):
        return [
            f"there are {len(problem.memories)} memories, but moved_bytes {solution.moved_bytes}"
        ]
    figures = [
        ("overhead", solution.overhead, _seconds(problem, solution)),
        ("kept_bytes", solution.kept_bytes, totals[Decision.SAVE]),
        *(
            (f"moved_bytes ({memory.decision.value})", said, totals[memory.decision])
            for memory, said in zip(problem.memories, solution.moved_bytes, strict=True)
        ),
    ]
    return [
        f"{name} says {said}, but the decisions give {true}"
        for name, said, true in figures
        if not math.isclose(said, true, rel_tol=1e-9, abs_tol=1e-15)
    ]


def _bytes(problem: Problem, solution: Solution) -> dict[Decision, float]:
    """Bytes in each memory, by the decision that puts an item there."""
    by_decision: dict[Decision, list[float]] = {decision: [] for decision in Decision}
    for item, decision in zip(problem.items, solution.decisions, strict=True):
        sizes = {move.to: move.bytes for move in item.moves}
        by_decision[decision].append(sizes.get(decision, item.bytes))
    return {decision: math.fsum(sizes) for decision, sizes in by_decision.items()}


def _seconds(problem: Problem, solution: Solution) -> float:
    """Seconds added to the step: exposed transfers, what is computed again, what saving costs."""
    pairs = zip(problem.items, solution.decisions, strict=True)
    holding = [item.holding for item, decision in pairs if decision is Decision.SAVE]
    spared = [-item.holding for item in problem.items if item.needed]
    recompute = [problem.items[index].seconds for index in _again(problem, solution)]
    exposed = [_exposed(problem, solution, memory) for memory in problem.memories]
    return math.fsum((*holding, *spared, *recompute, *exposed))


def _exposed(problem: Problem, solution: Solution, memory: Memory) -> float:
    """Seconds of a link that compute does not hide."""
    moves = [
        move
        for item, decision in zip(problem.items, solution.decisions, strict=True)
        for move in item.moves
        if move.to is decision is memory.decision
    ]
    late_out = math.fsum(move.seconds_out for move in moves) - memory.hidden_out
    late_in = math.fsum(move.seconds_in for move in moves) - memory.hidden_in
    bare = math.fsum(move.seconds_exposed for move in moves)
    return bare + max(late_out, 0.0) + max(late_in, 0.0)


def _again(problem: Problem, solution: Solution) -> set[int]:
    """Indices of the dropped items that some value read in the backward pass cannot do without."""
    wanted = [index for index, item in enumerate(problem.items) if item.needed]
    dropped: set[int] = set()
    while wanted:
        index = wanted.pop()
        if solution.decisions[index] is Decision.RECOMPUTE and index not in dropped:
            dropped.add(index)
            wanted.extend(problem.items[index].sources)
    return dropped
