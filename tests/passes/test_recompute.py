"""A policy written into the recorded step: the program that JAX makes under it, and its numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jdelta
from jdelta import Decision
from jdelta._src import _jax
from jdelta._src._jax import transfers
from jdelta._src.backends.target import resolve
from jdelta._src.passes.emit import Step, emit
from jdelta._src.passes.recompute import with_recompute
from jdelta._src.regions.policy import Policy
from jdelta._src.regions.trace import trace

TARGET = resolve("tpu:v5e:2x2")
WS = 0.3 * jax.random.normal(jax.random.key(0), (4, 8, 8))
X = jax.random.normal(jax.random.key(1), (6, 8))


@jdelta.remat
def layer(w, x):
    h = jnp.sin(jnp.tanh(x @ w))
    return x + jnp.sin(h @ w)


@jdelta.remat
def other(w, x):
    return jnp.cos(x @ w) * x


def mean(y):
    return jnp.mean(y**2)


def unrolled(ws, x):
    for w in ws:
        x = layer(w, x)
    return mean(x)


def scanned(ws, x, *, reverse=False):
    return mean(lax.scan(lambda x, w: (layer(w, x), None), x, ws, reverse=reverse)[0])


def two_in_an_iteration(ws, x):
    def body(x, w):
        y = layer(w, x)
        return other(w, y) + jnp.tanh(y), jnp.sum(y)

    y, sums = lax.scan(body, x, ws)
    return mean(y) + jnp.sum(sums)


def one_weight_for_all(ws, x):
    """What is made of the weight is the same in each iteration, so JAX makes it before them."""

    @jdelta.remat
    def shared(w, x):
        return jnp.sin(x @ jnp.tanh(w))

    return mean(lax.scan(lambda x, _: (shared(ws[0], x), None), x, None, length=3)[0])


def micro_batches(ws, x):
    def body(total, part):
        return jax.tree.map(jnp.add, total, jax.grad(unrolled)(ws, part)), None

    return lax.scan(body, jnp.zeros_like(ws), jnp.stack([x, 0.5 * x]))[0]


def several_steps(ws, x):
    return lax.fori_loop(0, 3, lambda _, ws: ws - 0.1 * jax.grad(scanned)(ws, x), ws)


def pulled_back_twice(fun, ws, x):
    _, back = jax.vjp(fun, ws, x)
    return back(1.0), back(2.0)


def two_losses(ws, x):
    """One of them of what is in the middle: its cotangent comes from elsewhere."""
    y = layer(ws[1], layer(ws[0], x))
    z = layer(ws[3], layer(ws[2], y) + y)
    return mean(z) + jnp.sum(jnp.tanh(y))


def parts_and_their_sums(ws, x):
    """What a sum of cotangents is read by makes several values."""

    @jdelta.remat
    def halves(w, x):
        a, b = jnp.split(x @ w, 2, -1)
        both = jnp.concatenate([a * jnp.tanh(b), jnp.sin(a)], -1)
        return both, jnp.sin(both)

    y, z = halves(ws[0], x)
    y, z = halves(ws[1], y * z)
    return mean(y) + jnp.sum(jnp.tanh(z))


def branches(ws, x):
    return jax.grad(lambda ws: lax.cond(x.sum() > 0, unrolled, scanned, ws, x))(ws)


def in_nested_loops(ws, x):
    def body(x, pair):
        y = other(pair[0], x)
        return lax.scan(lambda y, w: (layer(w, y), None), y, pair)[0], None

    return mean(lax.scan(body, x, ws.reshape(2, 2, 8, 8))[0])


def twice_in_reverse(ws, x):
    return jax.grad(lambda ws: jnp.sum(jax.grad(unrolled)(ws, x) ** 2))(ws)


STEPS = {
    "unrolled": jax.grad(unrolled),
    "scanned": jax.value_and_grad(scanned, (0, 1)),
    "reversed": jax.grad(lambda ws, x: scanned(ws, x, reverse=True)),
    "per example": jax.vmap(jax.grad(unrolled), (None, 0)),
    "two in an iteration": jax.grad(two_in_an_iteration),
    "one weight for all": jax.grad(one_weight_for_all),
    "micro-batches": micro_batches,
    "several steps": several_steps,
    "pulled back twice": functools.partial(pulled_back_twice, unrolled),
    "loops pulled back twice": functools.partial(pulled_back_twice, scanned),
    "two losses": jax.grad(two_losses),
    "parts and their sums": jax.grad(parts_and_their_sums),
    "nested loops": jax.grad(in_nested_loops),
}


@functools.cache
def traced(name):
    """The trace of a step, which every policy starts from."""
    return trace(STEPS[name], WS, X)


@functools.cache
def results_of(name):
    """What the step itself gives."""
    return jax.tree.leaves(jax.jit(STEPS[name])(WS, X))


def policy_of(step_trace, target=TARGET, **decided):
    """All that is called so is kept, or put away; the rest is computed again."""
    names = {
        str(name): Decision(decision)
        for name in filter(None, map(_jax.named_value, _jax.equations(step_trace.recorded.program)))
        for called, decision in decided.items()
        if str(name).split("/")[-1].startswith(called)
    }
    return Policy.of(names, step_trace.loops, target.backend, partly=step_trace.partly)


def written(step, **decided):
    step_trace = trace(step, WS, X)
    return with_recompute(step_trace.recorded.program, policy_of(step_trace, **decided))


DECISIONS = {
    "nothing kept": {},
    "some kept": {"tanh": "save"},
    "products kept": {"dot_general": "save", "tanh": "save"},
    "some away": {"tanh": "offload"},
    "what enters away": {"input": "offload", "sin": "save"},
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("decided", DECISIONS)
def test_results_are_those_of_the_step(name, decided):
    step_trace = traced(name)
    program = with_recompute(
        step_trace.recorded.program, policy_of(step_trace, **DECISIONS[decided])
    )
    assert program is not None
    got = jax.jit(lambda *args: _jax.evaluate(program, *args))(WS, X)
    for a, b in zip(got, results_of(name), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("decided", DECISIONS)
def test_it_is_the_program_that_jax_makes(name, decided):
    """By what it computes once and again; it takes no more."""
    step_trace = traced(name)
    policy = policy_of(step_trace, **DECISIONS[decided])
    args = TARGET.abstract((WS, X))
    by_jax = Step(STEPS[name], args, (), TARGET, step_trace.aliases, step_trace.automatic)
    ours = emit(dataclasses.replace(by_jax, recorded=step_trace.recorded), policy)
    theirs = emit(by_jax, policy)
    assert ours.simulated <= theirs.simulated
    assert ours.computed == theirs.computed


def test_what_is_put_away_is_copied_once_and_fetched_in_each_backward_part():
    program = written(STEPS["loops pulled back twice"], tanh="offload")
    eqns = list(_jax.equations(program))
    assert sum(map(transfers.crosses_to_host, eqns)) == 1
    assert sum(map(transfers.crosses_to_device, eqns)) == 2


def test_nothing_is_made_in_the_forward_pass_that_nothing_reads():
    """The derivative of tanh is made of tanh, which is kept."""
    program = written(STEPS["scanned"], tanh="save")
    forward, _ = (e for e in _jax.open_jaxpr(program).eqns if e.primitive.name == "scan")
    primitives = {e.primitive.name for e in _jax.open_jaxpr(forward.params["jaxpr"]).eqns}
    assert "tanh" in primitives
    assert not {"one_minus_square", "cos"} & primitives


@pytest.mark.parametrize("step", [branches, twice_in_reverse])
def test_other_steps_jax_has_to_differentiate(step):
    assert written(step) is None


def test_a_value_kept_in_a_loop_of_a_region_is_left_to_jax():
    @jdelta.remat
    def looped(w, x):
        return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)[0]

    step = jax.grad(lambda ws, x: mean(looped(ws[0], x)))
    assert written(step) is not None
    assert written(step, tanh="save") is None
