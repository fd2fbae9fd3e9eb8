"""What memory costs: plans to several budgets."""

import jdelta
from tests import small


def test_equal_plans_are_one_point_with_the_budgets_it_holds_for():
    budgets = ("1GiB", "500MiB", "300MiB", 0.5)
    frontier = jdelta.frontier(small.step, *small.make_args(), budgets=budgets)
    assert len(frontier.plans) == 4
    plain, half = frontier.stretches
    assert plain.plans == frontier.plans[:3]
    assert plain.budgets == "300.0 MiB to 1.00 GiB"
    assert half.plan is frontier.plans[3]
    assert half.budgets not in plain.budgets
    assert frontier.points == (
        (plain.plan.compiled_peak, 0.0),
        (half.plan.compiled_peak, half.plan.overhead_share),
    )


def test_budgets_in_one_unit_name_it_once():
    frontier = jdelta.frontier(small.step, *small.make_args(), budgets=("500MiB", "300MiB"))
    assert [stretch.budgets for stretch in frontier.stretches] == ["300.0 to 500.0 MiB"]


def test_a_frontier_is_printed_as_a_table():
    frontier = jdelta.frontier(small.step, *small.make_args(), budgets=("1GiB", "500MiB", "1MiB"))
    head, _, row, floor = str(frontier).splitlines()
    assert head.split()[:1] == ["budget"]
    assert row.startswith("500.0 MiB to 1.00 GiB  ")
    assert floor.startswith("floor ")
