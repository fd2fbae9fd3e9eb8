"""Functions with derivatives of their own."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.parts import (
    array,
    block,
    integers,
    mean_square,
    rows,
    scanned,
    stack_step,
    trained,
    unrolled,
    weights,
)
from tests.programs.table import program
from tests.rules import bell, soft


def with_rule(rule):
    """A block with the function where the activation is."""
    return lambda w, x: x + jnp.tanh(rule(x @ w["up"]) @ w["down"])


@program(units=True)
def custom_vjp(size, remat):
    return stack_step(remat(with_rule(bell)), size)


@program(units=True)
def custom_vjp_in_a_scan(size, remat):
    return stack_step(remat(with_rule(bell)), size, scanned)


@program(units=True)
def custom_jvp(size, remat):
    return stack_step(remat(with_rule(soft)), size)


@program(units=True)
def custom_jvp_in_a_scan(size, remat):
    return stack_step(remat(with_rule(soft)), size, scanned)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def scaled(factor, kind, x):
    return factor * (jnp.sin(x) if kind == "sin" else jnp.cos(x))


scaled.defvjp(
    lambda factor, kind, x: (scaled(factor, kind, x), x),
    lambda factor, kind, x, g: (g * factor * jnp.cos(x),),
)


@program(units=True)
def nondiff_arguments(size, remat):
    return stack_step(remat(with_rule(functools.partial(scaled, 0.5, "sin"))), size)


@jax.custom_vjp
def clipped(limit, x):
    return x


clipped.defvjp(
    lambda limit, x: (x, limit),
    lambda limit, g: (None, jnp.clip(g, -limit, limit)),
)


@program(units=True)
def gradient_clipped_on_the_way(size, remat):
    """The rule gives None for an argument without a derivative."""
    return stack_step(remat(lambda w, x: clipped(0.01, block(w, x))), size)


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x * 8) / 8


straight_through.defvjp(lambda x: (straight_through(x), None), lambda _, g: (g,))


@program(units=True)
def straight_through_estimator(size, remat):
    return stack_step(remat(with_rule(straight_through)), size)


@program(units=True)
def stop_gradient_estimator(size, remat):
    """The same, in the way without a rule."""
    rule = lambda x: x + lax.stop_gradient(jnp.round(x * 8) / 8 - x)  # noqa: E731
    return stack_step(remat(with_rule(rule)), size, scanned)


@jax.custom_vjp
def reversed_gradient(x):
    return x


reversed_gradient.defvjp(lambda x: (x, None), lambda _, g: (-0.1 * g,))


@program(units=True)
def domain_adversarial(size, remat):
    """The features of one head are trained against the other."""
    unit = remat(block)

    def loss(ws, x):
        features = unrolled(unit, ws["body"], x)
        task, domain = features @ ws["task"], reversed_gradient(features) @ ws["domain"]
        return mean_square(task) + mean_square(jnp.tanh(domain))

    heads = {name: array(size.width, 2, seed=i) for i, name in enumerate(("task", "domain"))}
    return trained(loss), ({"body": weights(size), **heads}, rows(size))


@program(units=True)
def rule_made_inside(size, remat):
    """Each call makes a new rule, which closes over a traced value."""

    def loss(ws, x, factor):
        @remat
        def unit(w, x):
            @jax.custom_jvp
            def swell(h):
                return jnp.sin(factor * h)

            swell.defjvp(lambda h, t: (swell(h[0]), factor * jnp.cos(factor * h[0]) * t[0]))
            return x + jnp.tanh(swell(x @ w["up"]) @ w["down"])

        return mean_square(unrolled(unit, ws, x))

    return trained(loss), (weights(size), rows(size), jnp.float32(0.5))


@program(units=True)
def vjp_rule_around_the_unit(size, remat):
    """The rule itself takes the derivative of a unit."""
    unit = remat(block)

    @jax.custom_vjp
    def outer(w, x):
        return unit(w, x)

    def forward(w, x):
        return jax.vjp(unit, w, x)

    outer.defvjp(forward, lambda pull, g: pull(g))
    return stack_step(outer, size)


@program(units=True)
def memory_by_recompute_rule(size, remat):
    """People's own remat: a rule that keeps the input and takes the vjp in the backward pass."""

    @jax.custom_vjp
    def unit(w, x):
        return block(w, x)

    unit.defvjp(lambda w, x: (block(w, x), (w, x)), lambda kept, g: jax.vjp(block, *kept)[1](g))
    return stack_step(remat(unit), size)


@jax.custom_vjp
def cross_entropy(scores, labels):
    return cross_entropy_forward(scores, labels)[0]


def cross_entropy_forward(scores, labels):
    normal = jax.nn.logsumexp(scores, -1, keepdims=True)
    picked = jnp.take_along_axis(scores, labels[:, None], -1)
    return jnp.mean(normal - picked), (scores, labels, normal)


