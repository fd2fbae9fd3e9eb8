"""Solvers against tables, brute force, each other and the checker."""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jdelta._decision import Decision
from jdelta._problem import Item, Problem
from jdelta._solution import Outcome, Solution
from jdelta._solver import Knapsack, Milp, Solver
from jdelta._solver.chains import Chains
from jdelta._solver.director import DECISIONS, FREE, OFFLOAD, SAVE, Director
from jdelta._solver.filter import Filter
from jdelta._validate import validate

SAVE_, OFFLOAD_, RECOMPUTE_ = Decision.SAVE, Decision.OFFLOAD, Decision.RECOMPUTE
EXACT = Milp(mip_rel_gap=0.0)
BOTH = [Knapsack(), EXACT]
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


# --- Small cases by hand ---------------------------------------------------------------------


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

TABLE = {
    "empty": (Problem((), 1.0), 0.0),
    "no capacity": (Problem(plain((1, 2), (3, 4)), 0.0), 6.0),
    "all fit": (Problem(plain((1, 2), (3, 4)), 4.0), 0.0),
    "infinite capacity": (Problem(plain((1, 2), (3, 4)), math.inf), 0.0),
    "one of two": (Problem(plain((1, 2), (1, 3)), 1.0), 2.0),
    "classic": (Problem(plain((2, 3), (3, 4), (4, 5), (5, 6)), 5.0), 11.0),
    "one large beats dense": (Problem(plain((1, 2), (10, 10)), 10.0), 2.0),
    "two small beat dense": (Problem(plain((6, 9), (5, 7), (5, 7)), 10.0), 9.0),
    "zero bytes": (Problem(plain((0, 5), (2, 1), (2, 3)), 2.0), 1.0),
    "zero seconds": (Problem(plain((2, 0), (2, 1)), 2.0), 0.0),
    "ties": (Problem(plain((2, 1), (2, 1), (2, 1), (2, 1)), 5.0), 2.0),
    "just too small": (Problem(plain((2.0**30, 1), (2.0**30, 1)), 2.0**31 - 1), 1.0),
    "sum of fractions": (Problem(plain((0.1, 1), (0.2, 1), (0.3, 1)), 0.1 + 0.2 + 0.3), 0.0),
    "large item blocks small ones": (Problem(plain((90, 99), *[(1, 1)] * 60), 60.0), 99.0),
    "chain dropped as a whole": (Problem(CHAIN, 1.0), 6.0),
    "siblings spare their source": (Problem(CHAIN, 2.0), 0.0),
    "cut point that is not needed": (Problem(CUT, 1.0), 1.5),
    "not needed is free to drop": (Problem((Item("x", 1, 1, (), False),), 0.0), 0.0),
    "hidden transfers": (Problem(movable((4, 9, 1)), 0.0, math.inf, 1.0, 1.0), 0.0),
    "exposed transfers": (Problem(movable((4, 9, 1)), 0.0), 2.0),
    "one direction exposed": (Problem(movable((4, 9, 1)), 0.0, math.inf, 0.0, 1.0), 1.0),
    "recompute beats transfer": (Problem(movable((4, 1, 1)), 0.0), 1.0),
    "host too small": (Problem(movable((4, 9, 0)), 0.0, 3.0), 9.0),
    "host takes one": (Problem(movable((4, 9, 0), (4, 7, 0)), 0.0, 4.0), 7.0),
    "link is shared": (Problem(movable((4, 9, 1), (4, 9, 1)), 4.0, math.inf, 1.0, 1.0), 0.0),
    "endless hidden seconds": (Problem(movable((4, 9, 5)), 0.0, 4.0, math.inf, math.inf), 0.0),
}


