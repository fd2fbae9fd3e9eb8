"""The schedule of a loop that keeps few states, against brute force and the published formula."""

import functools

import pytest

from jdelta._src.regions.binomial import Binomial, repeats, runs_again, split, steps

MOST, SLOTS = 40, 8


@functools.cache
def fewest(length, kept):
    """By trying every place for the next state: no formula."""
    if length == 1:
        return 0
    if kept == 1:
        return length * (length - 1) // 2
    return min(m + fewest(length - m, kept - 1) + fewest(m, kept) for m in range(1, length))


def replayed(schedule):
    """How often each step is run, by a machine that has nothing but the slots."""
    slots = {0: 0}
    runs = [0] * schedule.length
    for turn in schedule.turns:
        assert slots[turn.slot] == turn.begin
        at = turn.begin
        for before, slot in turn.keep:
            runs[at:before] = [count + 1 for count in runs[at:before]]
            at = slots[slot] = before
        runs[at : turn.step] = [count + 1 for count in runs[at : turn.step]]
    assert [turn.step for turn in schedule.turns] == list(reversed(range(schedule.length)))
    assert max(slots) < schedule.kept
    return runs


@pytest.mark.parametrize("kept", range(1, SLOTS))
def test_no_other_schedule_runs_fewer_steps(kept):
    for length in range(1, MOST):
        runs = replayed(Binomial(length, kept))
        assert sum(runs) == steps(length, kept) == fewest(length, kept)
        assert max(runs) == repeats(length, kept)


@pytest.mark.parametrize(("length", "kept"), [(1_000, 20), (10_000, 50), (20_000, 3)])
def test_long_loops_take_what_the_formula_says(length, kept):
    runs = replayed(Binomial(length, kept)) if kept > 3 else None
    if runs:
        assert sum(runs) == steps(length, kept)
        assert sum(runs) + 1 == runs_again(length, kept) + length, "the forward pass runs the last"
    assert steps(length, kept) < repeats(length, kept) * length


def test_figures_of_the_paper():
    """Griewank and Walther 2000: beta(10, 3) = 286 steps with ten states, none more than thrice."""
    assert repeats(286, 10) == 3
    assert repeats(287, 10) == 4
    assert steps(286, 10) == 3 * 286 - 78


def test_enough_states_for_all_run_nothing_again():
    assert runs_again(64, 64) == 0
    assert [turn.keep for turn in Binomial(3, 3).turns] == [((1, 1), (2, 2)), (), ()]
    assert 1 <= split(64, 3) < 64
