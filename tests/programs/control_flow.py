"""Loops and branches: scans in all their forms, while loops, cond, switch, maps."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

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
from tests.programs.table import DEEP, FEW, Size, program


@program(units=True, small=DEEP)
def scan_unrolled_by_two(size, remat):
    """Two is no divisor of three layers."""
    return stack_step(remat(block), size, functools.partial(scanned, unroll=2))


@program(units=True, small=DEEP)
def scan_unrolled_whole(size, remat):
    return stack_step(remat(block), size, functools.partial(scanned, unroll=True))


@program(units=True)
def scan_unrolled_by_its_length(size, remat):
    return stack_step(remat(block), size, functools.partial(scanned, unroll=size.layers))


@program(units=True)
def scan_reversed(size, remat):
    return stack_step(remat(block), size, functools.partial(scanned, reverse=True))


@program(units=True)
def scan_of_one(size, remat):
    """A loop of a single iteration."""
    return stack_step(remat(block), Size(size.rows, size.width, 1), scanned)


@program(units=True)
def scan_of_scans(size, remat):
    unit = remat(block)

    def loss(ws, x):
        inner = functools.partial(scanned, unit)
        return mean_square(lax.scan(lambda x, w: (inner(w, x), None), x, ws)[0])

    ws = weights(Size(size.rows, size.width, 4))
    return trained(loss), (jax.tree.map(lambda w: w.reshape(2, 2, *w.shape[1:]), ws), rows(size))


@program(units=True)
def two_scans(size, remat):
    """One after the other, of unlike lengths."""
    unit = remat(block)

    def loss(ws, x):
        return mean_square(scanned(unit, ws[1], jnp.sin(scanned(unit, ws[0], x))))

    return trained(loss), ((weights(size), weights(Size(size.rows, size.width, 2))), rows(size))


@program(units=True)
def scan_with_results(size, remat):
    """What each layer gives is part of the loss."""
    unit = remat(block)

    def loss(ws, x):
        def body(x, w):
            y = unit(w, x)
            return y, y.mean(-1)

        y, means = lax.scan(body, x, ws)
        return mean_square(y) + jnp.mean(jnp.sin(means))

    return trained(loss), (weights(size), rows(size))


@program(units=True)
def scan_with_counter(size, remat):
    """An integer in the carry, weights picked by it from all of them."""
    unit = remat(block)

    def loss(ws, x):
        def body(carry, _):
            i, x = carry
            w = jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, i, keepdims=False), ws)
            return (i + 1, unit(w, x)), None

        return mean_square(lax.scan(body, (0, x), None, length=size.layers)[0][1])

    return trained(loss), (weights(size), rows(size))


@program(units=True)
def recurrent(size, remat):
    """A gated unit over time: the loop is over rows of the input."""

    def cell(w, h, x):
        z = jax.nn.sigmoid(x @ w["xz"] + h @ w["hz"])
        return (1 - z) * h + z * jnp.tanh(x @ w["xh"] + h @ w["hh"])

    unit = remat(cell)

    def loss(w, xs):
        h0 = jnp.zeros_like(xs[0])
        return mean_square(lax.scan(lambda h, x: (unit(w, h, x),) * 2, h0, xs)[1])

    names = ("xz", "hz", "xh", "hh")
    w = {n: array(size.width, size.width, scale=0.3, seed=i) for i, n in enumerate(names)}
    return trained(loss), (w, array(8, size.rows, size.width))


@program(units=True)
def lstm_in_chunks(size, remat):
    """A loop over chunks of time, each a unit with a loop in it."""

    def cell(w, carry, x):
        h, c = carry
        i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ w, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c)

    @remat
    def chunk(w, carry, xs):
        return lax.scan(lambda carry, x: (cell(w, carry, x), None), carry, xs)[0]

    def loss(w, xs):
        zeros = jnp.zeros_like(xs[0, 0])
        carry, _ = lax.scan(lambda c, xs: (chunk(w, c, xs), None), (zeros, zeros), xs)
        return mean_square(carry[0])

    w = array(2 * size.width, 4 * size.width, scale=0.3)
    return trained(loss), (w, array(3, 4, size.rows, size.width))


@program(units=True)
def fori_loop_of_known_length(size, remat):
    unit = remat(block)

    def loss(ws, x):
        body = lambda i, x: unit(jax.tree.map(lambda w: w[i], ws), x)  # noqa: E731
        return mean_square(lax.fori_loop(0, size.layers, body, x))

    return trained(loss), (weights(size), rows(size))


@program(units=True)
def while_loop_before(size, remat):
    """Of unknown length; it is not differentiated."""
    unit = remat(block)

    def loss(ws, x):
        start = lax.stop_gradient(jnp.abs(x).mean() + 0.1)
        scale = lax.while_loop(lambda s: s < 3.0, lambda s: 2.0 * s, start)
        return mean_square(unrolled(unit, ws, x * scale))

    return trained(loss), (weights(size), rows(size))


@program(units=True)
def while_loop_of_steps(size, remat):
    """Gradient descent until it stops: the gradient is inside a loop of unknown length."""
    unit = remat(block)

    def step(ws, x):
        gradient = jax.grad(lambda ws: mean_square(unrolled(unit, ws, x)))

        def body(state):
            i, ws = state
            return i + 1, jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradient(ws))

        return lax.while_loop(lambda state: state[0] < 2, body, (0, ws))

    return step, (weights(size), rows(size))


@program(units=True)
def cond_around_a_unit(size, remat):
    unit = remat(block)

    def loss(ws, x):
        for i in range(size.layers):
            w = layer(ws, i)
            x = lax.cond(x.sum() > 0, functools.partial(unit, w), jnp.sin, x)
        return mean_square(x)

    return trained(loss), (weights(size), rows(size))


@program(units=True)
def cond_in_a_unit(size, remat):
    def unit(w, x):
        h = lax.cond(x.sum() > 0, lambda h: jnp.tanh(h), lambda h: jnp.sin(h) * h, x @ w["up"])
        return x + h @ w["down"]

    return stack_step(remat(unit), size)


@program(units=True)
def cond_in_a_scan(size, remat):
    def unit(w, x):
        return lax.cond(x[0, 0] > 0, lambda: block(w, x), lambda: x * 0.5)

    return stack_step(remat(unit), size, scanned)


@program(units=True)
def switch_between_experts(size, remat):
    unit = remat(block)

    def loss(ws, x):
        ways = [functools.partial(unit, layer(ws, i)) for i in range(size.layers)]
        return mean_square(lax.switch(jnp.argmax(x[0]) % size.layers, ways, x))

    return trained(loss), (weights(size), rows(size))


@program(units=True)
def layers_skipped_by_depth(size, remat):
    """Stochastic depth: a mask in the loop says which layers run."""
    unit = remat(block)

    def loss(ws, x, keep):
        def body(x, wk):
            w, k = wk
            return lax.cond(k, lambda: unit(w, x), lambda: x), None

        return mean_square(lax.scan(body, x, (ws, keep))[0])

    return trained(loss), (weights(size), rows(size), jnp.arange(size.layers) % 2 == 0)


@program(units=True)
def mapped_in_chunks(size, remat):
    """`lax.map` over parts of the batch."""
    unit = remat(block)

    def loss(ws, x):
        parts = x.reshape(4, -1, size.width)
        return mean_square(lax.map(lambda x: unrolled(unit, ws, x), parts))

    return trained(loss), (weights(size), rows(size))


@program(units=True)
def mapped_with_batches(size, remat):
    """`lax.map` with a batch size: a loop around a vmap."""
    unit = remat(block)

    def loss(ws, x):
        return mean_square(lax.map(lambda x: unrolled(unit, ws, x), x, batch_size=size.rows // 2))

    return trained(loss), (weights(size), rows(size))


@program(units=True, small=FEW)
def associative_scan(size, remat):
    """A linear recurrence over the rows, in parallel."""

    @remat
    def unit(w, x):
        decay = jax.nn.sigmoid(x @ w["up"])
        combine = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])  # noqa: E731
        _, h = lax.associative_scan(combine, (decay, x @ w["up"]))
        return x + jnp.tanh(h @ w["down"])

    return stack_step(unit, size)


@program(units=True)
def micro_batches(size, remat):
    """Gradients added up in a loop."""
    unit = remat(block)
    gradient = jax.value_and_grad(lambda ws, x: mean_square(scanned(unit, ws, x)))

    def step(ws, x):
        def body(total, x):
            value, grads = gradient(ws, x)
            return jax.tree.map(jnp.add, total, grads), value

        parts = x.reshape(4, -1, size.width)
        return lax.scan(body, jax.tree.map(jnp.zeros_like, ws), parts)

    return step, (weights(size), rows(size))


@program(units=True)
def many_steps_in_a_loop(size, remat):
    """An epoch in one program."""
    unit = remat(block)
    step = trained(lambda ws, x: mean_square(unrolled(unit, ws, x)))

    def epoch(ws, xs):
        return lax.scan(step, ws, xs)

    return epoch, (weights(size), rows(size).reshape(2, -1, size.width))


@program(units=True)
def many_steps_written_out(size, remat):
    unit = remat(block)
    step = trained(lambda ws, x: mean_square(unrolled(unit, ws, x)))

    def both(ws, x):
        ws, first = step(ws, x)
        ws, second = step(ws, x)
        return ws, first, second

    return both, (weights(size), rows(size))


@program(units=True)
def jit_in_jit(size, remat):
    """Units, loss and gradient are each jitted."""
    unit = jax.jit(remat(jax.jit(block)))
    loss = jax.jit(lambda ws, x: mean_square(unrolled(unit, ws, x)))
    gradient = jax.jit(jax.value_and_grad(loss))
    return lambda ws, x: gradient(ws, x), (weights(size), rows(size))


@program(units=True, large=Size(2048, 512))
def recurrent_over_time(size, remat):
    """More iterations than a model has layers, with what each of them is told."""
    cell = remat(lambda w, state, force: jnp.tanh(state @ w) + 0.1 * force)

    def loss(w, state, forces):
        body = lambda state, force: (cell(w, state, force), jnp.mean(state))  # noqa: E731
        state, means = lax.scan(body, state, forces)
        return mean_square(state) + jnp.sum(means**2)

    forces = array(80, size.width, seed=3)
    return trained(loss), (array(size.width, size.width, scale=0.1), rows(size), forces)


@program(units=True, large=Size(2048, 512))
def wave_over_time(size, remat):
    """A wave equation by finite differences: the speed is trained, two states are carried."""
    bend = remat(lambda speed, x: speed**2 * (jnp.roll(x, 1, 1) + jnp.roll(x, -1, 1) - 2 * x))

    def loss(speed, x):
        def body(i, states):
            now, before = states
            return 2 * now - before + bend(speed, now), now

        return mean_square(lax.fori_loop(0, 80, body, (x, x))[0])

    return trained(loss), (0.3 + 0.1 * array(size.width), rows(size))
