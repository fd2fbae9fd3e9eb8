"""Small problems for the solver tests, and their answers by brute force."""

import itertools
import math
from collections.abc import Iterator

from hypothesis import settings
from hypothesis import strategies as st

from jdelta._decision import Decision
from jdelta._problem import Item, Problem
from jdelta._solution import Solution

SAVE_, OFFLOAD_, RECOMPUTE_ = Decision.SAVE, Decision.OFFLOAD, Decision.RECOMPUTE
MANY = settings(max_examples=100, deadline=None, derandomize=True)


def nothing(problem: Problem) -> float:
    """Overhead of keeping nothing."""
    return problem.overhead([RECOMPUTE_] * len(problem.items))


def share(problem: Problem, solution: Solution, best: float) -> float:
    """Value of a solution, as part of the value of the best overhead."""
    value = nothing(problem) - best
    return (nothing(problem) - solution.overhead) / value if value > 0 else 1.0


def states(problem: Problem) -> Iterator[tuple[Decision, ...]]:
    """All decisions that offload only what may be."""
    always = (SAVE_, RECOMPUTE_)
    return itertools.product(*(Decision if i.offloadable else always for i in problem.items))


def held(problem: Problem, decisions: tuple[Decision, ...]) -> tuple[float, float]:
    """Bytes on the device and on the host."""
    pairs = list(zip(problem.items, decisions, strict=True))
    device = math.fsum(item.bytes for item, d in pairs if d is SAVE_)
    return device, math.fsum(item.host_bytes for item, d in pairs if d is OFFLOAD_)


def brute(problem: Problem) -> float:
    """The least overhead of all that fits."""
    best = math.inf
    for decisions in states(problem):
        device, host = held(problem, decisions)
        if device <= problem.capacity and host <= problem.host_capacity:
            best = min(best, problem.overhead(decisions))
    return best


def plain(*pairs: tuple[float, float]) -> tuple[Item, ...]:
    """Items of (bytes, seconds) that have nothing to do with each other."""
    return tuple(Item(f"x{k}", size, seconds) for k, (size, seconds) in enumerate(pairs))


def movable(*triples: tuple[float, float, float]) -> tuple[Item, ...]:
    """Items of (bytes, seconds, seconds of transfer in each direction)."""
    return tuple(
        Item(f"x{k}", size, seconds, (), True, link, link, size)
        for k, (size, seconds, link) in enumerate(triples)
    )


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
def problems(draw: st.DrawFn, most: int = 7, link: bool = True) -> Problem:
    items: list[Item] = []
    for index in range(draw(st.integers(1, most))):
        sources = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else set()
        size = draw(AMOUNTS)
        out, into = (
            draw(st.tuples(AMOUNTS, AMOUNTS))
            if link and draw(st.booleans())
            else (
                math.inf,
                math.inf,
            )
        )
        sources = tuple(sorted(sources))
        needed = draw(st.integers(0, 3)) > 0
        again, bare = draw(AMOUNTS), draw(st.sampled_from([0.0, 0.5]))
        items.append(Item(f"x{index}", size, again, sources, needed, out, into, size, bare))
    total = sum(item.bytes for item in items)
    return Problem(
        tuple(items),
        capacity=total * draw(st.sampled_from([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])),
        host_capacity=draw(st.sampled_from([math.inf, total / 2, total / 5])),
        hidden_out=draw(st.sampled_from([0.0, 1.5, 4.0])),
        hidden_in=draw(st.sampled_from([0.0, 1.5, 4.0])),
    )