@pytest.mark.parametrize("solver", BOTH, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("case", TABLE)
def test_table(case: str, solver: Solver):
    problem, overhead = TABLE[case]
    solution = solver.solve(problem)
    assert solution.overhead == pytest.approx(overhead, abs=1e-9)
    assert validate(problem, solution) == []


def test_decisions_by_hand():
    solution = EXACT.solve(Problem(CUT, 1.0))
    assert solution.decisions == (SAVE_, RECOMPUTE_, RECOMPUTE_, RECOMPUTE_)
    assert (solution.kept_bytes, solution.host_bytes) == (1.0, 0.0)


# --- Small cases by brute force --------------------------------------------------------------

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
        items.append(Item(f"x{index}", size, draw(AMOUNTS), sources, needed, out, into, size))
    total = sum(item.bytes for item in items)
    return Problem(
        tuple(items),
        capacity=total * draw(st.sampled_from([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])),
        host_capacity=draw(st.sampled_from([math.inf, total / 2, total / 5])),
        hidden_out=draw(st.sampled_from([0.0, 1.5, 4.0])),
        hidden_in=draw(st.sampled_from([0.0, 1.5, 4.0])),
    )


@MANY
@given(problems())
def test_milp_is_optimal(problem: Problem):
    solution = EXACT.solve(problem)
    slack = 2e-6 * sum(item.seconds for item in problem.items)
    assert solution.overhead == pytest.approx(brute(problem), abs=slack + 1e-9)
    assert solution.outcome is Outcome.OPTIMAL
    assert validate(problem, solution) == []


@MANY
@given(problems())
def test_knapsack_fits(problem: Problem):
    solution = Knapsack().solve(problem)
    assert validate(problem, solution) == []
    assert brute(problem) - 1e-9 <= solution.overhead <= nothing(problem) + 1e-9


@MANY
@given(st.lists(st.tuples(AMOUNTS, AMOUNTS), min_size=1, max_size=9), st.floats(0.0, 2.0))
def test_knapsack_reaches_half_of_a_plain_one(pairs: list[tuple[float, float]], extra: float):
    items = plain(*pairs)
    largest = max(item.bytes for item in items)
    problem = Problem(items, largest * (1 + extra))
    solution = Knapsack(rounds=0).solve(problem)  # What the guard gives, without improvement.
    slack = 1e-5 * nothing(problem)
    assert nothing(problem) - solution.overhead >= (nothing(problem) - brute(problem)) / 2 - slack


def test_best_single_item_is_a_guard():
    problem = Problem(plain((1, 2), (10, 10)), 10.0)
    assert Knapsack(rounds=0).solve(problem).overhead == 2.0


def test_knapsack_is_nearly_always_optimal_when_small():
    generator = random.Random(0)
    missed = 0
    for _ in range(100):
        items = tuple(
            Item(
                f"x{k}",
                generator.choice([0.0, 1.0, 2.0, generator.uniform(0, 9)]),
                generator.choice([0.0, 1.0, generator.uniform(0, 5)]),
                tuple(sorted(generator.sample(range(k), min(k, generator.randint(0, 2))))),
                generator.random() < 0.7,
            )
            for k in range(7)
        )
        problem = Problem(items, generator.random() * sum(item.bytes for item in items))
        missed += share(problem, Knapsack().solve(problem), brute(problem)) < 1 - 1e-6
    assert missed <= 3


# --- The frontier ----------------------------------------------------------------------------


@MANY
@given(problems(most=12), st.lists(st.floats(0.0, 1.2), min_size=2, max_size=12))
def test_overhead_never_rises_with_capacity(problem: Problem, parts: list[float]):
    total = sum(item.bytes for item in problem.items)
    capacities = [part * total for part in sorted(parts)]
    overheads = [Knapsack().solve(replace(problem, capacity=c)).overhead for c in capacities]
    assert overheads == sorted(overheads, reverse=True)


@MANY
@given(problems(most=10))
def test_frontier_holds_every_answer(problem: Problem):
    frontier = Knapsack().frontier(problem)
    assert frontier == Knapsack().frontier(replace(problem, capacity=0.0))
    for low, high in itertools.pairwise(frontier):
        assert low.kept_bytes < high.kept_bytes
        assert low.overhead > high.overhead
    fitting = [s for s in frontier if s.kept_bytes <= problem.capacity]
    assert Knapsack().solve(problem) == fitting[-1]


# --- The interface ---------------------------------------------------------------------------


@pytest.mark.parametrize("solver", BOTH, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize(("device", "host"), [(-1.0, 1.0), (1.0, -1.0), (math.nan, 1.0)])
def test_nothing_fits(solver: Solver, device: float, host: float):
    solution = solver.solve(Problem(movable((1, 2, 0)), device, host))
    assert solution.outcome is Outcome.INFEASIBLE
    assert solution.decisions == (RECOMPUTE_,)
    assert solution.overhead == 2.0


@pytest.mark.parametrize(
    ("item", "match"),
    [
        (Item("bad", -1.0, 1.0), "bytes must be finite and not negative; got -1.0"),
        (Item("bad", math.inf, 1.0), "bytes must be finite"),
        (Item("bad", 1.0, math.nan), "seconds must be finite and not negative; got nan"),
        (Item("bad", 1.0, 1.0, (1,)), r"'bad' has index 1.*got \(1,\)"),
        (Item("bad", 1.0, 1.0, (-1,)), "sources must have smaller ones"),
    ],
)
def test_bad_items_are_refused(item: Item, match: str):
    with pytest.raises(ValueError, match=match):
        Knapsack().solve(Problem((Item("good", 1.0, 1.0), item), 1.0))


def test_options_make_a_solver():
    assert Knapsack() == Knapsack(prices=40, rounds=4)
    assert len({Knapsack(), Knapsack(rounds=1), Milp(), Milp(), Milp(time_limit=1.0)}) == 4


def near_ties(seed: int) -> Problem:
    """Items whose bytes, and sums of bytes, differ by parts in a billion."""
    generator = random.Random(seed)
    count = generator.randint(4, 8)
    fit = generator.randint(1, count - 1)
    sizes = [1e9 + generator.randint(0, 3) for _ in range(count)]
    items = plain(*((size, 1 + generator.random()) for size in sizes))
    return Problem(items, fit * 1e9 + generator.randint(0, fit))


def test_milp_is_never_over_capacity_by_rounding():
    outcomes: set[Outcome] = set()
    for seed in range(40):
        problem = near_ties(seed)
        solution = EXACT.solve(problem)
        assert validate(problem, solution) == []
        if solution.outcome is Outcome.OPTIMAL:
            assert solution.overhead == pytest.approx(brute(problem), rel=1e-5)
        outcomes.add(solution.outcome)
    assert outcomes == {Outcome.OPTIMAL, Outcome.ROUNDED}


# --- The parts -------------------------------------------------------------------------------


@MANY
@given(problems(most=9, link=False), st.data())
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
    corners = Filter(problem.items, np.full(size, math.inf), free).corners(1000)
    kept, seconds = [c.kept for c in corners], [c.seconds for c in corners]
    for corner in corners:
        decisions = [SAVE_ if code == SAVE else RECOMPUTE_ for code in corner.codes]
        assert problem.overhead(decisions) == pytest.approx(corner.seconds, abs=1e-9)
    for decisions in states(problem):
        device, _ = held(problem, decisions)
        assert problem.overhead(decisions) >= np.interp(device, kept, seconds) - 1e-6


def test_filter_leaves_fixed_items_alone():
    items = plain((4, 1), (4, 9), (4, 9))
    fixed = np.array([SAVE, 0, FREE], dtype=np.int8)
    corners = Filter(items, np.full(3, math.inf), fixed).corners(9)
    assert [c.codes.tolist() for c in corners] == [[SAVE, 0, 0], [SAVE, 0, SAVE]]


def test_filter_finds_both_ends_of_a_tie():
    items = plain((1, 3), (1, 2), (1, 1))
    free = np.full(3, FREE, dtype=np.int8)
    corners = Filter(items, np.full(3, math.inf), free).corners(1)
    assert [corner.kept for corner in corners] == [0.0, 1.0, 2.0, 3.0]


def directed(problem: Problem, wish: list[int], price: float = 0.0) -> tuple[list[int], float]:
    """Codes and overhead that the director makes of one wish."""
    wishes = np.array([wish], dtype=np.int8)
    codes, kept, overhead = Director(problem).direct(wishes, np.array([price]))
    decisions = [DECISIONS[code] for code in codes[0]]
    assert overhead[0] == pytest.approx(problem.overhead(decisions))
    assert kept[0] == held(problem, tuple(decisions))[0]
    return codes[0].tolist(), float(overhead[0])


def test_director():
    items = movable((4, 9, 2), (4, 9, 1), (4, 9, 1))
    hidden = Problem(items, 0.0, math.inf, 2.0, 2.0)
    assert directed(hidden, [SAVE] * 3) == ([SAVE, OFFLOAD, OFFLOAD], 0.0)
    assert directed(hidden, [OFFLOAD] * 3) == ([OFFLOAD] * 3, 4.0)
    assert directed(hidden, [SAVE] * 3, price=1.1) == ([OFFLOAD] * 3, 4.0)
    assert directed(hidden, [SAVE] * 3, price=0.9) == ([SAVE, OFFLOAD, OFFLOAD], 0.0)
    host = Problem(items, 0.0, 8.0)
    assert directed(host, [OFFLOAD] * 3) == ([SAVE, OFFLOAD, OFFLOAD], 4.0)
    assert directed(host, [SAVE] * 3, price=9.0) == ([SAVE, OFFLOAD, OFFLOAD], 4.0)


# --- The checker -----------------------------------------------------------------------------


@MANY
@given(problems(), st.data())
def test_validate_agrees_on_figures(problem: Problem, data: st.DataObject):
    problem = replace(problem, capacity=math.inf, host_capacity=math.inf)
    decisions = [
        data.draw(st.sampled_from(list(Decision) if item.offloadable else [SAVE_, RECOMPUTE_]))
        for item in problem.items
    ]
    assert validate(problem, Solution.of(problem, decisions, Outcome.HEURISTIC)) == []
