"""Order and layout against brute force, definitions and a checker that shares no code with them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.order.order import problem as step_problem
from jdelta._src.order import Problem, Tensor, arena, arrange, layout
from jdelta._src.order.bound import cut, forced, lower_bound
from jdelta._src.order.exact import solved
from jdelta._src.order.lists import delayed_order
from jdelta._src.order.problem import CORE
from jdelta._src.order.segments import separators
from jdelta._src.order.tails import early, updated_early
from tests.order_validate import complaints

settings.register_profile("order", deadline=None, max_examples=60)
settings.load_profile("order")


@st.composite
def problems(draw, most=16):
    """Any graph: operators with up to three predecessors, tensors that some of the next use."""
    count = draw(st.integers(1, most))
    before = [
        tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else ()))
        for i in range(count)
    ]
    after = [[j for j in range(count) if i in before[j]] for i in range(count)]
    tensors = []
    for maker in range(count):
        for _ in range(draw(st.integers(0, 2))):
            users = draw(st.sets(st.sampled_from(after[maker]))) if after[maker] else ()
            size = draw(st.one_of(st.integers(0, 20), st.integers(0, 2**40)))
            tensors.append(Tensor(size, maker, tuple(sorted(users)), draw(st.booleans())))
    return Problem(tuple(before), tuple(tensors), tuple(f"op{i}" for i in range(count)))


def orders(problem, begun=()):
    """Every topological order."""
    if len(begun) == len(problem):
        yield begun
    for index in set(problem.program) - set(begun):
        if set(problem.predecessors[index]) <= set(begun):
            yield from orders(problem, (*begun, index))


def least(problem):
    return min(map(problem.peak, orders(problem)))


def ancestors(problem, operator):
    closure = set()
    for p in problem.predecessors[operator]:
        closure |= {p} | ancestors(problem, p)
    return closure


# --- Any graph --------------------------------------------------------------------------------


@given(problems())
def test_arrangement_and_layout_are_valid(problem):
    arrangement = arrange(problem)
    first, last = problem.lives(arrangement.order)
    offsets = layout(problem.bytes, first, last)
    size = arena(problem.bytes, offsets)
    assert complaints(problem, arrangement.order, arrangement.peak, offsets.tolist(), size) == []
    assert arrangement.bound <= arrangement.peak <= problem.peak(problem.program)
    assert size >= arrangement.peak


@given(problems(most=6))
def test_small_graphs_are_ordered_best(problem):
    assert arrange(problem).peak == least(problem)


@given(problems(most=6))
def test_no_order_goes_below_the_bound_of_any_operator(problem):
    timelines = [
        dict(zip(order, problem.timeline(order).tolist(), strict=True)) for order in orders(problem)
    ]
    for operator in problem.program:
        here = min(timeline[operator] for timeline in timelines)
        assert forced(problem, operator) <= cut(problem, operator).bytes <= here


@given(problems(most=7))
def test_cut_is_what_can_have_run_with_the_fewest_bytes(problem):
    for operator in problem.program:
        min_cut = cut(problem, operator)
        ran = set(np.flatnonzero(min_cut.before).tolist())
        assert ancestors(problem, operator) <= ran
        assert operator not in ran
        assert all(set(problem.predecessors[i]) <= ran for i in ran)
        order = [*sorted(ran), operator, *sorted(set(problem.program) - ran - {operator})]
        alive = problem.timeline(order)[len(ran)]
        slack = len(problem.tensors) * -(-int(problem.bytes.sum()) // 2**29)
        assert alive - slack <= min_cut.bytes <= alive


@given(problems(most=6), st.data())
def test_rows_are_solved_best(problem, data):
    begin = data.draw(st.integers(0, len(problem)))
    end = data.draw(st.integers(begin, len(problem)))
    row = solved(problem, problem.program, range(begin, end))
    order = [*range(begin), *row, *range(end, len(problem))]
    inside = slice(begin, end)
    others = [
        order
        for order in orders(problem)
        if order[:begin] == tuple(range(begin)) and order[end:] == tuple(range(end, len(problem)))
    ]
    best = min(int(problem.timeline(other)[inside].max(initial=0)) for other in others)
    assert int(problem.timeline(order)[inside].max(initial=0)) == best


@given(problems())
def test_separators_are_what_all_others_come_before_or_after(problem):
    before = [ancestors(problem, i) for i in problem.program]
    after = [{j for j in problem.program if i in before[j]} for i in problem.program]
    alone = [i for i in problem.program if len(before[i]) + len(after[i]) == len(problem) - 1]
    assert separators(problem) == alone


@given(problems())
def test_branches_lead_to_one_end(problem):
    def ends(index):
        after = problem.successors[index]
        return set().union(*map(ends, after)) if after else {index}

    for index, branch in enumerate(problem.branches):
        assert (branch == CORE) == (len(ends(index)) > 1)
        assert branch == CORE or ends(index) == {branch}


@given(problems(), st.integers(0, 100))
def test_passes_keep_to_the_dependences(problem, target):
    waits = {branch: len(problem) for branch in problem.branches[::2] if branch != CORE}
    for order in (
        delayed_order(problem, problem.program),
        early(problem, problem.program),
        early(problem, problem.program, waits),
        updated_early(problem, problem.program, target),
    ):
        offsets = np.cumsum(problem.bytes) - problem.bytes
        size = arena(problem.bytes, offsets)
        assert complaints(problem, order, problem.peak(order), offsets.tolist(), size) == []


LIVES = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(0, 50), st.integers(0, 40)), max_size=30
)
"""Bytes, first operator and operators after it until the last, of each tensor."""


@given(LIVES)
def test_layout_is_disjoint(lives):
    sizes, first, more = np.array(lives, dtype=np.int64).reshape(-1, 3).T
    last = first + more
    begin = layout(sizes, first, last)
    end = begin + sizes
    together = (first[:, None] <= last) & (first <= last[:, None])
    apart = (end[:, None] <= begin) | (end <= begin[:, None])
    has_bytes = sizes > 0
    clash = together & ~apart & has_bytes & has_bytes[:, None]
    assert not np.triu(clash, 1).any()


# --- Cases by hand ----------------------------------------------------------------------------


def chain(*sizes):
    """Operators that each read what the one before made."""
    count = len(sizes)
    return Problem(
        tuple((i - 1,) if i else () for i in range(count)),
        tuple(
            Tensor(size, i, (i + 1,) if i + 1 < count else (), i + 1 == count)
            for i, size in enumerate(sizes)
        ),
        tuple("abcdefgh"[:count]),
    )


def test_chain_has_one_order():
    arrangement = arrange(chain(4, 2, 7, 1))
    assert arrangement.order == (0, 1, 2, 3)
    assert (arrangement.peak, arrangement.bound) == (9, 9)
    assert separators(chain(4, 2, 7, 1)) == [0, 1, 2, 3]


def test_what_is_read_late_is_made_late():
    """A mask that only the last operator reads need not lie about meanwhile."""
    problem = Problem(
        ((), (), (1,), (0, 2)),
        (Tensor(10, 0, (3,)), Tensor(8, 1, (2,)), Tensor(1, 2, (3,))),
        ("mask", "x", "sum", "out"),
    )
    assert problem.peak(problem.program) == 19
    assert arrange(problem).peak == 11
    assert delayed_order(problem, problem.program) == [1, 2, 0, 3]


def step(layers, *, gradient=8, scratch=4, activation=1):
    """A backward pass of cotangents, then for each layer a gradient's update, at the end."""
    before, tensors = [()], []
    for layer in range(layers):  # cotangent, gradient
        last = len(before) - 1 if layer == 0 else len(before) - 2
        before += [(last,), (last,)]
    makers = [2 + 2 * layer for layer in range(layers)]
    updates = []
    for maker in makers:
        updates.append(len(before))
        before.append((maker,))
    for maker, update in zip(makers, updates, strict=True):
        tensors += [Tensor(gradient, maker, (update,)), Tensor(scratch, update)]
    for i in range(len(makers)):
        producer = 0 if i == 0 else 2 * i - 1
        tensors.append(Tensor(activation, producer, (2 * i + 1, 2 * i + 2)))
    return Problem(tuple(before), tuple(tensors), tuple(f"op{i}" for i in range(len(before))))


