"""The parts of the heuristic, each against what it promises."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jdelta._src.solver.chains import Chains
from jdelta._src.solver.director import DECISIONS, FREE, MOVED, RECOMPUTE, SAVE, Director, code_of
from jdelta._src.solver.greedy import Release
from jdelta._src.solver.min_cuts import Corner, Exits, Filter
from jdelta._src.solver.problem import AWAY, Item, Problem
from tests.solver_problems import (
    CHAIN,
    CUT,
    MANY,
    RECOMPUTE_,
    SAVE_,
    files,
    host,
    movable,
    plain,
    problems,
    states,
    tiered,
    usage,
)

OFFLOAD, SPILL = map(code_of, AWAY)


@MANY
@given(problems(most=9, link=False, hold=False), st.data())
def test_chains_price_what_the_problem_does(problem: Problem, data: st.DataObject):
    size = len(problem.items)
    chains = Chains(problem.items)
    kept = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    chains.start(kept)

    def overhead() -> float:
        return problem.overhead([SAVE_ if k else RECOMPUTE_ for k in kept])

    for index in data.draw(st.lists(st.integers(0, size - 1), max_size=12)):
        before, price = overhead(), chains.seconds(index)
        chains.toggle(index)
        kept[index] = not kept[index]
        assert abs(overhead() - before) == pytest.approx(price, abs=1e-9)
        assert chains.kept == kept


def test_chains_price_siblings():
    chains = Chains(CHAIN)
    assert (chains.seconds(0), chains.seconds(1)) == (5.0, 1.0)
    assert 2 in chains.toggle(1)
    assert chains.seconds(2) == 6.0
    assert 1 in chains.toggle(2)
    assert (chains.seconds(0), chains.seconds(1)) == (0.0, 6.0)
    assert chains.seconds(1, limit=0.5) < 6.0


@MANY
@given(problems(most=9, link=False), st.data())
def test_chains_tell_whose_price_changed(problem: Problem, data: st.DataObject):
    size = len(problem.items)
    chains = Chains(problem.items)
    assume(all(len(consumers) <= 2 for consumers in chains.consumers))
    chains.start(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    before = [chains.seconds(index) for index in range(size)]
    toggled = data.draw(st.integers(0, size - 1))
    touched = chains.toggle(toggled) | {toggled}
    after = [chains.seconds(index) for index in range(size)]
    assert {index for index in range(size) if before[index] != after[index]} <= touched


@MANY
@given(problems(most=7, link=False))
def test_filter_finds_the_hull(problem: Problem):
    size = len(problem.items)
    free = np.full(size, FREE, dtype=np.int8)
    corners = Filter(problem.items, Exits.of(problem.items, ()), free).corners(1000)
    kept, seconds = [c.kept for c in corners], [c.seconds for c in corners]
    plain = sum(item.holding for item in problem.items if item.needed)
    for corner in corners:
        decisions = [SAVE_ if code == SAVE else RECOMPUTE_ for code in corner.codes]
        assert problem.overhead(decisions) + plain == pytest.approx(corner.seconds, abs=1e-9)
    for decisions in states(problem):
        device, *_ = usage(problem, decisions)
        assert problem.overhead(decisions) + plain >= np.interp(device, kept, seconds) - 1e-6


def test_filter_leaves_fixed_items_alone():
    items = plain((4, 1), (4, 9), (4, 9))
    fixed = np.array([SAVE, 0, FREE], dtype=np.int8)
    corners = Filter(items, Exits.of(items, ()), fixed).corners(9)
    assert [c.codes.tolist() for c in corners] == [[SAVE, 0, 0], [SAVE, 0, SAVE]]


def test_filter_finds_both_ends_of_a_tie():
    items = plain((1, 3), (1, 2), (1, 1))
    free = np.full(3, FREE, dtype=np.int8)
    corners = Filter(items, Exits.of(items, ()), free).corners(1)
    assert [corner.kept for corner in corners] == [0.0, 1.0, 2.0, 3.0]


def directed(problem: Problem, wish: list[int], price: float = 0.0) -> tuple[list[int], float]:
    """Codes and overhead that the director makes of one wish."""
    wishes = np.array([wish], dtype=np.int8)
    codes, kept, overhead = Director(problem).direct(wishes, np.array([price]))
    decisions = [DECISIONS[code] for code in codes[0]]
    assert overhead[0] == pytest.approx(problem.overhead(decisions))
    assert kept[0] == usage(problem, tuple(decisions))[0]
    return codes[0].tolist(), float(overhead[0])


def test_director():
    items = movable((4, 9, 2), (4, 9, 1), (4, 9, 1))
    hidden = Problem(items, 0.0, host(math.inf, 2.0, 2.0))
    assert directed(hidden, [SAVE] * 3) == ([SAVE, OFFLOAD, OFFLOAD], 0.0)
    assert directed(hidden, [OFFLOAD] * 3) == ([OFFLOAD] * 3, 4.0)
    assert directed(hidden, [SAVE] * 3, price=1.1) == ([OFFLOAD] * 3, 4.0)
    assert directed(hidden, [SAVE] * 3, price=0.9) == ([SAVE, OFFLOAD, OFFLOAD], 0.0)
    small = Problem(items, 0.0, host(8.0))
    assert directed(small, [OFFLOAD] * 3) == ([SAVE, OFFLOAD, OFFLOAD], 4.0)
    assert directed(small, [SAVE] * 3, price=9.0) == ([SAVE, OFFLOAD, OFFLOAD], 4.0)


def test_director_uses_one_link_after_the_other():
    items = tiered((4, 9, 2, 3), (4, 9, 1, 3), (4, 9, 1, 3))
    problem = Problem(items, 0.0, host(4.0, 9.0, 9.0) + files(4.0, 3.0, 3.0))
    assert directed(problem, [SAVE] * 3) == ([SPILL, OFFLOAD, SAVE], 0.0)
    assert directed(problem, [OFFLOAD] * 3) == ([SPILL, OFFLOAD, SAVE], 0.0)
    assert directed(problem, [SPILL, SPILL, SAVE]) == ([SPILL, OFFLOAD, SAVE], 0.0)


def corner(chains: Chains, exits: Exits, codes: list[int]) -> Corner:
    """The corner that codes make."""
    chains.start([code != RECOMPUTE for code in codes])
    recomputed = [i for i in range(len(codes)) if chains.uses[i] and not chains.kept[i]]
    row = np.array(codes, dtype=np.int8)
    seconds = sum(chains.items[i].seconds for i in recomputed) + exits.seconds[row >= MOVED].sum()
    kept = sum(i.bytes for i, code in zip(chains.items, codes, strict=True) if code == SAVE)
    return Corner(kept, float(seconds), row)


def test_exits_are_the_quickest_ways():
    items = (*tiered((4, 9, 2, 3), (4, 9, 2, 1)), *plain((4, 9)))
    both = Exits.of(items, AWAY)
    assert both.seconds.tolist() == [4.0, 2.0, math.inf]
    assert both.codes.tolist() == [OFFLOAD, SPILL, SAVE]
    assert Exits.of(items, ()).seconds.tolist() == [math.inf] * 3


SIBLINGS = (
    Item("root", 8.0, 5.0, (), needed=False),
    Item("left", 1.0, 1.0, (0,)),
    Item("right", 1.0, 3.0, (0,)),
    Item("other", 1.0, 7.0),
)

RELEASES = {
    "gain before loss": (plain((4, 5), (1, 3)), [[1, 0], [1, 1], [0, 1]]),
    "least dense first": (
        plain((10, 18), (1, 1.9), (10, 1)),
        [[1, 1, 1], [1, 1, 0], [0, 1, 0], [0, 0, 0]],
    ),
    "cut point before what hangs on it": (
        CUT,
        [[0, 1, 1, 1], [1, 1, 1, 1], [1, 0, 1, 1], [1, 0, 0, 1], [1, 0, 0, 0]],
    ),
    "re-priced once the root is in use": (
        SIBLINGS,
        [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]],
    ),
    "quicker transfer first": (movable((4, 9, 2), (4, 9, 1)), [[1, 1], [1, 2], [2, 2]]),
    "each its own way": (tiered((4, 9, 3, 2), (4, 9, 1, 4)), [[1, 1], [1, 2], [3, 2]]),
}


@pytest.mark.parametrize("name", RELEASES)
def test_release(name: str):
    items, walk = RELEASES[name]
    chains = Chains(items)
    exits = Exits.of(items, AWAY)
    high, low = corner(chains, exits, walk[0]), corner(chains, exits, walk[-1])
    states = Release(chains, exits, high, low).states()
    assert [codes.tolist() for codes in states] == walk[1:]