def cross_entropy_backward(kept, g):
    scores, labels, normal = kept
    right = jax.nn.one_hot(labels, scores.shape[-1])
    return g * (jnp.exp(scores - normal) - right) / len(scores), None


cross_entropy.defvjp(cross_entropy_forward, cross_entropy_backward)


@program(units=True)
def fused_cross_entropy(size, remat):
    """A rule that is also given integers."""
    unit = remat(block)

    def loss(ws, x, labels):
        return cross_entropy(unrolled(unit, ws["body"], x) @ ws["head"], labels)

    ws = {"body": weights(size), "head": array(size.width, 16, scale=0.3)}
    return trained(loss), (ws, rows(size), integers(16, size.rows))


@jax.custom_vjp
def flash(q, k, v):
    return flash_forward(q, k, v)[0]


def flash_forward(q, k, v):
    """Attention over blocks of keys, with running maxima and sums."""

    def body(carry, kv):
        top, total, out = carry
        scores = q @ kv[0].T
        new = jnp.maximum(top, scores.max(-1))
        p, old = jnp.exp(scores - new[:, None]), jnp.exp(top - new)
        return (new, total * old + p.sum(-1), out * old[:, None] + p @ kv[1]), None

    parts = jax.tree.map(lambda x: x.reshape(4, -1, x.shape[-1]), (k, v))
    start = jnp.full(len(q), -1e9), jnp.zeros(len(q)), jnp.zeros_like(q)
    (top, total, out), _ = lax.scan(body, start, parts)
    y = out / total[:, None]
    return y, (q, k, v, y, top + jnp.log(total))


def flash_backward(kept, g):
    q, k, v, y, normal = kept
    p = jnp.exp(q @ k.T - normal[:, None])
    scores = p * (g @ v.T - (g * y).sum(-1, keepdims=True))
    return scores @ k, scores.T @ q, p.T @ g


flash.defvjp(flash_forward, flash_backward)


@program(units=True)
def flash_attention(size, remat):
    def unit(w, x):
        return x + jnp.tanh(flash(x @ w["q"], x @ w["k"], x @ w["v"]))

    shape = (size.layers, size.width, size.width)
    ws = {name: array(*shape, scale=0.2, seed=i) for i, name in enumerate("qkv")}
    marked = remat(unit)
    return trained(lambda ws, x: mean_square(unrolled(marked, ws, x))), (ws, rows(size))


@program(units=True)
def closure_convert(size, remat):
    """A rule for a function that closes over traced values, as in solvers."""
    unit = remat(block)

    def loss(ws, x):
        def dynamics(y):
            return 0.5 * jnp.tanh(y @ ws["inner"])

        fun, consts = jax.closure_convert(dynamics, x)

        @jax.custom_vjp
        def twice(y, *consts):
            return fun(fun(y, *consts), *consts)

        def backward(kept, g):
            return jax.vjp(lambda y, *c: fun(fun(y, *c), *c), *kept)[1](g)

        twice.defvjp(lambda *args: (twice(*args), args), backward)
        return mean_square(twice(unrolled(unit, ws["body"], x), *consts))

    ws = {"body": weights(size), "inner": array(size.width, size.width, scale=0.3)}
    return trained(loss), (ws, rows(size))


@program(units=True)
def linear_call(size, remat):
    """A linear function with a transpose of its own."""

    def roll(x):
        return jax.custom_derivatives.linear_call(
            lambda _, x: jnp.roll(x, 1, -1), lambda _, g: jnp.roll(g, -1, -1), (), x
        )

    return stack_step(remat(with_rule(lambda h: jnp.sin(roll(h)))), size)


@program(units=True)
def custom_gradient(size, remat):
    """JAX's decorator that looks like TensorFlow's."""

    @jax.custom_gradient
    def rule(x):
        return jnp.sin(x), lambda g: g * jnp.cos(x)

    return stack_step(remat(with_rule(rule)), size)


@program(units=True)
def custom_linear_solve(size, remat):
    def unit(w, x):
        a = jnp.eye(size.width) + 0.1 * w["up"] @ w["down"]
        solve = lambda matvec, b: jnp.linalg.solve(a, b)  # noqa: E731
        transposed = lambda vecmat, b: jnp.linalg.solve(a.T, b)  # noqa: E731
        y = lax.custom_linear_solve(lambda v: a @ v, jnp.sin(x).T, solve, transposed)
        return x + jnp.tanh(y.T)

    return stack_step(remat(unit), size)


@program(units=True)
def custom_root(size, remat):
    """A scalar found by Newton's method, differentiated through the root."""
    unit = remat(block)

    def loss(ws, x):
        y = unrolled(unit, ws, x)
        wanted = 1.0 + jnp.abs(y).mean()
        root = lax.custom_root(
            lambda s: s**3 - wanted,
            1.0,
            lambda f, s: lax.fori_loop(0, 8, lambda _, s: s - f(s) / jax.grad(f)(s), s),
            lambda g, t: t / g(1.0),
        )
        return root * mean_square(y)

    return trained(loss), (weights(size), rows(size))
