"""Loops over time, differentiated from few of their states."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jdelta
from jdelta import BudgetError, PlanMismatchError
from jdelta._src.backends.target import resolve
from jdelta._src.estimate.seconds import program_seconds
from jdelta._src.program.loop_nest import walk
from jdelta._src.regions.binomial import runs_again
from jdelta._src.regions.find import tracing
from jdelta._src.regions.long_loops import LONG, is_from_few_states
from jdelta._src.regions.region import Grouping, Session
from jdelta._src.regions.trace import trace
from jdelta._src.search.reruns import rerun_seconds
from tests.compilers import TARGETS

STEPS, WIDTH, ROWS = 100, 8, 4
ALL = STEPS
"""States: none is run again."""


def from_few(step, states, *, automatic=True):
    """The step with long loops that keep so many states."""

    def run(*args):
        session = Session(automatic=automatic, grouping=Grouping(1, states=states))
        with tracing(session, *args):
            return step(*args)

    return run


def is_run_so(step, args, states=3):
    """Whether any loop of the step is differentiated from few states."""
    step_trace = trace(step, *args, grouping=Grouping(1, states=states))
    loops = (op.equation for op, _ in walk(step_trace.graph) if op.primitive == "scan")
    return any(map(is_from_few_states, loops))


def stepped(loss):
    """Loss and gradients with respect to weights, the first state and forces."""

    def step(*args):
        return jax.value_and_grad(loss, (0, 1, 2))(*args)

    return step


def cell(w, state, force):
    return jnp.tanh(state @ w) + 0.1 * force


def recurrent(w, x, forces, *, reverse=False):
    """A recurrent network that counts, draws random numbers and stacks what it measures."""

    def body(carry, force):
        state, count, key = carry
        key, own = jax.random.split(key)
        state = cell(w, state, force) + 0.01 * jax.random.normal(own, state.shape)
        return (state, count + 1, key), (jnp.mean(state), count)

    (state, *_), (means, counts) = lax.scan(
        body, (x, 0, jax.random.key(1)), forces, reverse=reverse
    )
    return jnp.sum(state**2) + jnp.sum(means * counts)


def with_fori(w, x, forces):
    def body(i, state):
        return cell(w, state, lax.dynamic_index_in_dim(forces, i, keepdims=False))

    return jnp.sum(lax.fori_loop(0, STEPS, body, x) ** 2)


def with_layers_inside(w, x, forces):
    """A loop over layers in the loop over time."""

    def body(state, force):
        state, _ = lax.scan(lambda s, _: (cell(w, s, force), None), state, None, length=3)
        return state, None

    return jnp.sum(lax.scan(body, x, forces)[0] ** 2)


def with_marks_inside(w, x, forces):
    marked = jdelta.remat(cell)
    state, _ = lax.scan(lambda s, force: (marked(w, s, force), None), x, forces)
    return jnp.sum(state**2)


def wave(speed, x, forces):
    """A wave equation by finite differences: two states, the second weakly typed at first."""

    def body(carry, force):
        now, before = carry
        bent = jnp.roll(now, 1) + jnp.roll(now, -1) - 2 * now
        return (2 * now - before + 0.1 * jnp.sum(speed**2) * bent + 0.01 * jnp.sum(force), now), ()

    (now, before), _ = lax.scan(body, (x, x * 0), forces)
    return jnp.sum(now**2) + jnp.sum(before**2)


def with_complex_states(w, x, forces):
    def body(state, force):
        return state * jnp.exp(1j * jnp.sum(w)) + force, jnp.abs(state[0, 0]) ** 2

    state, power = lax.scan(body, x.astype(jnp.complex64), forces)
    return jnp.sum(jnp.abs(state) ** 2) + jnp.sum(power)


LOSSES = {
    "recurrent": recurrent,
    "reversed": functools.partial(recurrent, reverse=True),
    "fori_loop": with_fori,
    "layers inside": with_layers_inside,
    "marks inside": with_marks_inside,
    "wave": wave,
    "complex": with_complex_states,
}


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (WIDTH, WIDTH), (ROWS, WIDTH), (STEPS, WIDTH)
    return tuple(0.3 * jax.random.normal(key, s) for key, s in zip(keys, shapes, strict=True))


def assert_equal(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6 * float(np.abs(b).max()))


@pytest.mark.parametrize("kind", LOSSES)
def test_gradients_equal_the_plain_step(kind):
    step, args = stepped(LOSSES[kind]), arguments()
    expected = jax.jit(step)(*args)
    for states in (1, 7, ALL):
        assert_equal(jax.jit(from_few(step, states))(*args), expected)
    assert is_run_so(step, args)


def test_marked_steps_are_run_so_too():
    step, args = stepped(with_marks_inside), arguments()
    got = jax.jit(from_few(step, 5, automatic=False))(*args)
    assert_equal(got, jax.jit(step)(*args))


def test_under_vmap_and_twice_differentiated():
    """Each example has its own loop; the penalty differentiates the gradient once more."""

    def step(w, xs, forces):
        def one(w, x):
            return recurrent(w, x, forces)

        return jax.vmap(jax.grad(one), (None, 0))(w, xs)

    w, x, forces = arguments()
    args = w, jnp.stack([x, 2 * x]), forces
    assert_equal(jax.jit(from_few(step, 5))(*args), jax.jit(step)(*args))


def test_each_step_is_run_as_often_as_the_formula_says():
    runs = Counter()

    def loss(w, x, forces):
        def body(state, at):
            force, number = at
            jax.debug.callback(lambda i: runs.update([int(i)]), number)
            return cell(w, state, force), None

        return jnp.sum(lax.scan(body, x, (forces, jnp.arange(STEPS)))[0] ** 2)

    args, states = arguments(), 6
    jax.block_until_ready(jax.jit(from_few(stepped(loss), states))(*args))
    jax.effects_barrier()
    assert set(runs) == set(range(STEPS))
    assert sum(runs.values()) == 2 * STEPS + runs_again(STEPS, states)


def with_gradients_inside(w, x, forces):
    """Micro-batches: each iteration has its own backward pass, and keeps nothing."""

    def body(total, force):
        return total + jax.grad(lambda w: jnp.sum(cell(w, x, force) ** 2))(w), None

    return jax.jit(lambda: lax.scan(body, w * 0, forces)[0])()


def with_callbacks(w, x, forces):
    def loss(w):
        def body(state, force):
            jax.experimental.io_callback(lambda: None, None)
            return cell(w, state, force), None

        return jnp.sum(lax.scan(body, x, forces)[0] ** 2)

    return jax.grad(loss)(w)


def with_short_loops(w, x, forces):
    loss = stepped(recurrent)
    return loss(w, x, forces[: LONG - 1])


@pytest.mark.parametrize("step", [with_gradients_inside, with_callbacks, with_short_loops])
def test_loops_that_are_left_as_they_are(step):
    assert not is_run_so(step, arguments())


# Plans

BIG = 2_000


def time_step(w, x, forces):
    """One state of 16 KiB is carried; an iteration makes three of them."""

    def loss(w, x):
        def body(state, force):
            return state + 0.01 * jnp.sin(w * state + force), jnp.mean(state)

        state, means = lax.scan(body, x, forces)
        return jnp.sum(state**2) + jnp.sum(means)

    value, (dw, dx) = jax.value_and_grad(loss, (0, 1))(w, x)
    return w - 0.1 * dw, x - 0.1 * dx, value


def time_arguments(width=4096):
    return jnp.full((width,), 0.3), jnp.linspace(0, 1, width), jnp.linspace(0, 1, BIG)


@pytest.fixture(scope="module")
def tight():
    return jdelta.plan(time_step, "1MiB", *time_arguments())


def test_a_plan_keeps_as_many_states_as_fit(tight, tmp_path):
    assert tight.compiled_peak <= tight.budget
    assert tight.grouping == Grouping(1, states=tight.grouping.states)
    assert 20 <= tight.grouping.states <= 64
    assert tight.compiled_peak >= 0.85 * tight.budget
    assert_equal(tight.jit()(*time_arguments()), jax.jit(time_step)(*time_arguments()))
    tight.save(str(tmp_path / "plan.json"))
    loaded = jdelta.load(str(tmp_path / "plan.json"))
    assert loaded == tight
    assert_equal(loaded.jit(time_step)(*time_arguments()), tight.jit()(*time_arguments()))


def test_what_is_said_of_it(tight):
    """The floor is that of the fewest states, not the plan's own peak."""
    text = str(tight)
    assert f"{tight.grouping.states} states are kept at a time" in " ".join(text.split())
    assert tight.floor < 0.5 * tight.compiled_peak
    assert "predicted" in next(line for line in text.splitlines() if "floor" in line)
    assert tight.overhead > 0
    with pytest.raises(PlanMismatchError, match=r"keeps \d+ states of long loops at a time"):
        jax.jit(jax.grad(jax.checkpoint(lambda x: jnp.sum(jnp.sin(x)), policy=tight)))(jnp.ones(8))


