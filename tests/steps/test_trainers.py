"""What trainers do, under plans: equal steps, exactly the planned residuals, memory as compiled."""

import functools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdelta
from benchmarks.models import identity
from jdelta import Decision
from jdelta._src import _jax
from jdelta._src.backends.target import resolve
from jdelta._src.passes.emit import Step, emit
from jdelta._src.program.loop_nest import Nest
from jdelta._src.regions.trace import trace
from jdelta._src.residuals.region_inputs import with_region_inputs
from jdelta._src.residuals.residual import residuals
from tests.compilers import TARGETS
from tests.crossed import crossed
from tests.frameworks import LAYERS, mean_square
from tests.planning import planned, under
from tests.trainers import MICRO, STEPS, TRAINERS, descend, layer, rows_of, weights

TPU = "tpu:v5e:2x2"
REMATS = {"marked": jdelta.remat, "found": identity}
OTHERWISE = {"found": identity, "marked": jdelta.remat}
MARKS = pytest.mark.parametrize("remat", REMATS.values(), ids=REMATS)
HABITS = pytest.mark.parametrize("habit", TRAINERS)


def check(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def compare(step, plain, state, batch):
    """Both steps, three times from the same state: states and all else that comes out."""
    expected = jax.tree.map(jnp.copy, state)  # donation may take the other
    for _ in range(3):
        state, got = step(state, batch)
        expected, aux = plain(expected, batch)
        check((state, got), (expected, aux))


def bytes_of(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))


@crossed(habit=list(TRAINERS), remat=REMATS)
def test_steps_equal_the_plain_step(habit, remat):
    step, args = TRAINERS[habit](64, 32, remat)
    step_trace, decisions = planned(step, 0.4, *args)
    assert step_trace.automatic == (remat is identity)
    assert {Decision.SAVE, Decision.RECOMPUTE} <= set(decisions.values())
    plain, _ = TRAINERS[habit](64, 32, identity)
    compare(jax.jit(under(step_trace, decisions, step)), jax.jit(plain), *args)


@HABITS
def test_jit_within_a_budget(habit):
    step, args = TRAINERS[habit](512, 32, jdelta.remat)
    plain, _ = TRAINERS[habit](512, 32, identity)
    run = jdelta.jit(step, budget=0.8, donate_argnums=0)
    compare(run, jax.jit(plain), *args)
    (plan,) = run.plans
    assert plan.compiled_peak <= plan.budget < plan.ceiling
    assert Decision.RECOMPUTE in plan.decisions.values()


def forward_loops(jaxpr, around=False):
    """The loops over layers of forward passes, other loops looked into."""
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        backward = around or "transpose(" in _jax.name_stack(eqn)
        if eqn.primitive.name == "scan" and eqn.params["length"] == LAYERS:
            if not backward:
                yield eqn
        else:
            for inner in _jax.subjaxprs(eqn):
                yield from forward_loops(inner, backward)


