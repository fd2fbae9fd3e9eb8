"""Steps that do something beside computing: what must happen once does, in its place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import jdelta
from jdelta import TraceError
from tests.random_arrays import normal

W = jnp.asarray(0.3 * normal(0, 4, 16, 16))
X = jnp.asarray(normal(1, 32, 16))
EVERYTHING = {"*": "recompute"}

seen = []
"""What callbacks were given."""


def note(value):
    seen.append(round(float(np.sum(value)), 3))


def layer(x, w):
    return x + jnp.tanh(jnp.sin(x @ w) @ w)


def still(y):
    return jax.lax.stop_gradient(jnp.sum(y))


def loss_of(unit):
    def loss(ws):
        return jnp.mean(layer(unit(unit(layer(X, ws[0]), ws[1]), ws[2]), ws[3]) ** 2)

    return loss


def noted(step, *args):
    """What a step gives and what its callbacks see, the second time that it runs."""
    jax.block_until_ready(step(*args))
    jax.effects_barrier()
    seen.clear()
    results = jax.block_until_ready(step(*args))
    jax.effects_barrier()
    return results, list(seen)


def recomputed(step, *args):
    plan = jdelta.plan(step, None, *args, pin=EVERYTHING)
    assert plan.policy is not None
    return plan.jit()


def assert_same(got, expected):
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# Callbacks


def calling(y, w):
    y = layer(y, w)
    io_callback(note, None, still(y), ordered=True)
    return jnp.sin(y)


def answered(y, w):
    y = layer(y, w)
    factor = io_callback(lambda v: (note(v), np.float32(v))[1], W[0, 0, 0], still(y))
    return jnp.sin(y * factor)


def in_a_branch(y, w):
    return jax.lax.cond(y[0, 0] > -100, calling, lambda y, w: y, y, w)


@pytest.mark.parametrize("unit", [calling, jax.jit(calling), answered, in_a_branch])
def test_an_io_callback_is_called_once(unit):
    def step(ws):
        return jax.grad(loss_of(unit))(ws)

    expected, calls = noted(jax.jit(step), W)
    got, planned = noted(recomputed(step, W), W)
    assert_same(got, expected)
    assert planned == calls
    assert len(calls) == 2


def test_io_callbacks_in_loops_are_in_no_checkpoint():
    def step(ws):
        return jax.grad(lambda ws: jnp.mean(jax.lax.scan(body, X, ws)[0] ** 2))(ws)

    def body(y, w):
        return calling(y, w), None

    expected, calls = noted(jax.jit(step), W)
    got, planned = noted(recomputed(step, W), W)
    assert_same(got, expected)
    assert planned == calls
    with pytest.raises(jdelta.BudgetError):  # not by layers computed again together
        jdelta.plan(step, 0.3, W)


def test_debug_callbacks_are_as_often_as_under_checkpoint():
    """The order of a row is computed beside the unit, since it has no derivative."""

    def unit(y, w):
        y = layer(y, w)
        jax.debug.callback(note, jnp.sum(y))
        order = jnp.argsort(y, -1)
        return jnp.take_along_axis(y, order, -1), order

    def step_of(unit):
        def step(ws):
            def loss(ws):
                y, order = unit(X, ws[0])
                return jnp.mean(layer(layer(y, ws[1]), ws[2]) ** 2), order

            return jax.grad(loss, has_aux=True)(ws)

        return step

    expected, by_hand = noted(jax.jit(step_of(jax.checkpoint(unit))), W)
    got, planned = noted(recomputed(step_of(unit), W), W)
    assert_same(got, expected)
    assert 1 <= len(planned) <= len(by_hand)


def test_a_marked_unit_with_a_callback_is_refused_by_its_line():
    @jdelta.remat
    def block(y, w):
        return calling(y, w)

    def step(ws):
        return jax.grad(loss_of(block))(ws)

    with pytest.raises(TraceError, match=r"'block' has io_callback in it at .*test_effects.py:\d+"):
        jdelta.plan(step, None, W, pin=EVERYTHING)
    with pytest.raises(TraceError, match=r"below the .* that the step needs\. .*'block' has io"):
        jdelta.plan(step, 0.5, W)
    assert "fits" in str(jdelta.explain_oom(step, W))
    assert len(jdelta.frontier(step, W).plans) == 1
    expected, calls = noted(jax.jit(step), W)
    got, planned = noted(jdelta.plan(step, "1GiB", W).jit(), W)
    assert_same(got, expected)
    assert planned == calls


def test_a_callback_in_a_forward_rule_is_refused_by_its_line():
    @jax.custom_vjp
    def tap(y):
        return y

    def forward(y):
        io_callback(note, None, jnp.sum(y))
        return y, None

    tap.defvjp(forward, lambda _, g: (g,))

    def step(ws):
        return jax.grad(loss_of(lambda y, w: tap(layer(y, w))))(ws)

    with pytest.raises(TraceError, match=r"io_callback in it at .*test_effects.py:\d+ .*forward"):
        jdelta.plan(step, None, W, pin=EVERYTHING)


# Mutable refs


def made_inside(ws):
    ref = jax.new_ref(jnp.zeros(4))

    def loss(ws):
        y = X
        for i in range(4):
            y = layer(y, ws[i])
            ref[i] = still(y)
        return jnp.mean(y**2)

    return jax.grad(loss)(ws), ref[...]


def read_and_written_between(ws):
    ref = jax.new_ref(X)

    def loss(ws):
        y = layer(ref[...], ws[0])
        ref[...] = 2 * jax.lax.stop_gradient(y)
        z = layer(ref[...] + y, ws[1])
        ref[...] = X
        return jnp.mean(layer(z + ref[...], ws[2]) ** 2)

    return jax.grad(loss)(ws), ref[...]


def in_a_loop(ws):
    ref = jax.new_ref(jnp.zeros(()))

    def body(y, w):
        y = layer(y, w)
        ref[...] += still(y)
        return y, None

    return jax.grad(lambda ws: jnp.mean(jax.lax.scan(body, X, ws)[0] ** 2))(ws), ref[...]


def differentiated(ws):
    def loss(ws):
        ref = jax.new_ref(jnp.zeros_like(X))
        ref[...] = layer(X, ws[0])
        ref[...] = layer(ref[...], ws[1])
        return jnp.mean(layer(ref[...], ws[2]) ** 2)

    return jax.grad(loss)(ws)


def stash(ws):
    """A rule that writes the gradient of a value into a ref."""
    ref = jax.new_ref(jnp.zeros_like(X))

    @jax.custom_vjp
    def tap(y, ref):
        return y

    def backward(ref, g):
        ref[...] = g
        return g, None

    tap.defvjp(lambda y, ref: (y, ref), backward)
    gradient = jax.grad(lambda ws: jnp.mean(layer(tap(layer(X, ws[0]), ref), ws[1]) ** 2))(ws)
    return gradient, ref[...]


@pytest.mark.parametrize(
    "step", [made_inside, read_and_written_between, in_a_loop, differentiated, stash]
)
def test_refs_in_a_step(step):
    assert_same(recomputed(step, W)(W), jax.jit(step)(W))


def test_refs_as_arguments():
    def step(state, x):
        def loss(ws):
            y = layer(x, ws[0])
            state["mean"][...] = 0.9 * state["mean"][...] + 0.1 * jax.lax.stop_gradient(y.mean(0))
            return jnp.mean(layer(layer(y - state["mean"][...], ws[1]), ws[2]) ** 2)

        state["w"][...] -= 0.1 * jax.grad(loss)(state["w"][...])
        return state["mean"][...]

    def refs():
        return {"w": jax.new_ref(W), "mean": jax.new_ref(jnp.zeros(16))}

    expected, got = refs(), refs()
    results = jax.jit(step)(expected, X)
    assert_same(recomputed(step, refs(), X)(got, X), results)
    for name in expected:
        assert_same(got[name][...], expected[name][...])
    planned = jdelta.plan(step, None, refs(), X)
    assert any("ref float32[4,16,16]" in line for line in planned.arguments)
    with pytest.raises(jdelta.PlanMismatchError, match="ref float32"):
        planned.jit()({"w": W, "mean": jnp.zeros(16)}, X)


def test_a_marked_unit_with_a_ref_is_refused_by_its_line():
    @jdelta.remat
    def block(y, w, ref):
        y = layer(y, w)
        ref[...] = jax.lax.stop_gradient(y)
        return y

    def step(ws):
        ref = jax.new_ref(X)
        return jax.grad(loss_of(lambda y, w: block(y, w, ref)))(ws), ref[...]

    with pytest.raises(TraceError, match=r"'block' has swap in it at .*test_effects.py:\d+"):
        jdelta.plan(step, None, W, pin=EVERYTHING)
    assert_same(jdelta.plan(step, None, W).jit()(W), jax.jit(step)(W))


# What else is none of the step's own fault


def deep(w, x):
    return jnp.mean(jnp.sin(jnp.tanh(jnp.sin(x @ w) @ w)) ** 2)


def test_a_planned_step_with_jit_off():
    step = jax.grad(deep)
    plan = jdelta.plan(step, None, W[0], X, pin=EVERYTHING)
    with jax.disable_jit():
        assert_same(plan.jit()(W[0], X), step(W[0], X))


def test_a_word_that_is_no_decision():
    with pytest.raises(jdelta.ArgumentError, match="'banana' is no decision"):
        jdelta.plan(jax.grad(deep), None, W[0], X, pin={"*": "banana"})


def test_errors_of_the_step_pass_as_they_are():
    def step(w, x):
        if w.ndim == 2:
            raise KeyError("mine")
        return jax.grad(deep)(w, x)

    with pytest.raises(KeyError, match="mine"):
        jdelta.plan(step, None, W[0], X)
    with pytest.raises(TypeError, match="dot_general requires"):
        jdelta.plan(jax.grad(deep), None, W[0], X.T)


PARTS = ["regions.find.cut_into_regions", "passes.emit.timeline", "residuals.residual.storage"]


@pytest.mark.parametrize("part", PARTS)
def test_errors_that_are_not_the_steps_get_a_name(monkeypatch, part):
    def fails(*_, **__):
        raise RuntimeError("not told")

    monkeypatch.setattr(f"jdelta._src.{part}", fails)
    with pytest.raises(TraceError, match="RuntimeError: not told"):
        jdelta.plan(jax.grad(deep), None, W[0], X, pin=EVERYTHING)