def test_less_memory_takes_longer(tight):
    least = jdelta.plan(time_step, "0.5MiB", *time_arguments())
    assert least.compiled_peak <= least.budget
    assert least.grouping.states < tight.grouping.states
    assert least.overhead > tight.overhead
    assert tight.floor <= 1.1 * least.compiled_peak


def test_what_fits_without_running_again_is_planned_as_before():
    """What enters each iteration is 31 MiB, everything 62."""
    plan = jdelta.plan(time_step, "40MiB", *time_arguments())
    assert plan.grouping.states == 0
    assert plan.floor < 1 << 20


def test_a_budget_below_the_fewest_states_is_refused():
    with pytest.raises(BudgetError) as error:
        jdelta.plan(time_step, "100KiB", *time_arguments())
    assert error.value.floor < 1 << 20
    with pytest.raises(BudgetError) as alike:  # without further checkpoints
        jdelta.plan(time_step, "1MiB", *time_arguments(), per_layer=False)
    assert alike.value.floor > 30 << 20


@pytest.mark.compiler
@pytest.mark.parametrize("target", TARGETS)
def test_compilers_for_accelerators_keep_the_budget(target):
    """10,000 states of 1 MiB within 64 MiB."""
    shape = jax.ShapeDtypeStruct((1 << 18,), "f4")
    args = shape, shape, jax.ShapeDtypeStruct((10_000,), "f4")
    plan = jdelta.plan(time_step, "64MiB", *args, target=target, host_budget=0)
    assert plan.compiled_peak <= plan.budget
    assert plan.grouping.states > 20


