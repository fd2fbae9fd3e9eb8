"""Small problems for the solver tests, and their answers by brute force."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st

from jdelta._src.decision import Decision
from jdelta._src.solver.problem import AWAY, Item, Memory, Move, Problem
from jdelta._src.solver.solution import Solution

SAVE_, OFFLOAD_, RECOMPUTE_ = Decision.SAVE, Decision.OFFLOAD, Decision.RECOMPUTE
SPILL_ = Decision.SPILL
MANY = settings(max_examples=100, deadline=None, derandomize=True)


def nothing(problem: Problem) -> float:
    """Overhead of keeping nothing."""
    return problem.overhead([RECOMPUTE_] * len(problem.items))


def share(problem: Problem, solution: Solution, best: float) -> float:
    """Value of a solution, as part of the value of the best overhead."""
    value = nothing(problem) - best
    return (nothing(problem) - solution.overhead) / value if value > 0 else 1.0


def states(problem: Problem) -> Iterator[tuple[Decision, ...]]:
    """All decisions that move only what may be."""
    return itertools.product(*map(ways, problem.items))


def ways(item: Item) -> list[Decision]:
    """What may become of an item."""
    return [SAVE_, RECOMPUTE_, *(move.to for move in item.moves)]


def usage(problem: Problem, decisions: tuple[Decision, ...]) -> tuple[float, ...]:
    """Bytes on the device, and in each memory."""
    pairs = list(zip(problem.items, decisions, strict=True))
    device = math.fsum(item.bytes for item, d in pairs if d is SAVE_)
    moves = [item.move(d) for item, d in pairs]
    away = [math.fsum(m.bytes for m in moves if m and m.to is t.decision) for t in problem.memories]
    return device, *away


def brute(problem: Problem) -> float:
    """The least overhead of all that fits."""
    best = math.inf
    for decisions in states(problem):
        capacities = (problem.capacity, *(memory.capacity for memory in problem.memories))
        used = zip(usage(problem, decisions), capacities, strict=True)
        if all(taken <= capacity for taken, capacity in used):
            best = min(best, problem.overhead(decisions))
    return best


def plain(*pairs: tuple[float, float]) -> tuple[Item, ...]:
    """Items of (bytes, seconds) that have nothing to do with each other."""
    return tuple(Item(f"x{k}", size, seconds) for k, (size, seconds) in enumerate(pairs))


def held_in_loops(*triples: tuple[float, float, float]) -> tuple[Item, ...]:
    """Items of (bytes, seconds, seconds that saving them costs)."""
    return tuple(
        Item(f"x{k}", size, seconds, (), True, (), holding)
        for k, (size, seconds, holding) in enumerate(triples)
    )


def movable(*triples: tuple[float, float, float]) -> tuple[Item, ...]:
    """Items of (bytes, seconds, seconds of transfer to the host in each direction)."""
    return tuple(
        Item(f"x{k}", size, seconds, (), True, (Move(OFFLOAD_, link, link, size),))
        for k, (size, seconds, link) in enumerate(triples)
    )


def tiered(*rows: tuple[float, float, float, float]) -> tuple[Item, ...]:
    """Items of (bytes, seconds, seconds in each direction to the host, and to files)."""
    return tuple(
        replace(item, moves=(*item.moves, Move(SPILL_, row[3], row[3], row[0])))
        for item, row in zip(movable(*(row[:3] for row in rows)), rows, strict=True)
    )


def host(capacity: float = math.inf, out: float = 0.0, into: float = 0.0) -> tuple[Memory, ...]:
    """Host memory of a capacity, and the seconds of each direction that are hidden."""
    return (Memory(OFFLOAD_, capacity, out, into),)


def files(capacity: float = math.inf, out: float = 0.0, into: float = 0.0) -> tuple[Memory, ...]:
    """Files, likewise."""
    return (Memory(SPILL_, capacity, out, into),)


CHAIN = (
    Item("root", 8.0, 5.0, (), needed=False),
    Item("left", 1.0, 1.0, (0,)),
    Item("right", 1.0, 1.0, (0,)),
)
CUT = (
    Item("cut", 1.0, 9.0, (), needed=False),
    *(Item(f"leaf{k}", 4.0, 0.5, (0,)) for k in range(3)),
)

AMOUNTS = st.one_of(
    st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0]),
    st.floats(0.0, 9.0).map(lambda x: round(x, 3)),
)


@st.composite
def problems(draw: st.DrawFn, most: int = 7, link: bool = True, hold: bool = True) -> Problem:
    items: list[Item] = []
    for index in range(draw(st.integers(1, most))):
        sources = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else set()
        size = draw(AMOUNTS)
        used = draw(st.sets(st.sampled_from(AWAY))) if link else set[Decision]()
        bare = st.sampled_from([0.0, 0.5])
        moves = [
            Move(to, draw(AMOUNTS), draw(AMOUNTS), size, draw(bare)) for to in AWAY if to in used
        ]
        needed = draw(st.integers(0, 3)) > 0
        seconds = draw(AMOUNTS)
        holding = draw(AMOUNTS) if hold and size and draw(st.booleans()) else 0.0
        before = tuple(sorted(sources))
        items.append(Item(f"x{index}", size, seconds, before, needed, tuple(moves), holding))
    total = sum(item.bytes for item in items)
    hidden = st.sampled_from([0.0, 1.5, 4.0])
    room = st.sampled_from([math.inf, total / 2, total / 5])
    return Problem(
        tuple(items),
        capacity=total * draw(st.sampled_from([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])),
        memories=tuple(Memory(to, draw(room), draw(hidden), draw(hidden)) for to in AWAY),
    )
