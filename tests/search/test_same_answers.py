"""The same question gets the same answer, whatever was asked before it."""

import functools
import itertools

import pytest

import jdelta
from jdelta._src.api import frontier
from tests import small
from tests.stand_in import lowering_to_itself, saying_what_is_predicted

BUDGETS = (0.9, 0.75, 0.6, 0.5)

EVERY_ORDER = tuple(map(int, "012301203120132010231021302103210"))
"""Numbers of budgets in which every order of four is a part: the shortest such sequence."""


def test_the_sequence_has_every_order():
    parts = {EVERY_ORDER[i : i + 4] for i in range(len(EVERY_ORDER) - 3)}
    assert set(itertools.permutations(range(4))) <= parts


@pytest.fixture(params=["stand-in", "XLA:CPU"])
def ask(request, monkeypatch):
    """Plans for a share of the plain step's peak."""
    options = {"target": "cpu"}
    if request.param == "stand-in":
        options = {"target": "tpu:v5e:2x2", "host_budget": 0}
        monkeypatch.setattr("jdelta._src.search.propose.emit", lowering_to_itself)
        monkeypatch.setattr("jdelta._src.search.history.measure", saying_what_is_predicted)
    args = small.make_args()
    return lambda share: jdelta.plan(small.step, share, *args, **options)


def test_budgets_are_answered_alike_in_any_order(ask):
    answers = {}
    for number in EVERY_ORDER:
        plan = ask(BUDGETS[number])
        first = answers.setdefault(number, plan)
        assert plan == first
        assert (plan.compiles, plan.predicted_peak) == (first.compiles, first.predicted_peak)
    assert len({tuple(plan.decisions.items()) for plan in answers.values()}) > 1


@pytest.mark.parametrize("own", [None, jdelta.History()])
def test_a_frontier_hands_its_history_on(own, monkeypatch):
    """A new one to all of its plans, or the one that it is given."""
    histories = []

    def planned(*args, history, **options):
        histories.append(history)
        return jdelta.plan(*args, history=history, **options)

    monkeypatch.setattr(frontier, "plan", planned)
    monkeypatch.setattr("jdelta._src.search.propose.emit", lowering_to_itself)
    monkeypatch.setattr("jdelta._src.search.history.measure", saying_what_is_predicted)
    options = {"target": "tpu:v5e:2x2", "host_budget": 0, "budgets": BUDGETS[:3]}
    draw = functools.partial(frontier.frontier, small.step, *small.make_args(), **options)
    curve = draw(history=own) if own else draw()
    assert len(curve.plans) == len(histories) == 3
    assert len(set(map(id, histories))) == 1
    assert isinstance(histories[0], jdelta.History)
    assert own in (None, histories[0])
    assert histories[0]._plans  # what it has learnt
    other = draw()
    assert histories[3] is not histories[0]
    assert other.points == curve.points
