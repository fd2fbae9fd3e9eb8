"""The optimal persistent schedule of a chain, against every schedule and against running it."""

import functools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdelta._src.solver.nested import STEPS, NestedRecompute, Stage

sizes = st.integers(0, 4)
stages = st.lists(st.builds(Stage, sizes, sizes, sizes), min_size=1, max_size=6)


def best(chain, loss, room):
    """The least seconds, by trying everything that may be kept or held next."""

    def begin(first, last):
        return sum(stage.seconds for stage in chain[first:last])

    @functools.cache
    def run(first, last, free):
        if free < 0:
            return math.inf
        if first == last:
            return 0 if chain[first].running <= free else math.inf
        return min(
            begin(first, middle)
            + run(middle, last, free - chain[middle].bytes)
            + run(first, middle - 1, free)
            for middle in range(first + 1, last + 1)
        )

    @functools.cache
    def all_from(first, free):
        if first == len(chain):
            return 0 if loss <= free else math.inf
        return min(
            run(first, kept - 1, free)
            + all_from(kept, free - (chain[kept].bytes if kept < len(chain) else 0))
            for kept in range(first + 1, len(chain) + 1)
        )

    return all_from(0, room)


def play(chain, loss, levels):
    """Seconds, and bytes at once, of a backward pass that does what levels say.

    What is dropped is made from the last value before it that is there. Of what is made on the way
    that is held which has no larger level than all that is made after it.
    """
    alive = {i for i, level in enumerate(levels) if not level}
    seconds, most = 0, loss + sum(chain[i].bytes for i in alive if i)
    for stage in reversed(range(len(chain))):
        if stage not in alive:
            begin = max(i for i in alive if i < stage)
            seconds += sum(s.seconds for s in chain[begin:stage])
            computed = range(begin + 1, stage + 1)
            alive |= {
                i for i in computed if levels[i] <= min(levels[j] for j in computed if j >= i)
            }
        most = max(most, chain[stage].running + sum(chain[i].bytes for i in alive if i))
        alive.discard(stage)
    return seconds, most


@settings(max_examples=200, deadline=None)
@given(stages, sizes, st.integers(0, 30))
def test_no_schedule_within_the_bytes_is_quicker(chain, loss, room):
    solved, optimum = NestedRecompute(chain, loss), best(chain, loss, room)
    rounding = len(chain) * (play(chain, loss, [0] * len(chain))[1] + 5) / STEPS
    assert solved.seconds(room + rounding) <= optimum
    levels = solved.levels(room)
    if levels is None:
        assert solved.seconds(room) == math.inf
        return
    seconds, needed = play(chain, loss, levels)
    assert seconds == pytest.approx(solved.seconds(room))
    assert needed <= room + rounding


def test_a_chain_of_equal_stages_is_run_again_in_halves():
    """Eight stages in room for three values beside what a turn takes: by hand in Revolve's way."""
    solved = NestedRecompute([Stage(1, 1, 2)] * 8, 1)
    assert solved.levels(9) == [0] * 8
    assert solved.levels(5.4) == [0, 1, 0, 1, 2, 0, 1, 0]
    assert solved.seconds(5.4) == 4
    assert solved.levels(3) == [0, 6, 5, 4, 3, 2, 1, 0]
    assert solved.seconds(3) == 21 == 1 + 2 + 3 + 4 + 5 + 6
    assert solved.levels(2) is None
    assert solved.seconds(2) == math.inf


def test_the_least_bytes_for_some_forward_passes():
    solved = NestedRecompute([Stage(1, 1, 2)] * 8, 1)
    least = solved.least(7 / 8)
    assert solved.seconds(least) <= 7 < solved.seconds(least - 10 / STEPS)


def test_less_memory_is_as_much_less_as_makes_another_schedule():
    solved = NestedRecompute([Stage(1, 1, 2)] * 8, 1)
    assert solved.less(9, 1) == 8
    lower = solved.less(9, 0)
    assert solved.seconds(lower) > solved.seconds(9) == solved.seconds(lower + 10 / STEPS)
