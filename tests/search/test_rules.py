"""Each rule of the search alone: records in, an answer out."""

from types import SimpleNamespace

import pytest

from jdelta._src.decision import Decision
from jdelta._src.regions.region import Grouping
from jdelta._src.search import rules
from jdelta._src.search.candidate import Found, Refused
from jdelta._src.search.rules import Trials
from jdelta._src.solver import Knapsack
from jdelta._src.solver.problem import Item, Memory, Move, Problem
from tests.candidates import OFFLOAD, RECOMPUTE, SAVE, compiled, predicted

BOUND = 1000


def trials(*plans, floor=None):
    return Trials(BOUND, floor, plans)


def test_the_best_trial_is_the_quickest_that_fits_and_of_equal_ones_the_last():
    slow, quick, equal, large = (compiled(p, s) for p, s in ((9, 3), (8, 2), (7, 2), (2000, 1)))
    assert trials().best is None
    assert trials(large).best is None
    assert trials(slow, quick, equal, large).best is equal
    assert trials(large, floor=slow).best is slow


def test_the_excess_is_of_the_last_overrun():
    after = trials(compiled(1200), compiled(1050), compiled(900))
    assert (after.excess, after.exceeded) == (50, 2)
    assert (trials(compiled(1000)).excess, trials(compiled(1000)).exceeded) == (0, 0)


def test_after_an_overrun_the_aim_is_lower():
    assert rules.aim(trials(), is_last=False) == 990
    assert rules.aim(trials(compiled(1040)), is_last=False) == 980
    assert rules.aim(trials(compiled(1040)), is_last=True) == 900
    assert rules.aim(trials(compiled(1040), compiled(1020)), is_last=False) == 940


def test_what_may_not_exceed_the_budget_is_all_the_lower_only_while_nothing_fits():
    fits, large = compiled(800), compiled(1040)
    assert rules.aim(trials(), is_last=True) == 980
    assert rules.aim(trials(large, fits), is_last=True) == 980
    assert rules.aim(trials(large, floor=fits), is_last=True) == 900


def test_nothing_is_aimed_at_below_the_floor():
    assert rules.aim(trials(floor=compiled(994)), is_last=False) == 997
    assert rules.aim(trials(floor=compiled(980)), is_last=False) == 990


@pytest.mark.parametrize(
    ("excess", "must_fit", "bytes_below"),
    [(0, False, 10), (0, True, 20), (40, False, 20), (40, True, 100), (900, True, 220)],
)
def test_the_margin_grows_with_the_excess_up_to_a_tenth_of_the_budget(
    excess, must_fit, bytes_below
):
    assert rules.margin(excess, BOUND, must_fit=must_fit) == bytes_below


def test_the_floor_is_in_doubt_where_it_takes_nearly_all_of_the_budget():
    assert not rules.is_floor_in_doubt(970, BOUND)
    assert rules.is_floor_in_doubt(971, BOUND)


def test_a_large_floor_is_believed_and_a_small_one_after_some_programs():
    assert rules.is_floor_believed(1000, 1000, 1)
    assert not rules.is_floor_believed(999, 1000, 3)
    assert rules.is_floor_believed(999, 1000, 4)


def test_the_search_is_lost_where_nothing_fits_and_the_last_plan_is_far_off():
    assert rules.is_lost(trials(compiled(1101)), 0.1)
    assert not rules.is_lost(trials(compiled(1100)), 0.1)
    assert not rules.is_lost(trials(compiled(1101), compiled(900)), 0.1)
    assert not rules.is_lost(trials(compiled(1101), floor=compiled(900)), 0.1)
    assert not rules.is_lost(trials(), 0.1)


def test_the_budget_is_used_by_the_last_plan_if_it_is_the_best():
    assert rules.uses_budget(trials(compiled(970)))
    assert not rules.uses_budget(trials(compiled(969)))
    assert not rules.uses_budget(trials(compiled(1001)))
    assert not rules.uses_budget(trials(compiled(970, 1.0), compiled(980, 2.0)))