def kept_by(step, step_trace, decisions, args):
    """Elements and dtype of each stack of values that forward loops hand on."""
    jaxpr = jax.make_jaxpr(under(step_trace, decisions, step))(*args)
    return Counter(
        (v.aval.size // LAYERS, str(v.aval.dtype))
        for loop in forward_loops(jaxpr)
        for v in loop.outvars[_jax.scan_counts(loop.params)[1] :]
    )


@crossed(habit=list(TRAINERS), remat=OTHERWISE)
def test_exactly_the_planned_residuals_are_kept(habit, remat):
    step, args = TRAINERS[habit](64, 32, remat)
    step_trace, nothing = planned(step, 0.0, *args)
    _, some = planned(step, 0.4, *args)
    target = resolve("cpu")
    shapes = {
        r.name: (math.prod(r.shape), r.dtype)
        for region in step_trace.regions
        for r in residuals(region, target)
    }
    saved = [name for name, d in some.items() if d is Decision.SAVE]
    assert saved
    assert Decision.SAVE not in nothing.values()
    before, after = (kept_by(step, step_trace, decisions, args) for decisions in (nothing, some))
    expected = Counter(shapes[name] for name in saved)
    if (
        habit == "two optimisers"
    ):  # keeping the first product of constant weights, input kept no more
        expected[64 * 32, "float32"] -= 1
    assert after - before == expected
    assert not before - after


# Loops around the gradient


@MARKS
@pytest.mark.parametrize(("habit", "times"), [("accumulation", MICRO), ("many steps", STEPS)])
def test_one_iteration_of_a_loop_around_the_gradient_counts(habit, times, remat):
    step, args = TRAINERS[habit](64, 32, remat)
    step_trace = trace(step, *args)
    (region,) = step_trace.regions
    assert region.nest == Nest(kept=LAYERS, loops=1, repeats=times)
    assert step_trace.loops == {region.name: 1}
    once, _ = TRAINERS["moving average"](64, 32, remat)  # the same network, one gradient
    state, _ = TRAINERS["moving average"](64, 32, remat)[1]
    rows = 64 // MICRO if habit == "accumulation" else 64
    (single,) = trace(once, state, rows_of(rows, 32)).regions
    target = resolve(TPU)
    for a, b in zip(residuals(region, target), residuals(single, target), strict=True):
        assert (a.shape, a.count, a.bytes) == (b.shape, LAYERS, b.bytes)
        assert (a.repeats, b.repeats) == (times, 1)
        assert a.seconds == pytest.approx(times * b.seconds)
        assert a.loops == b.loops == 1


def test_weights_that_a_loop_carries_enter_no_region():
    step, args = unrolled_steps(64, 32)
    priced = with_region_inputs(trace(step, *args), resolve(TPU))
    entering = [r for r in priced if r.region_input]
    assert entering
    assert {r.shape for r in entering} == {(64, 32)}
    assert {(r.count, r.repeats, r.loops) for r in entering} == {(1, STEPS, 0)}


def unrolled_steps(rows, width, remat=jdelta.remat, layers=LAYERS):
    """Several steps in one loop, layers unrolled in each."""
    unit = remat(layer)

    def loss(ws, x):
        for i in range(layers):
            x = unit(x, jax.tree.map(lambda w, i=i: w[i], ws))
        return mean_square(x)

    def step(ws, xs):
        def one(ws, x):
            value, grads = jax.value_and_grad(loss)(ws, x)
            return descend(ws, grads), value

        return jax.lax.scan(one, ws, xs)

    ws = jax.tree.map(lambda w: w[:layers], weights(width))
    return step, (ws, jnp.stack([rows_of(rows, width)] * STEPS))


def checkpoints(jaxpr):
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name in ("remat", "remat2", "checkpoint"):
            yield eqn
        for inner in _jax.subjaxprs(eqn):
            yield from checkpoints(inner)


@MARKS
def test_unrolled_layers_in_a_loop_of_steps_are_shielded(remat):
    """Forward and backward pass share the loop's body, where CSE would undo recompute."""
    step, args = unrolled_steps(64, 32, remat)
    step_trace, decisions = planned(step, 0.4, *args)
    run = under(step_trace, decisions, step)
    eqns = list(checkpoints(jax.make_jaxpr(run)(*args)))
    assert eqns
    assert all(eqn.params["prevent_cse"] for eqn in eqns)
    plain, _ = unrolled_steps(64, 32, identity)
    check(jax.jit(run)(*args), jax.jit(plain)(*args))


def test_the_floor_of_accumulation_is_below_the_plain_peak():
    step, args = TRAINERS["accumulation"](2048, 32, jdelta.remat)
    plan = jdelta.plan(step, 0.6, *args, donate_argnums=0)
    assert plan.floor < plan.compiled_peak <= plan.budget < plan.ceiling
    full_batch, args = TRAINERS["moving average"](2048, 32, jdelta.remat)
    assert jdelta.plan(full_batch, 1.0, *args, donate_argnums=0).ceiling > 2 * plan.ceiling


# Under vmap


@MARKS
@pytest.mark.parametrize("habit", ["vmapped loss", "vmapped gradients"])
def test_residuals_under_vmap_are_those_of_the_batch(habit, remat):
    step, args = TRAINERS[habit](64, 32, remat)
    (region,) = trace(step, *args).regions
    (single,) = trace(TRAINERS["mixed precision"](64, 32, remat)[0], args[0], args[1]).regions
    wanted = {r.name: math.prod(r.shape) for r in residuals(single, resolve(TPU))}
    sizes = {r.name: math.prod(r.shape) for r in residuals(region, resolve(TPU))}
    assert set(sizes.values()) == {64 * 32}
    assert set(wanted.values()) == {64 * 32}


def test_a_collective_under_vmap():
    """A unit that talks to the other examples is sized for all of them too."""

    @jdelta.remat
    def centred(x, w):
        h = jnp.tanh(x @ w)
        return x + h - jax.lax.pmean(h, "examples")

    def step(w, xs):
        def loss(w):
            run = jax.vmap(lambda x: centred(centred(x, w), w), axis_name="examples")
            return mean_square(run(xs))

        return jax.grad(loss)(w)

    args = weights(16)["up"][0], rows_of(8, 16)
    step_trace, decisions = planned(step, 0.5, *args)
    shapes = {r.shape for region in step_trace.regions for r in residuals(region, resolve(TPU))}
    assert (8, 16) in shapes
    check(jax.jit(under(step_trace, decisions, step))(*args), jax.jit(step)(*args))


# State: donated, on the host


def simulated(step, args, target, donate):
    placed = target.abstract(args)
    step_trace = trace(step, *placed)
    return emit(Step(step, placed, donate, target, step_trace.aliases), None)


def test_donated_state_counts_once():
    step, (state, batch) = TRAINERS["moving average"](64, 32, jdelta.remat)
    target = resolve(TPU)
    kept = simulated(step, (state, batch), target, ()).simulated
    assert kept - simulated(step, (state, batch), target, (0,)).simulated == bytes_of(state)
    plan = jdelta.plan(step, 0.8, state, batch, donate_argnums=0)
    assert plan.compiled.memory_analysis().alias_size_in_bytes == bytes_of(state)


@pytest.mark.parametrize("habit", ["host state", "streamed weights"])
@pytest.mark.parametrize("donate", [(), (0,)])
def test_state_on_the_host_takes_no_device_memory(habit, donate):
    step, (state, batch) = TRAINERS[habit](64, 32, jdelta.remat)
    emission = simulated(step, (state, batch), resolve(TPU), donate)
    fixed = emission.simulated - emission.timeline.peak
    assert fixed == batch.nbytes + 4  # and the loss


# With a compiler


SCANNED = [
    "accumulation",
    "many steps",
    "batch statistics",
    "two optimisers",
    "vmapped loss",
    "host state",
    "streamed weights",
]
COMPILED = ("accumulation", "host state")
"""By default for a TPU; on CPUs all are compiled, in `test_jit_within_a_budget`."""


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("habit", "remat"),
    [
        *(
            pytest.param(
                *(habit, jdelta.remat),
                id=f"{habit}-marked",
                marks=() if habit in COMPILED else pytest.mark.full,
            )
            for habit in SCANNED
        ),
        pytest.param("accumulation", identity, id="accumulation-found"),
        *(
            pytest.param(habit, identity, id=f"{habit}-found", marks=pytest.mark.full)
            for habit in SCANNED[1:]
        ),
    ],
)
def test_plans_fit(habit, remat):
    rows = 32768 if habit in ("accumulation", "vmapped loss") else 8192
    step, (state, batch) = TRAINERS[habit](rows, 512, remat)
    plan = jdelta.plan(step, 0.6, state, batch, target=TPU, donate_argnums=0)
    assert plan.compiled_peak <= plan.budget < plan.ceiling
    assert Decision.RECOMPUTE in plan.decisions.values()
    # The compiler writes weights that it streams beside the old ones, in the plain step too.
    copies = {"host state": 1, "streamed weights": 2}.get(habit, 0)
    assert plan.host_bytes == pytest.approx(copies * bytes_of(state), rel=1e-3)


