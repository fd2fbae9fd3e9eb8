"""The checker finds each fault by itself."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from solver_problems import MANY, RECOMPUTE_, SAVE_, problems

from jdelta._decision import Decision
from jdelta._problem import Item, Problem
from jdelta._solution import Outcome, Solution
from jdelta._validate import validate

SAVE, OFFLOAD = Decision.SAVE, Decision.OFFLOAD
ITEMS = (Item("moved", 4.0, 9.0, (), True, 1.0, 1.0, 4.0), Item("fixed", 2.0, 3.0))
GOOD = Problem(ITEMS, 2.0, 4.0)
RIGHT = Solution((OFFLOAD, SAVE), 2.0, 2.0, 4.0, Outcome.OPTIMAL)


@pytest.mark.parametrize(
    ("problem", "solution", "fault"),
    [
        (GOOD, replace(RIGHT, decisions=(SAVE,)), "2 items, but 1 decisions"),
        (replace(GOOD, capacity=1.0), RIGHT, "device memory holds 2.0 bytes, above its capacity"),
        (replace(GOOD, host_capacity=3.0), RIGHT, "host memory holds 4.0 bytes, above"),
        (GOOD, replace(RIGHT, overhead=1.0), "overhead says 1.0, but the decisions give 2.0"),
        (GOOD, replace(RIGHT, kept_bytes=1.0), "kept_bytes says 1.0, but the decisions give 2.0"),
        (GOOD, replace(RIGHT, host_bytes=1.0), "host_bytes says 1.0, but the decisions give 4.0"),
        (GOOD, replace(RIGHT, decisions=(OFFLOAD, OFFLOAD)), "item 'fixed' is offloaded"),
    ],
)
def test_validate_finds(problem: Problem, solution: Solution, fault: str):
    assert validate(GOOD, RIGHT) == []
    assert any(fault in found for found in validate(problem, solution))


@MANY
@given(problems(), st.data())
def test_validate_agrees_on_figures(problem: Problem, data: st.DataObject):
    problem = replace(problem, capacity=math.inf, host_capacity=math.inf)
    decisions = [
        data.draw(st.sampled_from(list(Decision) if item.offloadable else [SAVE_, RECOMPUTE_]))
        for item in problem.items
    ]
    assert validate(problem, Solution.of(problem, decisions, Outcome.HEURISTIC)) == []
