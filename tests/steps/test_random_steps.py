"""Whatever a step does, and whatever a plan decides about it, its results are the plain step's."""

import dataclasses
import functools
import math
import os

import jax
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import jdelta
from jdelta._src import _jax
from jdelta._src.backends.cpu import CPU
from jdelta._src.backends.platforms import BACKENDS
from jdelta._src.backends.target import resolve
from jdelta._src.decision import Decision
from jdelta._src.passes.emit import Step, emit
from jdelta._src.passes.program import Context, Program
from jdelta._src.passes.recompute import with_recompute
from jdelta._src.passes.timed_transfers import timed
from jdelta._src.regions.policy import Policy
from jdelta._src.regions.trace import trace
from jdelta._src.residuals.items import items_of
from jdelta._src.residuals.pins import Pins
from jdelta._src.residuals.region_inputs import with_region_inputs
from jdelta._src.residuals.residual import residuals
from tests.planning import under
from tests.random_steps import LAYER_FORMS, STARTING, arguments, forms, step_of
from tests.spilling import open_store

TARGET = resolve("tpu:v5e:2x2")
WAYS = Decision.SAVE, Decision.OFFLOAD, Decision.RECOMPUTE
EXAMPLES = int(os.environ.get("JDELTA_RANDOM_STEPS", "0"))
"""Steps of each form, others in every run; without it a few that are always the same."""


def some(examples):
    """So many steps, the same in every run, unless more are asked for."""
    return settings(
        max_examples=EXAMPLES or examples,
        deadline=None,
        derandomize=not EXAMPLES,
        phases=[Phase.generate],
    )


DECISIONS = st.lists(st.sampled_from(WAYS), min_size=1, max_size=12)


def planned(step, args, decisions, pins):
    """The step's regions, and by name what the decisions come to, as far as each is possible."""
    step_trace = trace(step, *args)
    priced = [r for region in step_trace.regions for r in residuals(region, TARGET)]
    assigned = {r.name: decisions[i % len(decisions)] for i, r in enumerate(priced)}
    pinned = {r.name: assigned[r.name] for r in priced[:pins]}
    pinned = {name: d for name, d in pinned.items() if d is not Decision.OFFLOAD}
    items = items_of(priced, TARGET, math.inf, Pins(pinned))
    possible = {
        item.name: {Decision.SAVE, Decision.RECOMPUTE, *(move.to for move in item.moves)}
        for item in items.problem.items
    }
    chosen = [
        assigned[name] if assigned[name] in ways else Decision.SAVE
        for name, ways in possible.items()
    ]
    return step_trace, items.policy_decisions(items.decisions(chosen))


def check(got, expected):
    got, expected = jax.tree.leaves(got), jax.tree.leaves(expected)
    largest = max(float(abs(leaf).max()) for leaf in expected if leaf.dtype == np.float32)
    for a, b in zip(got, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if a.dtype != np.float32:
            np.testing.assert_array_equal(a, b)
            continue
        scale = max(float(abs(b).max()), 1e-2 * largest)
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3 * scale)


@pytest.mark.parametrize("layers", LAYER_FORMS)
def test_results_equal_the_plain_step(layers):
    @some(2)
    @given(forms(layers), DECISIONS, st.integers(0, 3))
    def run(form, decisions, pins):
        args = arguments()
        expected = jax.jit(step_of(dataclasses.replace(form, marked=False), None))(*args)
        step = step_of(form, jdelta.remat)
        step_trace, by_name = planned(step, args, decisions, pins)
        staged = jax.make_jaxpr(under(step_trace, by_name, step))(*args)
        flat = jax.tree.leaves(args)
        check(jax.jit(functools.partial(_jax.evaluate, staged))(*flat), expected)
        policy = Policy.of(by_name, step_trace.loops, TARGET.backend)
        placed = TARGET.abstract(args)
        emit(
            Step(step, placed, (), TARGET, step_trace.aliases, automatic=step_trace.automatic),
            policy,
        )
        written = with_recompute(step_trace.recorded.program, policy)
        if written is not None:  # what plans are made of
            evaluated = functools.partial(_jax.evaluate, written)
            check(jax.jit(evaluated)(*flat), expected)
        for backend in BACKENDS.values():
            program = Program(staged)
            context = Context(backend, TARGET.rates, offloads=bool(policy.offloaded))
            other = timed(program, context)
            if other is not program:
                moved = jax.jit(functools.partial(_jax.evaluate, other.jaxpr))
                check(moved(*flat), expected)

    run()


@pytest.mark.parametrize("layers", sorted(set(LAYER_FORMS) - {"cond", "cond in a scan"}))
def test_what_enters_a_unit_is_moved_where_it_is_said_to_be_read(layers, tmp_path):
    """All else being kept: JAX hands it on to the backward pass, or does not.

    Not under ``jax.vmap``, which may transpose what is spilled: that is refused.
    """
    target, store = resolve("cpu"), open_store(tmp_path)
    args = arguments()

    @some(2)
    @given(forms(layers).filter(lambda form: form.wrapped != "per example"))
    def run(form):
        step = step_of(form, jdelta.remat)
        step_trace = trace(step, *args)
        priced = with_region_inputs(step_trace, target)
        assigned = {r.name: Decision.SPILL if r.region_input else Decision.SAVE for r in priced}
        names = assigned | {r.entering: assigned[r.name] for r in priced if r.entering}
        policy = Policy.of(names, step_trace.loops, CPU, partly=step_trace.partly)
        planned_step = Step(
            step, args, (), target, step_trace.aliases, step_trace.automatic, store=store
        )
        moved = {place.name for place in emit(planned_step, policy).spilled.places.values()}
        read = {r.name for r in priced if r.region_input and r.needed}
        of_units = {r.name for r in priced if {r.name, r.entering} & moved}
        begins_loops = any(op.kind in STARTING for op in form.ops)
        assert of_units >= read if begins_loops else of_units == read

    run()


@pytest.mark.parametrize("layers", LAYER_FORMS)
def test_plans_are_within_their_budgets(layers):
    """Or there is an error with a floor; from end to end, as people call it."""

    @some(1)
    @given(forms(layers), st.sampled_from([0.3, 0.5, 0.7, 0.9]))
    def run(form, share):
        args = arguments()
        step = step_of(form, jdelta.remat)
        try:
            plan = jdelta.plan(step, share, *args)
        except jdelta.BudgetError as error:
            floor = error.floor
        else:
            floor = plan.floor
            assert plan.compiled_peak <= plan.budget
            expected = jax.jit(step_of(dataclasses.replace(form, marked=False), None))(*args)
            check(plan.jit()(*args), expected)
        assert floor is not None
        assert floor > 0

    run()