@pytest.mark.compiler
def test_offload_beside_state_on_the_host():
    step, (state, batch) = TRAINERS["host state"](8192, 512, jdelta.remat)
    pin = {"*/dot_general": "offload"}
    plan = jdelta.plan(step, 1.0, state, batch, target=TPU, donate_argnums=0, pin=pin)
    away = sum(r.bytes for r in plan.residuals if plan.decisions[r.name] is Decision.OFFLOAD)
    assert away == LAYERS * 8192 * 512 * 4
    assert plan.host_bytes == pytest.approx(away + bytes_of(state), rel=1e-3)


@pytest.mark.compiler
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("make", "layers"),
    [
        pytest.param(TRAINERS["accumulation"], LAYERS, id="scan"),
        pytest.param(functools.partial(unrolled_steps, layers=4), 4, id="loop"),
    ],
)
def test_offload_in_a_loop_around_the_gradient(make, layers, target):
    rows = 4096 * (MICRO if make is TRAINERS["accumulation"] else 1)
    step, args = make(rows, 512, jdelta.remat)
    pin = {"*": "recompute", "*/dot_general": "offload"}
    plan = jdelta.plan(step, 1.0, *args, target=target, donate_argnums=0, pin=pin)
    away = [r for r in plan.residuals if plan.decisions[r.name] is Decision.OFFLOAD]
    assert all(r.name.endswith("/dot_general") for r in away)
    assert sum(r.bytes for r in away) == layers * 4096 * 512 * 4  # of one iteration
    assert plan.host_bytes == sum(r.bytes for r in away)
    assert plan.compiled_peak < plan.ceiling
