"""The same question gets the same answer, whatever was asked before it."""

import functools
import itertools

import pytest

import jdelta
from jdelta._src.api import frontier
from jdelta._src.hlo.measure import measure
from tests.sines import shapes, step
from tests.stand_in import in_place_of_the_compiler

BUDGETS = (0.9, 0.75, 0.65, 0.55)

EVERY_ORDER = tuple(map(int, "012301203120132010231021302103210"))
"""Numbers of budgets in which every order of four is a part: the shortest such sequence."""


def test_the_sequence_has_every_order():
    parts = {EVERY_ORDER[i : i + 4] for i in range(len(EVERY_ORDER) - 3)}
    assert set(itertools.permutations(range(4))) <= parts


ARGS = shapes(layers=4, rows=4096, width=64)


def by_xla(monkeypatch):
    """XLA itself, asked once about each program, by its text."""
    known = {}

    def measured(lowered, *args, **options):
        text = lowered.as_text()
        if text not in known:
            known[text] = measure(lowered, *args, **options)
        return known[text]

    monkeypatch.setattr("jdelta._src.search.history.measure", measured)


@pytest.mark.parametrize("judged", [in_place_of_the_compiler, by_xla])
def test_budgets_are_answered_alike_in_any_order(judged, monkeypatch):
    judged(monkeypatch)
    answers = {}
    for number in EVERY_ORDER:
        plan = jdelta.plan(step, BUDGETS[number], *ARGS, target="cpu")
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
    in_place_of_the_compiler(monkeypatch)
    draw = functools.partial(frontier.frontier, step, *ARGS, target="cpu", budgets=BUDGETS[:3])
    curve = draw(history=own) if own else draw()
    assert len(curve.plans) == len(histories) == 3
    assert len(set(map(id, histories))) == 1
    assert isinstance(histories[0], jdelta.History)
    assert own in (None, histories[0])
    assert histories[0]._plans  # what it has learnt
    other = draw()
    assert histories[3] is not histories[0]
    assert other.points == curve.points