@pytest.mark.parametrize(
    ("best", "seconds", "is_worth_it"),
    [
        (None, 9.0, True),
        (compiled(900, 3.0), 0.9, True),
        (compiled(900, 3.0), 1.1, False),  # a fiftieth of 100 s, at nine tenths of the budget
        (compiled(800, 3.0), 1.1, True),  # at eight
        (compiled(800, 3.0), 3.0, False),
    ],
)
def test_a_plan_is_compiled_for_a_fiftieth_of_the_step_or_to_use_the_budget(
    best, seconds, is_worth_it
):
    tried = trials(compiled(1100, 0.5), *filter(None, [best]))
    assert rules.is_worth_compiling(predicted(950, seconds), tried, 100.0) is is_worth_it


class Offered:
    """One item that may be saved, computed again in 3 s, or offloaded in 2 s of waiting."""

    def __init__(self, *, moves=True):
        move = Move(OFFLOAD, 1.0, 1.0, 8.0)
        item = Item("tanh", 8.0, 3.0, moves=(move,) if moves else ())
        self.problem = Problem((item,), 0.0, (Memory(OFFLOAD),))

    def without(self, *_):
        return Offered(moves=False)

    def decisions(self, chosen):
        return {"tanh": chosen[0]}

    def overhead(self, decisions):
        return self.problem.overhead([decisions["tanh"]])


@pytest.mark.parametrize(
    ("seconds", "decision", "extra", "is_slow"),
    [
        (2.0, OFFLOAD, 0.0, False),
        (4.0, OFFLOAD, 0.0, True),
        (4.0, OFFLOAD, 1.5, False),
        (4.0, RECOMPUTE, 0.0, False),
    ],
)
def test_there_is_no_offload_where_recompute_is_quicker(seconds, decision, extra, is_slow):
    plan = compiled(900, seconds, tanh=decision)
    assert rules.is_quicker_without_offload(plan, Offered(), Knapsack(), extra) is is_slow


def test_offload_that_is_closed_already_is_not_closed_again():
    plan, closed = compiled(900, 4.0, tanh=OFFLOAD), Offered(moves=False)
    assert not rules.is_quicker_without_offload(plan, closed, Knapsack(), 0.0)


def test_saved_bytes_are_those_of_items():
    assert rules.saved_bytes(compiled(900, tanh=SAVE, input=SAVE), Offered()) == 8.0
    assert rules.saved_bytes(compiled(900, tanh=OFFLOAD), Offered()) == 0


def test_pins_leave_the_plain_step_free_if_all_stays():
    assert rules.is_free({})
    assert rules.is_free({"tanh": SAVE})
    assert not rules.is_free({"tanh": SAVE, "sin": RECOMPUTE})


def test_the_plain_step_is_compiled_first_if_it_may_fit():
    assert rules.may_plain_fit(1150, BOUND)
    assert not rules.may_plain_fit(1151, BOUND)


@pytest.mark.parametrize(
    ("simulated_peak", "plain_peak", "is_small", "may_fit"),
    [
        (900, 1001, True, False),
        (900, 1000, False, True),  # by what is predicted now
        (1300, 2000, True, True),  # 900 compiled: the simulation is of no use
        (1300, 2000, False, False),
    ],
)
def test_the_plain_step_may_fit_after_all(simulated_peak, plain_peak, is_small, may_fit):
    best, plain = compiled(900, simulated=simulated_peak), predicted(2000)
    said = rules.may_plain_fit_after_all(plain, plain_peak, best, BOUND, is_small=is_small)
    assert said is may_fit


def test_the_plain_step_is_not_compiled_in_vain():
    best, as_quick = compiled(900, simulated=2000), compiled(900, 0.0, simulated=2000)
    plain = predicted(2000)
    assert rules.may_plain_fit_after_all(plain, 2000, best, BOUND, is_small=True)
    assert not rules.may_plain_fit_after_all(plain, 2000, as_quick, BOUND, is_small=True)
    assert not rules.may_plain_fit_after_all(compiled(2000), 900, best, BOUND, is_small=True)


def test_larger_units_are_compiled_where_they_may_be_below_a_peak():
    assert rules.may_be_below(1049, BOUND)
    assert not rules.may_be_below(1050, BOUND)


def test_a_grouping_has_to_be_worth_it():
    seconds = {Grouping(2): 0.5, Grouping(4): 0.3, Grouping(8): 0.297}
    assert rules.worthwhile_grouping(seconds, alike=0.4, forward=1.0) == Grouping(4)
    assert rules.worthwhile_grouping(seconds, alike=0.4, forward=0.0) == Grouping(8)
    assert rules.worthwhile_grouping(seconds, alike=0.301, forward=1.0) is None