def test_updates_run_when_their_gradient_is_there():
    problem = step(30)
    assert problem.peak(problem.program) >= 30 * 8
    arrangement = arrange(problem)
    assert arrangement.peak == 8 + 4 + 1


def test_branches_wait_as_long_as_they_are_told():
    problem = step(3)
    waiting = problem.branches[2]
    assert early(problem, problem.program)[-1] != waiting
    assert early(problem, problem.program, {waiting: len(problem)})[-1] == waiting


def test_bound_counts_one_of_two_where_either_has_to_be_there():
    """ROAM's bound misses what may be put off, though then its source is alive."""
    problem = Problem(
        ((), (0,), (0,), (2,), (1, 3)),
        (Tensor(5, 0, (1, 2)), Tensor(5, 1, (4,)), Tensor(1, 2, (3,)), Tensor(7, 3, (4,))),
        ("x", "twice x", "sum", "loss", "backward"),
    )
    assert forced(problem, 3) == 1 + 7
    assert cut(problem, 3).bytes == lower_bound(problem, problem.program) == 1 + 7 + 5


def test_long_lived_tensors_lie_below():
    sizes, first, last = np.array([[10, 10, 10], [0, 1, 2], [200, 1, 2]])
    assert layout(sizes, first, last).tolist() == [0, 10, 10]


def test_few_large_tensors_lie_close_together():
    """Two Mixtral blocks: a few hundred tensors of up to a sixth of the peak, many of one size."""
    problem = step_problem("mixtral", batch=1)
    arrangement = arrange(problem)
    offsets = layout(problem.bytes, *problem.lives(arrangement.order))
    assert arena(problem.bytes, offsets) <= 1.01 * arrangement.peak


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": (1, 0, 2, 3)}, "operator 1 runs before 0"),
        ({"order": (0, 1, 2, 2)}, "every operator once"),
        ({"peak": 8}, "the peak is 9, not 8"),
        ({"offsets": [0, 3, 6, 0]}, "tensors 0 and 1 share bytes"),
        ({"arena": 12}, "not from 0 to 12"),
        ({"offsets": [-1, 4, 6, 0]}, "tensors reach from -1"),
    ],
)
def test_checker_sees_every_fault(change, message):
    right = {"order": (0, 1, 2, 3), "peak": 9, "offsets": [0, 4, 6, 0], "arena": 13}
    assert complaints(chain(4, 2, 7, 1), **right) == []
    assert any(message in line for line in complaints(chain(4, 2, 7, 1), **{**right, **change}))


@pytest.mark.parametrize(
    ("before", "tensors"),
    [(((1,), ()), ()), (((), (0,)), (Tensor(1, 1, (0,)),)), (((),), (Tensor(-1, 0),))],
    ids=["order", "use", "size"],
)
def test_malformed_problems_are_refused(before, tensors):
    with pytest.raises(ValueError, match=r"operator 0 does not come after|is negative, or used"):
        Problem(before, tensors)