def test_seconds_of_what_is_run_again():
    target = resolve("cpu")
    args, states = time_arguments(), 10
    graph = trace(time_step, *args, grouping=Grouping(1, states=states)).graph
    rates, backend = target.rates, target.backend
    plain = trace(time_step, *args).graph
    forward = next(op.body for op, _ in walk(plain) if op.primitive == "scan" and not op.backward)
    reruns = runs_again(BIG, states) + BIG
    seconds = rerun_seconds(graph, states, rates, backend)
    assert seconds == pytest.approx(reruns * program_seconds(forward, rates, backend), rel=0.5)
    assert rerun_seconds(plain, states, rates, backend) == 0.0


def test_loops_in_few_buffers_are_simulated_so(tight):
    assert tight.predicted_peak == pytest.approx(tight.compiled_peak, rel=0.15)


def test_a_forward_derivative_of_the_gradient_is_planned_without():
    """Few states are for reverse derivatives only: an error of jdelta's, none of JAX's."""

    def step(w, x, forces):
        def loss(w):
            state, _ = lax.scan(lambda s, f: (s + 0.01 * jnp.sin(w * s + f), None), x, forces)
            return jnp.sum(state**2)

        return jax.jvp(jax.grad(loss), (w,), (jnp.ones_like(w),))[1]

    w, x, forces = time_arguments(256)
    args = w, x, forces[:LONG]
    plan = jdelta.plan(step, 0.9, *args)
    assert_equal(plan.jit()(*args), jax.jit(step)(*args))
    with pytest.raises(BudgetError):
        jdelta.plan(step, "4KiB", *args)
