"""Which candidates are near a peak, and how many bytes to allow next: numbers in, numbers out."""

import math

import pytest

from jdelta._src.search.capacities import Bracket, Ends, Proposal, between_larger, quickest
from tests.candidates import predicted

GOAL = 1000


def proposal(kept, peak, overhead=1.0, capacity=None):
    return Proposal(predicted(peak, overhead), kept if capacity is None else capacity, kept, peak)


NOTHING = proposal(0, 600, 9.0)


def test_a_bracket_is_narrowed_from_both_sides():
    bracket = Bracket(0.0, math.inf).narrowed(8.0, fits=True).narrowed(12.0, fits=False)
    assert bracket == Bracket(8.0, 12.0)
    assert bracket.middle == 10.0


def test_the_ends_are_what_fits_with_most_kept_and_what_does_not_with_least():
    little, more = proposal(100, 700), proposal(300, 900)
    large, larger = proposal(500, 1100), proposal(600, 1300)
    assert Ends.of([NOTHING, larger, little, large, more], GOAL) == Ends(more, large)
    assert Ends.of([NOTHING, little, more], GOAL) == Ends(more, None)
    assert Ends.of([NOTHING], GOAL) == Ends(NOTHING, None)


def test_what_keeps_more_than_one_that_does_not_fit_is_no_end():
    """A peak is not where all that is kept is alive."""
    little, large, lucky = proposal(100, 700), proposal(300, 1100), proposal(400, 900)
    assert Ends.of([NOTHING, lucky, large, little], GOAL) == Ends(little, large)
    assert quickest([NOTHING, lucky, large, little], GOAL) in (lucky, little)


def test_the_quickest_that_fits_is_taken_and_of_equal_ones_the_last():
    slow, quick, equal = (proposal(k, 900, s) for k, s in ((1, 3.0), (2, 2.0), (3, 2.0)))
    large = proposal(9, 1100, 1.0)
    assert quickest([NOTHING, slow, quick, equal, large], GOAL) is equal
    assert quickest([NOTHING, large], GOAL) is NOTHING


def test_without_anything_that_exceeds_the_next_is_further_away_each_time():
    once = Ends.of([NOTHING, proposal(300, 800, capacity=400)], GOAL)
    assert Ends.of([NOTHING], GOAL).capacity(GOAL) == 400
    assert once.capacity(GOAL) == 400 + 200 + 2 * 100
    close = Ends.of([proposal(0, 999)], GOAL)
    assert close.capacity(GOAL) == 20  # bytes kept need not be alive at the peak


@pytest.mark.parametrize(("peak", "part"), [(900, 0.5), (1000, 0.2), (500, 0.8)])
def test_between_two_ends_the_next_is_where_the_goal_is_but_near_neither(peak, part):
    ends = Ends(proposal(300, peak, capacity=400), proposal(600, 1100))
    assert ends.capacity(GOAL) == pytest.approx(400 + part * 200)
    assert not ends.are_closed(GOAL)


def test_nothing_is_between_ends_where_the_solver_has_been_allowed_as_much():
    assert Ends(proposal(300, 900, capacity=500), proposal(505, 1100)).are_closed(GOAL)
    assert not Ends(proposal(300, 900, capacity=500), proposal(506, 1100)).are_closed(GOAL)
    assert not Ends(proposal(300, 900), None).are_closed(GOAL)


def test_behind_closed_ends_the_largest_gap_among_quicker_ones_is_looked_into():
    """More bytes kept may take less at the peak."""
    best = proposal(100, 900, 5.0)
    larger = [proposal(110, 1100, 4.0), proposal(150, 1010, 3.0, capacity=180), proposal(300, 1200)]
    assert between_larger([NOTHING, best, *larger], best, GOAL) == 240
    assert between_larger([NOTHING, best, *larger[:2]], best, GOAL) == 130
    assert between_larger([NOTHING, best, larger[0]], best, GOAL) is None
    slower = proposal(300, 1200, 6.0)
    assert between_larger([NOTHING, best, larger[0], slower], best, GOAL) is None
