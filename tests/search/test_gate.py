"""The gate at the end of planning, with a stand-in for the compiler and steps inside that lie."""

import dataclasses
import functools
import re
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import pytest

import jdelta
from jdelta import BudgetError, Decision, OffloadError, PlanMismatchError
from jdelta._src.search.candidate import Candidate
from jdelta._src.search.gate import Limits
from jdelta._src.search.search import Search
from jdelta._src.search.summary import NEXT_IS_TOO_LARGE
from tests.sines import shapes, step
from tests.stand_in import EXACT, lowering_to_itself

TARGET = "tpu:v5e:2x2"
ARGS = shapes(layers=12, rows=8192, width=512)


def measured(emission, *_, **said):
    return None, dataclasses.replace(EXACT, peak=emission.simulated, **said)


@pytest.fixture
def plan(monkeypatch):
    monkeypatch.setattr("jdelta._src.search.propose.emit", lowering_to_itself)
    monkeypatch.setattr("jdelta._src.search.history.measure", lambda e, *_, **__: measured(e))
    return functools.partial(jdelta.plan, step, 0.6, *ARGS, target=TARGET, host_budget=0)


def over_the_budget(best):
    return dataclasses.replace(best, measurement=dataclasses.replace(EXACT, peak=1 << 50))


def refused(best):
    return dataclasses.replace(best, measurement=dataclasses.replace(EXACT, refused=True))


def not_compiled(best):
    fields = dataclasses.fields(Candidate)
    return Candidate(**{field.name: getattr(best, field.name) for field in fields})


def of_other_decisions(best):
    return dataclasses.replace(best, decisions=dict.fromkeys(best.decisions, Decision.OFFLOAD))


def without_names(best):
    return dataclasses.replace(best, emission=dataclasses.replace(best.emission, names=frozenset()))


LIES = [
    (over_the_budget, BudgetError, "over the budget"),
    (refused, BudgetError, "over the budget"),
    (not_compiled, BudgetError, "not compiled"),
    (of_other_decisions, PlanMismatchError, "decided otherwise"),
    (without_names, PlanMismatchError, "lacks"),
]


@pytest.mark.parametrize(("lie", "error", "said"), LIES)
def test_what_a_search_returns_is_held_against_the_compiled_program(
    lie, error, said, plan, monkeypatch
):
    def lying(self, outcome):
        return dataclasses.replace(outcome, best=lie(outcome.best))

    monkeypatch.setattr(Search, "settled", lying)
    with pytest.raises(error, match=said):
        plan()


HOST_LIES = [
    ({}, "keeps"),
    ({"host": 1 << 50}, "keeps"),
    ({"host_buffers": (1 << 50,)}, "keeps"),
    ({"host": 1 << 50, "host_buffers": (1 << 50,), "wrong_fetches": ("copy.1",)}, "wrong order"),
]


@pytest.mark.parametrize(("said", "match"), HOST_LIES)
def test_what_is_said_to_be_on_the_host_is_there(said, match, plan, monkeypatch):
    monkeypatch.setattr(
        "jdelta._src.search.attempts.host_fault", lambda *_: None
    )  # a search that looks away
    monkeypatch.setattr(
        "jdelta._src.search.history.measure", lambda e, *_, **__: measured(e, **said)
    )
    with pytest.raises(OffloadError, match=match):
        plan(host_budget=None, pin={"*cos*": "offload"})


def test_more_than_host_budget_is_refused(plan, monkeypatch):
    def of_one_byte(peak, _, files):
        return Limits(peak, 1, files)

    monkeypatch.setattr(
        "jdelta._src.api.planning.Limits", of_one_byte
    )  # a search that went by another
    on_host = {"host": 1 << 50, "host_buffers": (1 << 50,)}
    monkeypatch.setattr(
        "jdelta._src.search.history.measure", lambda e, *_, **__: measured(e, **on_host)
    )
    with pytest.raises(OffloadError, match="more than host_budget"):
        plan(host_budget=None, pin={"*cos*": "offload"})


def own_offload(ws, x):
    on_host = jax.device_put(x, jax.memory.Space.Host)
    return step(ws, x) + jnp.sum(jax.device_put(on_host, jax.memory.Space.Device))


@pytest.mark.parametrize(("step_fn", "own"), [(step, 0), (own_offload, 1 << 24)])
@pytest.mark.parametrize("more", [0, 1])
def test_a_program_that_holds_more_on_the_host_than_host_budget_is_refused(
    step_fn, own, more, plan, monkeypatch
):
    room = 12 << 24
    on_host = {"host": room + own + more, "host_buffers": (room, own)}
    monkeypatch.setattr(
        "jdelta._src.search.history.measure", lambda e, *_, **__: measured(e, **on_host)
    )
    ask = functools.partial(jdelta.plan, step_fn, "4GiB", *ARGS, target=TARGET, host_budget=room)
    with pytest.raises(OffloadError, match="compiled program holds") if more else nullcontext():
        ask(pin={"*cos*": "offload"})


