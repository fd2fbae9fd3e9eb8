"""When copies and fetches happen, of seconds alone: one second of compute an equation."""

import dataclasses

import pytest

from jdelta._src.backends.cuda import CUDA
from jdelta._src.backends.tpu import TPU
from jdelta._src.passes.transfer_timing import (
    IN_TURN,
    Copy,
    TimedCopies,
    TimedCopy,
    TimedFetches,
    place_in_head,
    time_copies,
    time_fetches,
)

ELAPSED = list(map(float, range(21)))
"""Twenty equations."""

TIED = dataclasses.replace(CUDA.transfers, slack=1.0)
FREE = dataclasses.replace(TPU.transfers, slack=1.0)


def copy(place, seconds, read_at=20):
    return Copy(place, seconds, read_at, range(place + 1, 20))


def timed(*copies, habits=TIED, units=2):
    return time_copies(copies, ELAPSED, units, habits)


def test_a_copy_is_done_by_the_first_stop_that_hides_it():
    assert timed(copy(2, 3.0)) == TimedCopies((TimedCopy(2, None, 4),), done_seconds=5.0)


def test_a_second_copy_has_the_link_when_the_first_is_done():
    first, second = timed(copy(2, 3.0), copy(3, 3.0)).copies
    assert (first.end, second.start, second.end) == (4, None, 7)


def test_a_third_copy_starts_when_the_first_is_done_where_copies_are_tied():
    copies = copy(2, 3.0), copy(3, 3.0), copy(4, 1.0)
    assert timed(*copies).copies[2] == TimedCopy(4, 4, 8)
    assert timed(*copies, habits=FREE).copies[2] == TimedCopy(4, None, 8)


def test_what_a_loop_reads_before_that_starts_at_once():
    copies = copy(2, 9.0), copy(3, 1.0), copy(4, 1.0, read_at=6)
    assert timed(*copies).copies[2] == TimedCopy(4, None, None)


def test_a_copy_without_a_stop_late_enough_ends_with_the_forward_pass():
    assert timed(copy(18, 5.0)).copies == (TimedCopy(18, None, None),)


def test_copies_that_nothing_hides_lag_by_one_unit():
    bound = timed(copy(0, 15.0), copy(1, 15.0))
    assert bound.are_bound
    assert [c.end for c in bound.copies] == [9, 10]


@pytest.mark.parametrize(
    ("link", "least", "expected"),
    [
        ([0.5, 0.5, 1.5, 0.0], False, TimedFetches((0, 0, 0, 3))),
        ([0.5, 0.5, 1.5, 0.0], True, TimedFetches((0, 1, 2, 3), are_in_turn=True)),
        ([1.5, 1.5, 1.5, 1.5], False, TimedFetches((0, 0, 1, 2))),
        ([IN_TURN] * 4, False, TimedFetches((0, 0, 1, 2), are_in_turn=True)),
    ],
    ids=["hidden", "least memory", "bound by the link", "in turn"],
)
def test_fetches_start_as_many_units_ahead_as_hide_them(link, least, expected):
    assert time_fetches(link, [1.0] * 4, least=least) == expected


@pytest.mark.parametrize(
    ("done", "seconds", "place"),
    [(3.0, 4.0, 12), (3.0, 19.0, 4), (18.0, 1.0, None), (8.0, 1.0, 16)],
)
def test_the_first_fetch_starts_at_the_last_place_that_hides_it(done, seconds, place):
    assert place_in_head([1, 4, 8, 12, 16], ELAPSED, done, seconds) == place
