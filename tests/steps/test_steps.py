"""Seven training steps under plans: equal losses and gradients, exactly the planned residuals kept.

The steps have tiny widths, and a few of their layers where these are unrolled. Plans are made for a
TPU, without compiling for it: unrolled layers then decide each for itself, as they would there;
numbers come from the CPU.
"""

import dataclasses
import functools
import math
from collections import Counter

import jax
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals

import jdelta
from benchmarks.models import build, identity
from jdelta import Decision
from jdelta._src import _jax
from jdelta._src.backends.target import resolve
from jdelta._src.backends.tpu import TPU
from jdelta._src.program.graph import graph_of
from jdelta._src.program.loop_nest import walk
from jdelta._src.program.primitives import MATMULS
from jdelta._src.regions.find import with_regions
from jdelta._src.regions.policy import Policy
from jdelta._src.regions.trace import trace
from jdelta._src.residuals.items import items_of
from jdelta._src.residuals.pins import NO_PINS
from jdelta._src.residuals.residual import residuals
from jdelta._src.solver import Knapsack, Milp
from tests.crossed import crossed
from tests.planning import planned, under

STEPS = {
    "mlp": {"name": "mlp"},
    "gpt2 unrolled": {"name": "gpt2", "layers": 2},
    "gpt2 scanned": {"name": "gpt2", "scan": True},
    "bert-base": {"name": "bert-base", "layers": 2},
    "resnet50": {"name": "resnet50", "stages": (1, 2)},
    "vit-b": {"name": "vit-b", "layers": 2},
    "llama scanned": {"name": "llama", "scan": True},
}


@functools.cache
def of_plain_step(step):
    """Its arguments, and its loss and gradients."""
    plain = build(**STEPS[step], small=True)
    args = plain.init(0)
    return args, jax.jit(plain.grads)(*args)


REMATS = {"marked": jdelta.remat, "found": identity}
OTHERWISE = {"found": identity, "marked": jdelta.remat}


@crossed(step=list(STEPS), remat=REMATS)
def test_loss_and_gradients_equal_the_plain_step(step, remat):
    marked = build(**STEPS[step], small=True, remat=remat)
    step_trace, decisions = planned(marked.grads, 0.4, marked.state, marked.batch)
    assert step_trace.automatic == (remat is identity)
    assert {Decision.SAVE, Decision.RECOMPUTE} <= set(decisions.values())
    args, (expected_loss, expected) = of_plain_step(step)
    loss, grads = jax.jit(under(step_trace, decisions, marked.grads))(*args)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    largest = max(float(abs(g).max()) for g in jax.tree.leaves(expected))
    by_path = dict(jax.tree.leaves_with_path(expected))
    for path, g in jax.tree.leaves_with_path(grads):
        e = by_path[path]
        # Relative to the leaf; what is zero but for rounding is measured on the whole tree.
        atol = 1e-5 * max(float(abs(e).max()), 1e-2 * largest)
        np.testing.assert_allclose(g, e, rtol=1e-5, atol=atol, err_msg=str(path))


@crossed(
    step=[s for s in STEPS if "scanned" not in s], remat=REMATS, share={"none": 0.0, "some": 0.4}
)
def test_exactly_the_planned_residuals_are_kept(step, share, remat):
    case = build(**STEPS[step], small=True, remat=remat)
    state, batch = case.init(0)

    def loss(params):
        return case.loss(state._replace(params=params), batch)

    step_trace, decisions = planned(jax.grad(loss), share, state.params)
    saved = {name for name, d in decisions.items() if d is Decision.SAVE}
    assert bool(saved) is (share > 0)
    run = under(step_trace, decisions, lambda params: with_regions(loss)(params))
    kept = {
        what.split("'")[1]
        for _, what in saved_residuals(run, state.params)
        if what.startswith("named")
    }
    outputs = kept - saved  # of a region, and so inputs of what comes after it
    assert saved <= kept
    region = Policy.of(decisions, step_trace.loops, TPU)._region
    regions = Counter(map(region, outputs))
    assert all(count <= 2 for count in regions.values()), (outputs, regions)


def loops_of(jaxpr, length):
    """The scans of this length, in program order, calls looked into."""
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name == "scan" and eqn.params["length"] == length:
            yield eqn
        else:
            for inner in _jax.subjaxprs(eqn):
                yield from loops_of(inner, length)


@pytest.mark.parametrize("step", [s for s in STEPS if "scanned" in s])
def test_exactly_the_planned_residuals_are_stacked_by_a_loop(step):
    case = build(**STEPS[step], small=True, remat=jdelta.remat)
    stacks = {}
    for share in (0.0, 0.4):
        step_trace, decisions = planned(case.grads, share, case.state, case.batch)
        run = under(step_trace, decisions, case.grads)
        jaxpr = jax.make_jaxpr(run)(case.state, case.batch)
        forward = next(loops_of(jaxpr, step_trace.regions[0].nest.trips))
        carry = _jax.scan_counts(forward.params)[1]
        stacks[share] = Counter(
            (v.aval.size // step_trace.regions[0].nest.trips, str(v.aval.dtype))
            for v in forward.outvars[carry:]
        )
    kept = residuals(step_trace.regions[0], resolve("cpu"))
    shapes = {r.name: (math.prod(r.shape), r.dtype) for r in kept}  # of any view of the buffer
    expected = Counter(shapes[n] for n, d in decisions.items() if d is Decision.SAVE)
    assert expected
    assert stacks[0.4] - stacks[0.0] == expected
    assert not stacks[0.0] - stacks[0.4]


@crossed(step=list(STEPS), remat=OTHERWISE)
def test_what_is_kept_is_not_computed_again(step, remat):
    """No product more than in the plain step; so attention with its own derivative runs once."""
    case, plain = build(**STEPS[step], small=True, remat=remat), build(**STEPS[step], small=True)
    args = case.state, case.batch
    step_trace, decisions = planned(case.grads, 1.0, *args)
    under_plan = jax.make_jaxpr(under(step_trace, decisions, case.grads))(*args)
    assert products(under_plan) == products(jax.make_jaxpr(plain.grads)(*args))


def products(jaxpr):
    """How many matrix products a step takes."""
    return sum(nest.trips for op, nest in walk(graph_of(jaxpr)) if op.primitive in MATMULS)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("gpt2", {"layers": 4}),
        ("bert-base", {"layers": 4}),
        ("resnet50", {"stages": (1, 2, 2, 1)}),
        *(pytest.param(n, {}, marks=pytest.mark.full) for n in ("gpt2", "bert-base", "resnet50")),
    ],
)
def test_the_heuristic_is_near_the_optimum(name, size):
    case = build(name, remat=jdelta.remat, **size)
    target = resolve("tpu:v5e:2x2")
    step_trace = trace(case.step, case.state, case.batch)
    priced = [r for region in step_trace.regions for r in residuals(region, target)]
    problem = items_of(priced, target, 0.0, NO_PINS).problem
    nothing = problem.overhead([Decision.RECOMPUTE] * len(problem.items))
    for share in (0.1, 0.4, 0.6):
        room = share * sum(item.bytes for item in problem.items if item.needed)
        offered = dataclasses.replace(problem, capacity=room)
        exact = Milp(time_limit=120.0).solve(offered)
        value = nothing - Knapsack().solve(offered).overhead
        assert value >= 0.99 * (nothing - exact.overhead) > 0
