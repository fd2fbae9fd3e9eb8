"""Mutable refs, callbacks, and values that leave the loss by a closure."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import io_callback

from tests.programs.parts import (
    array,
    block,
    layer,
    mean_square,
    rows,
    scanned,
    stack_step,
    trained,
    unrolled,
    weights,
)
from tests.programs.table import program

REFS = (0, 11)
"""The version of jax that has `jax.new_ref`."""


@program(units=True, large=None)
def debug_callback(size, remat):
    def unit(w, x):
        jax.debug.callback(lambda v: None, x.sum())
        return block(w, x)

    return stack_step(remat(unit), size)


@program(units=True, large=None)
def debug_callback_in_a_scan(size, remat):
    def unit(w, x):
        jax.debug.callback(lambda v: None, x.sum())
        return block(w, x)

    return stack_step(remat(unit), size, scanned)


@program(large=None)
def debug_print_in_the_loss(size, remat):
    def loss(ws, x):
        value = mean_square(unrolled(block, ws, x))
        lax.cond(value > 1e9, lambda: jax.debug.print("loss {}", value), lambda: None)
        return value

    return trained(loss), (weights(size), rows(size))


@program(large=None)
def pure_callback(size, remat):
    """A function of numpy inside the unit, which has no derivative."""

    def unit(w, x):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        mean = jax.pure_callback(lambda x: x.mean(), shape, lax.stop_gradient(x))
        return block(w, x - 0.1 * mean)

    return stack_step(unit, size)


@program(large=None)
def io_callback_in_the_loss(size, remat):
    def unit(w, x):
        io_callback(lambda v: None, None, lax.stop_gradient(x.sum()))
        return block(w, x)

    return stack_step(unit, size)


@program(large=None)
def ordered_callback_after_the_gradient(size, remat):
    step = trained(lambda ws, x: mean_square(unrolled(block, ws, x)))

    def reporting(ws, x):
        ws, value = step(ws, x)
        io_callback(lambda v: None, None, value, ordered=True)
        return ws, value

    return reporting, (weights(size), rows(size))


@program(large=None)
def value_appended_to_a_list(size, remat):
    """What the loss finds leaves it by a list, without a derivative."""

    def step(ws, x, labels):
        seen = []

        def loss(ws):
            y = unrolled(block, ws, x)
            seen.append(labels * 2)
            return mean_square(y - labels)

        return jax.grad(loss)(ws), seen[0]

    return step, (weights(size), rows(size), rows(size, seed=4))


@program(units=True)
def constant_by_closure(size, remat):
    """An array that is no argument of the step."""
    bias = array(size.width, seed=8)
    return stack_step(remat(lambda w, x: block(w, x + bias)), size)


@program(units=True)
def traced_by_closure(size, remat):
    """Units close over weights and over an argument of the step."""

    def loss(ws, x, shift):
        for i in range(size.layers):
            w = layer(ws, i)
            x = remat(lambda x, w=w: block(w, x) + shift)(x)
        return mean_square(x)

    return trained(loss), (weights(size), rows(size), array(size.width))


@program(large=None, since=REFS)
def ref_made_inside(size, remat):
    """A counter in the step that units add to."""

    def step(ws, x):
        count = jax.new_ref(jnp.float32(0.0))

        def loss(ws):
            y = x
            for i in range(size.layers):
                y = block(layer(ws, i), y)
                count[...] += lax.stop_gradient(y.mean())
            return mean_square(y)

        grads = jax.grad(loss)(ws)
        return grads, count[...]

    return step, (weights(size), rows(size))


@program(large=None, since=REFS)
def ref_as_an_argument(size, remat):
    """The weights are mutable arrays; the step writes to them and gives the loss."""

    def step(refs, x):
        ws = jax.tree.map(lambda ref: ref[...], refs)
        value, grads = jax.value_and_grad(lambda ws: mean_square(unrolled(block, ws, x)))(ws)
        for name, ref in refs.items():
            ref[...] -= 0.1 * grads[name]
        return value

    return step, (jax.tree.map(jax.new_ref, weights(size)), rows(size))


@program(large=None, since=REFS)
def ref_in_a_loop(size, remat):
    """A buffer that a loop fills, read after it."""

    def step(ws, x):
        log = jax.new_ref(jnp.zeros(size.layers))

        def loss(ws):
            def body(carry, w):
                i, y = carry
                y = block(w, y)
                log[i] = lax.stop_gradient(y.mean())
                return (i + 1, y), None

            return mean_square(lax.scan(body, (0, x), ws)[0][1])

        return jax.grad(loss)(ws), log[...]

    return step, (weights(size), rows(size))


@program(large=None, since=REFS)
def ref_in_a_unit(size, remat):
    """Made, written and read by one block: nothing outside sees it."""

    def unit(w, x):
        h = jax.new_ref(jnp.zeros((len(x), w["up"].shape[-1])))
        h[...] = x @ w["up"]
        return x + jnp.tanh(jax.nn.gelu(h[...]) @ w["down"])

    return stack_step(unit, size)


@program(large=None, since=REFS)
def gradient_stashed_in_a_ref(size, remat):
    """A rule whose backward pass writes what it sees to a ref."""

    @jax.custom_vjp
    def seen(ref, y):
        return y

    def backward(ref, g):
        ref[...] = g
        return None, g

    seen.defvjp(lambda ref, y: (y, ref), backward)

    def step(ws, x):
        ref = jax.new_ref(jnp.zeros_like(x))
        loss = lambda ws: mean_square(seen(ref, unrolled(block, ws, x)))  # noqa: E731
        return jax.grad(loss)(ws), ref[...]

    return step, (weights(size), rows(size))


@program(large=None)
def without_a_gradient(size, remat):
    """Evaluation."""
    return lambda ws, x: mean_square(scanned(block, ws, x)), (weights(size), rows(size))


@program(large=None)
def gradient_that_needs_nothing(size, remat):
    return jax.grad(lambda ws, x: jnp.sum(x @ ws["up"][0])), (weights(size), rows(size))