def test_a_remembered_plan_is_compiled_and_compared(plan):
    """Whatever a history says of its peak."""
    history = jdelta.History()
    large = jdelta.plan(step, 0.8, *ARGS, target=TARGET, host_budget=0, history=history)
    for known in history._plans.values():
        known.update({plan: (seconds, 1) for plan, (seconds, _) in known.items()})
    small = jdelta.plan(step, 0.4, *ARGS, target=TARGET, host_budget=0, history=history)
    assert small.compiled_peak <= small.budget < large.compiled_peak


def test_a_plan_is_a_function_of_its_arguments(plan):
    first = plan()
    jdelta.plan(step, 0.5, *ARGS, target=TARGET, host_budget=0)
    second = plan()
    assert second == first
    assert second.compiles == first.compiles


def test_a_budget_that_the_plain_step_meets_is_never_refused(plan, monkeypatch):
    """Though by the simulation it takes twice as much, and everything recomputed does."""

    def said(emission, *_, **__):
        peak = 2 * emission.simulated if emission.policy else emission.simulated // 4
        return None, dataclasses.replace(EXACT, peak=peak)

    monkeypatch.setattr("jdelta._src.search.history.measure", said)
    plain = jdelta.plan(step, 1.0, *ARGS, target=TARGET, host_budget=0)
    tight = jdelta.plan(step, plain.compiled_peak, *ARGS, target=TARGET, host_budget=0)
    assert tight.policy is None
    assert "floor" not in str(tight)
    with pytest.raises(BudgetError, match="the step as it is needs") as refused:
        jdelta.plan(step, plain.compiled_peak - 1, *ARGS, target=TARGET, host_budget=0)
    assert refused.value.floor == plain.compiled_peak


@pytest.mark.parametrize("part", [0.02, 0.3, 3.0])
def test_floors_are_reached_and_above_nothing(part, plan, monkeypatch):
    """Where plans take far less, or more, than simulated, as small ones do on a TPU."""

    def said(emission, *_, **__):
        fixed = emission.simulated - emission.timeline.peak
        peak = fixed + int(part * emission.timeline.peak) * (1 if emission.policy else 10)
        return None, dataclasses.replace(EXACT, peak=peak)

    monkeypatch.setattr("jdelta._src.search.history.measure", said)
    half = plan()
    assert 0 < half.floor <= half.compiled_peak <= half.budget < half.ceiling
    assert "ceiling" not in half.estimates  # that of recompute across regions may be predicted
    least = jdelta.plan(step, 0.6, *ARGS, target=TARGET, host_budget=0, pin={"*": "recompute"})
    assert half.floor <= least.compiled_peak


def test_a_plan_that_leaves_much_at_a_price_says_what_did_not_fit(plan, monkeypatch):
    """All but the floor take the plain step's peak here."""
    plain = []

    def said(emission, *_, **__):
        plain.append(emission.simulated)
        inside = ("sin", "cos", "tanh", "square")
        kept = emission.policy.kept if emission.policy else ("cos",)
        keeps = any(part in name for name in kept for part in inside)
        return None, dataclasses.replace(EXACT, peak=plain[0] if keeps else plain[0] // 3)

    monkeypatch.setattr("jdelta._src.search.history.measure", said)
    costly = plan(target="cpu")  # where nothing is taken to be quicker computed again
    assert costly.overhead > 0
    assert costly.compiled_peak < 0.85 * costly.budget
    assert costly.compiles <= 10
    assert re.search(f"{NEXT_IS_TOO_LARGE}: with layer/.* kept too", costly.result)


def test_a_step_with_the_users_own_checkpoint_is_priced_with_its_recompute():
    def loss(ws, x, wrap):
        body = wrap(lambda y, w: (y + jnp.sin(jnp.tanh(y @ w)), None))
        return jnp.mean(jax.lax.scan(body, x, ws)[0] ** 2)

    def seconds(wrap):
        fun = functools.partial(loss, wrap=wrap)
        fitting = jdelta.plan(lambda ws, x: jax.grad(fun)(ws, x), 1.0, *ARGS, target=TARGET)
        assert fitting.policy is None
        return fitting.step_seconds

    assert seconds(jax.checkpoint) > 1.05 * seconds(lambda f: f)
