"""What enters regions and is dropped: numbers, what is computed how often, what is held."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jdelta
from jdelta._src import _jax
from jdelta._src.backends.target import resolve
from jdelta._src.passes.recompute import with_recompute
from jdelta._src.regions.trace import trace
from jdelta._src.residuals.region_inputs import with_region_inputs
from tests.crossed import crossed
from tests.passes.test_recompute import STEPS, WS, X, layer, mean, other, policy_of

TARGET = resolve("cpu")


def with_glue(ws, x):
    """What lies between regions is in none."""
    y = jnp.tanh(x)
    for w in ws:
        y = y + jnp.sin(layer(w, y))
    return mean(y)


def with_a_skip(ws, x):
    first = layer(ws[0], jnp.tanh(x))
    y = other(ws[2], layer(ws[1], first)) + first
    return mean(layer(ws[3], y) * first)


def with_noise(ws, x):
    @jdelta.remat
    def noisy(w, x, key):
        return x + jnp.tanh(x @ w) * jax.random.bernoulli(key, 0.5, x.shape)

    for key, w in zip(jax.random.split(jax.random.key(3), len(ws)), ws, strict=True):
        x = noisy(w, x, key)
    return mean(x)


def unmarked_layers(ws, x):
    for w in ws:
        x = x + jnp.sin(jnp.tanh(x @ w) @ w)
    return mean(x)


MORE = {
    "glue": jax.grad(with_glue),
    "skip": jax.grad(with_a_skip),
    "noise": jax.grad(with_noise),
    "unmarked": jax.value_and_grad(unmarked_layers, (0, 1)),
}


def dropping(step_trace, levels, kept=()):
    """The program that keeps what enters regions, but for levels, and values that are so called."""
    decided = dict.fromkeys(("input", *kept), "save")
    policy = policy_of(step_trace, TARGET, **decided).dropping(levels)
    return with_recompute(step_trace.recorded.program, policy)


def droppable(step_trace):
    """Names of what enters regions and can be computed again, in order."""
    entering = [r for r in with_region_inputs(step_trace, TARGET) if r.region_input]
    names = [r.entering or r.name for r in entering]
    return [n for n in names if dropping(step_trace, {n: 1})]


def results(step_trace, levels):
    program = dropping(step_trace, levels)
    assert program is not None
    return jax.jit(lambda *args: _jax.evaluate(program, *args))(WS, X)


ORDERS = {"held": lambda i, n: 1, "nested": lambda i, n: n - i, "in halves": lambda i, n: i % 2 + 1}


@functools.cache
def traced(name):
    """The trace of a step, and what of it can be dropped."""
    step_trace = trace({**STEPS, **MORE}[name], WS, X)
    return step_trace, droppable(step_trace)


@crossed(name=[*STEPS, *MORE], every=[1, 2])
def test_results_are_those_of_the_step(name, every):
    """Where several orders say the same, as of a single name, it runs once."""
    step_trace, names = traced(name)
    some = names[::every]
    expected = jax.tree.leaves(jax.jit({**STEPS, **MORE}[name])(WS, X))
    all_levels = {tuple(order(i, len(some)) for i in range(len(some))) for order in ORDERS.values()}
    for levels in all_levels:
        got = results(step_trace, dict(zip(some, levels, strict=True)))
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_most_steps_have_something_to_drop():
    with_some = {name for name in (*STEPS, *MORE) if traced(name)[1]}
    assert with_some >= {"unrolled", "two in an iteration", "micro-batches", "two losses", *MORE}
    assert "scanned" not in with_some  # what enters an iteration another one has made


def products(levels, kept=()):
    """How often the four layers, of two products each, are computed in a step."""
    step_trace = trace(STEPS["unrolled"], WS, X)
    program = dropping(step_trace, levels, kept)
    named = [e for e in _jax.equations(program) if _jax.named_value(e)]
    return sum(str(_jax.named_value(e)).split("/")[-1].startswith("dot_general") for e in named)


def test_what_is_held_is_made_once_more_and_what_is_not_again_for_each_region():
    names = [f"layer_{i}/input_1" for i in (1, 2, 3)]
    one = products({})
    assert one == 2 * 4 * 2  # once, and again in each region's own turn
    assert products(dict.fromkeys(names[:1], 1)) == one + 2
    assert products(dict.fromkeys(names, 1)) == one + 2 * 3
    assert products(dict(zip(names, (3, 2, 1), strict=True))) == one + 2 * (1 + 2 + 3)
    assert products(dict(zip(names, (2, 1, 2), strict=True))) == one + 2 * (3 + 1)


def test_what_an_earlier_region_keeps_is_not_made_again():
    levels = {"layer_1/input_1": 1}
    kept = ["dot_general_1"]
    assert products(levels, kept) == products({}, kept)


def test_what_has_to_happen_once_is_not_made_again():
    def loss(ws, x):
        y = layer(ws[0], jnp.tanh(x))
        told = jax.experimental.io_callback(lambda y: y, y, lax.stop_gradient(y))
        return mean(layer(ws[1], y * told))

    assert droppable(trace(jax.grad(loss), WS, X)) == ["layer_0/input_1"]