@pytest.mark.parametrize(
    ("decisions", "overhead", "tried"),
    [
        ({"sin": RECOMPUTE, "tanh": RECOMPUTE}, 2.0, True),  # next to nothing is kept
        ({"sin": SAVE, "tanh": OFFLOAD}, 2.0, True),
        ({"sin": SAVE, "tanh": Decision.SPILL}, 2.0, True),
        ({"sin": SAVE, "tanh": RECOMPUTE}, 2.0, False),
        ({"sin": SAVE, "tanh": OFFLOAD}, 0.1, False),  # and that is cheap
    ],
)
def test_other_cuts_are_tried_where_a_plan_is_dear(decisions, overhead, tried):
    floor = compiled(500, 2.0, sin=RECOMPUTE, tanh=RECOMPUTE)
    best = compiled(700, overhead, **decisions)
    assert rules.may_other_cuts_be_quicker(best, floor, seconds=10.0) == tried


def test_where_nothing_fits_checkpoints_of_loops_are_nested():
    assert rules.nested_grouping({"layer": 16, "head": 1}) == Grouping(4, nested=True)
    assert rules.nested_grouping({"layer": 7}) is None  # a prime has no divisor
    assert rules.nested_grouping({}) is None


RESIDUALS = [
    SimpleNamespace(name=name, bytes=size)
    for name, size in (("sin", 10), ("tanh", 30), ("cos", 20), ("exp", 40))
]


def test_what_did_not_fit_is_of_the_smallest_plan_that_was_too_large():
    best = compiled(500, 2.0, sin=SAVE, tanh=RECOMPUTE, cos=RECOMPUTE, exp=RECOMPUTE)
    least = compiled(1100, 1.0, sin=SAVE, tanh=SAVE, cos=SAVE, exp=RECOMPUTE)
    other = compiled(1200, 1.0, sin=SAVE, tanh=SAVE, cos=SAVE, exp=SAVE)
    slower = compiled(1050, 3.0, sin=SAVE, tanh=SAVE, cos=RECOMPUTE, exp=RECOMPUTE)
    said = rules.refused([other, least, slower, best], best, BOUND, RESIDUALS)
    assert said == Refused(("tanh", "cos"), 50, 1100)
    assert rules.refused([slower, best], best, BOUND, RESIDUALS) is None


def test_nothing_is_refused_where_little_is_left():
    best, large = compiled(850, 2.0, exp=RECOMPUTE), compiled(1100, 1.0, exp=SAVE)
    assert rules.refused([large], best, BOUND, RESIDUALS) is None


FOUND = Found(compiled(900), BOUND, 700, 2000, ("floor", "ceiling"), 3)


def test_a_settled_floor_is_no_higher_than_any_peak_that_was_reached():
    def floor(least):
        return rules.settled(FOUND, predicted(700), 700, predicted(2000), least).floor

    assert floor(None) == floor(800) == 700
    assert floor(600) == 600


def test_what_was_compiled_is_no_estimate():
    settled = rules.settled(FOUND, compiled(650), 650, compiled(1900), 650)
    assert (settled.floor, settled.ceiling, settled.estimates) == (650, 1900, ())
    as_before = rules.settled(FOUND, predicted(650), 650, predicted(1), None)
    assert (as_before.ceiling, as_before.estimates) == (2000, ("floor", "ceiling"))


def test_the_ceiling_is_no_lower_than_the_floor():
    tiny = compiled(500)
    assert rules.settled(FOUND, compiled(650), 650, tiny, None).floor == 500
    assert rules.settled(FOUND, compiled(650), 650, tiny, None).ceiling == 500


@pytest.mark.parametrize(
    ("promised", "peak", "is_undone"),
    [(500, 990, True), (500, 850, False), (500, 600, False), (950, 1000, False)],
)
def test_recompute_is_undone_where_next_to_nothing_is_left_of_what_was_promised(
    promised, peak, is_undone
):
    plan, plain = compiled(peak, simulated=promised), compiled(1000)
    assert rules.is_recompute_undone(plan, plain) is is_undone
