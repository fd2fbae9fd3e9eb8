"""The checker finds each fault by itself."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdelta._src.decision import Decision
from jdelta._src.solver.problem import Item, Move, Problem
from jdelta._src.solver.solution import Outcome, Solution
from tests.solver_problems import MANY, files, host, problems, ways
from tests.solver_validate import validate

SAVE, OFFLOAD, SPILL = Decision.SAVE, Decision.OFFLOAD, Decision.SPILL
MOVES = (Move(OFFLOAD, 1.0, 1.0, 4.0), Move(SPILL, 3.0, 2.0, 5.0))
ITEMS = (Item("moved", 4.0, 9.0, moves=MOVES), Item("fixed", 2.0, 3.0))
GOOD = Problem(ITEMS, 2.0, host(4.0) + files(5.0, 1.0))
RIGHT = Solution((OFFLOAD, SAVE), 2.0, 2.0, (4.0, 0.0), Outcome.OPTIMAL)
FAR = Solution((SPILL, SAVE), 4.0, 2.0, (0.0, 5.0), Outcome.OPTIMAL)


@pytest.mark.parametrize(
    ("problem", "solution", "fault"),
    [
        (GOOD, replace(RIGHT, decisions=(SAVE,)), "2 items, but 1 decisions"),
        (replace(GOOD, capacity=1.0), RIGHT, "2.0 bytes have the decision save, above the"),
        (replace(GOOD, memories=host(3.0) + files()), RIGHT, "4.0 bytes have the decision offload"),
        (replace(GOOD, memories=host() + files(4.0)), FAR, "5.0 bytes have the decision spill"),
        (GOOD, replace(RIGHT, overhead=1.0), "overhead says 1.0, but the decisions give 2.0"),
        (GOOD, replace(RIGHT, kept_bytes=1.0), "kept_bytes says 1.0, but the decisions give 2.0"),
        (GOOD, replace(FAR, overhead=5.0), "overhead says 5.0, but the decisions give 4.0"),
        (
            GOOD,
            replace(RIGHT, moved_bytes=(1.0, 0.0)),
            "(offload) says 1.0, but the",
        ),
        (
            GOOD,
            replace(FAR, moved_bytes=(0.0, 4.0)),
            "(spill) says 4.0, but the",
        ),
        (GOOD, replace(FAR, moved_bytes=(5.0,)), "there are 2 memories, but moved_bytes (5.0,)"),
        (
            GOOD,
            replace(RIGHT, decisions=(OFFLOAD, SPILL)),
            "for item 'fixed' is spill, but it may only be save, recompute",
        ),
        (
            replace(GOOD, memories=host(4.0)),
            FAR,
            "for item 'moved' is spill, but it may only be save, offload, recompute",
        ),
    ],
)
def test_validate_finds(problem: Problem, solution: Solution, fault: str):
    assert validate(GOOD, RIGHT) == []
    assert validate(GOOD, FAR) == []
    assert any(fault in message for message in validate(problem, solution))


@MANY
@given(problems(), st.data())
def test_validate_agrees_on_figures(problem: Problem, data: st.DataObject):
    memories = tuple(replace(memory, capacity=math.inf) for memory in problem.memories)
    problem = replace(problem, capacity=math.inf, memories=memories)
    decisions = [data.draw(st.sampled_from(ways(item))) for item in problem.items]
    assert validate(problem, Solution.of(problem, decisions, Outcome.HEURISTIC)) == []
