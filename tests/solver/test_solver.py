"""Solvers against tables, brute force, each other and the checker."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdelta._src.solver import Knapsack, Milp, Solver
from jdelta._src.solver.problem import Item, Memory, Move, Problem
from jdelta._src.solver.solution import Outcome
from tests.solver_problems import (
    AMOUNTS,
    CHAIN,
    CUT,
    MANY,
    OFFLOAD_,
    RECOMPUTE_,
    SAVE_,
    SPILL_,
    brute,
    files,
    held_in_loops,
    host,
    movable,
    nothing,
    plain,
    problems,
    share,
    tiered,
)
from tests.solver_validate import validate

EXACT = Milp(mip_rel_gap=0.0)
BOTH = [Knapsack(), EXACT]


# --- Small cases by hand ---------------------------------------------------------------------


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
    "large item displaces small ones": (
        Problem(plain((100, 100), *[(1, 1.1)] * 60, *[(1, 0.1)] * 60), 130.0),
        39.0,
    ),
    "chain dropped as a whole": (Problem(CHAIN, 1.0), 6.0),
    "siblings spare their source": (Problem(CHAIN, 2.0), 0.0),
    "cut point that is not needed": (Problem(CUT, 1.0), 1.5),
    "not needed is free to drop": (Problem((Item("x", 1, 1, (), False),), 0.0), 0.0),
    "hidden transfers": (Problem(movable((4, 9, 1)), 0.0, host(math.inf, 1.0, 1.0)), 0.0),
    "exposed transfers": (Problem(movable((4, 9, 1)), 0.0, host()), 2.0),
    "one direction exposed": (Problem(movable((4, 9, 1)), 0.0, host(math.inf, 0.0, 1.0)), 1.0),
    "recompute beats transfer": (Problem(movable((4, 1, 1)), 0.0, host()), 1.0),
    "host too small": (Problem(movable((4, 9, 0)), 0.0, host(3.0)), 9.0),
    "host takes one": (Problem(movable((4, 9, 0), (4, 7, 0)), 0.0, host(4.0)), 7.0),
    "link is shared": (
        Problem(movable((4, 9, 1), (4, 9, 1)), 4.0, host(math.inf, 1.0, 1.0)),
        0.0,
    ),
    "endless hidden seconds": (
        Problem(movable((4, 9, 5)), 0.0, host(4.0, math.inf, math.inf)),
        0.0,
    ),
    "files where the host is full": (
        Problem(tiered((4, 9, 0, 1), (4, 9, 0, 1)), 0.0, host(4.0) + files()),
        2.0,
    ),
    "files are no choice without a memory's room": (
        Problem(tiered((4, 9, 1, 0)), 0.0, host() + files(3.0)),
        2.0,
    ),
    "dear to hold": (Problem(held_in_loops((4, 3, 5), (4, 7, 5)), 8.0), -2.0),
    "dear to hold and not needed": (
        Problem((Item("x", 1, 2, (), False, (), 5.0), Item("y", 4, 1, (0,), True)), 1.0),
        3.0,
    ),
    "held in place of a chain": (
        Problem((Item("x", 1, 6, (), False, (), 5.0), Item("y", 4, 1, (0,), True)), 1.0),
        6.0,
    ),
    "dear to hold on the device": (
        Problem((replace(*movable((4, 9, 1)), holding=3.0),), 4.0, host()),
        -1.0,
    ),
    "each link hides its own": (
        Problem(tiered((4, 9, 2, 2), (4, 9, 2, 2)), 0.0, host(9.0, 2, 2) + files(9.0, 2, 2)),
        0.0,
    ),
    "one of each": (
        Problem(
            tiered((4, 9, 1, 3), (4, 1, 5, 5), (4, 9, 3, 1), (4, 9, 5, 5)),
            4.0,
            host(4.0, 1, 1) + files(4.0, 1, 1),
        ),
        1.0,
    ),
}


@pytest.mark.parametrize("solver", BOTH, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("case", TABLE)
def test_table(case: str, solver: Solver):
    problem, overhead = TABLE[case]
    solution = solver.solve(problem)
    assert solution.overhead == pytest.approx(overhead, abs=1e-9)
    assert validate(problem, solution) == []


def test_recompute_or_offload_whichever_is_cheaper():
    dear_to_drop = movable(*[(4, 10 + k / 9, 1) for k in range(30)])
    dearer = tuple(Item(f"y{k}", 4.0, 16 + k / 9) for k in range(30))
    problem = Problem(dear_to_drop + dearer, 40.0, host())
    solution = Knapsack(rounds=0).solve(problem)
    assert solution.overhead == pytest.approx(60 + sum(16 + k / 9 for k in range(20)))


def test_decisions_by_hand():
    solution = EXACT.solve(Problem(CUT, 1.0))
    assert solution.decisions == (SAVE_, RECOMPUTE_, RECOMPUTE_, RECOMPUTE_)
    assert (solution.kept_bytes, solution.moved_bytes) == (1.0, ())


# --- Small cases by brute force --------------------------------------------------------------


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
@pytest.mark.parametrize(
    "capacities",
    [(-1.0, 1.0, 1.0), (1.0, -1.0, 1.0), (1.0, 1.0, -1.0), (math.nan, 1.0, 1.0)],
)
def test_nothing_fits(solver: Solver, capacities: tuple[float, float, float]):
    device, host_bytes, file_bytes = capacities
    solution = solver.solve(
        Problem(tiered((1, 2, 0, 0)), device, host(host_bytes) + files(file_bytes))
    )
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
        (
            Item("bad", 1.0, 1.0, moves=(Move(OFFLOAD_, 1.0, math.inf, 1.0),)),
            "offload.seconds_in must be finite",
        ),
        (
            Item("bad", 1.0, 1.0, moves=(Move(SPILL_, 1.0, 1.0, 1.0),)),
            "'bad': it may move at most once to each of .*OFFLOAD.* got .*SPILL",
        ),
    ],
)
def test_bad_items_are_refused(item: Item, match: str):
    with pytest.raises(ValueError, match=match):
        Knapsack().solve(Problem((Item("good", 1.0, 1.0), item), 1.0, host()))


def test_each_memory_has_a_decision_of_its_own():
    with pytest.raises(ValueError, match="each memory must have one decision of its own"):
        Knapsack().solve(Problem((), 1.0, host() + host()))
    with pytest.raises(ValueError, match="each memory must have one decision of its own"):
        Knapsack().solve(Problem((), 1.0, (Memory(SAVE_),)))


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
