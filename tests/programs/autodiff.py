"""More than one first derivative: second order, per example, implicit, forward mode."""

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
    trained,
    unrolled,
    weights,
)
from tests.programs.table import Size, program

MEDIUM = Size(2048, 256)


def loss_of(unit, stack=unrolled):
    return lambda ws, x: mean_square(stack(unit, ws, x))


def along(ws):
    """A direction, of the shape of the weights."""
    return jax.tree.map(jnp.cos, ws)


def dot(a, b):
    products = jax.tree.map(lambda a, b: jnp.sum(a * b), a, b)
    return sum(jax.tree.leaves(products))


@program(units=True)
def hessian_product_forward_over_reverse(size, remat):
    loss = loss_of(remat(block))

    def step(ws, x):
        return jax.jvp(lambda ws: jax.grad(loss)(ws, x), (ws,), (along(ws),))

    return step, (weights(size), rows(size))


@program(units=True)
def hessian_product_reverse_over_reverse(size, remat):
    loss = loss_of(remat(block))

    def step(ws, x):
        return jax.grad(lambda ws: dot(jax.grad(loss)(ws, x), along(ws)))(ws)

    return step, (weights(size), rows(size))


@program(units=True)
def hessian_product_in_a_scan(size, remat):
    loss = loss_of(remat(block), scanned)

    def step(ws, x):
        return jax.jvp(lambda ws: jax.grad(loss)(ws, x), (ws,), (along(ws),))

    return step, (weights(size), rows(size))


@program(units=True)
def gauss_newton_product(size, remat):
    unit = remat(block)

    def step(ws, x):
        y, tangent = jax.jvp(lambda ws: unrolled(unit, ws, x), (ws,), (along(ws),))
        _, pull = jax.vjp(lambda ws: unrolled(unit, ws, x), ws)
        return pull(tangent)[0], y

    return step, (weights(size), rows(size))


@program(units=True)
def gradient_penalty(size, remat):
    """WGAN-GP: the norm of the gradient by the input is part of the loss."""
    unit = remat(block)

    def loss(ws, x):
        score = lambda x: unrolled(unit, ws, x).mean()  # noqa: E731
        value, g = jax.value_and_grad(score)(x)
        return value + jnp.mean((jnp.sqrt(jnp.sum(g**2, -1) + 1e-6) - 1) ** 2)

    return trained(loss), (weights(size), rows(size))


@program(units=True, large=MEDIUM)
def gradients_per_example(size, remat):
    loss = loss_of(remat(block))

    def step(ws, x):
        grads = jax.vmap(jax.grad(loss), (None, 0))(ws, x[:, None])
        return jax.tree.map(lambda g: jnp.mean(g, 0), grads)

    return step, (weights(size), rows(Size(8, size.width)))


@program(units=True)
def gradient_of_vmap(size, remat):
    """The units see one row."""
    unit = remat(lambda w, row: row + jnp.tanh(jax.nn.gelu(row @ w["up"]) @ w["down"]))

    def loss(ws, x):
        return mean_square(jax.vmap(lambda row: unrolled(unit, ws, row))(x))

    return trained(loss), (weights(size), rows(size))


@program(units=True)
def ensemble(size, remat):
    """vmap over whole training steps."""
    step = trained(loss_of(remat(block)))
    ws = jax.tree.map(lambda w: jnp.stack([w, 0.5 * w]), weights(size))
    return jax.vmap(step, (0, None)), (ws, rows(size))


@program(units=True)
def jacobian_by_reverse(size, remat):
    unit = remat(block)

    def step(ws, x):
        return jax.jacrev(lambda ws: unrolled(unit, ws, x).mean(0)[:3])(ws)

    return step, (weights(size), rows(size))


@program(units=True)
def jacobian_by_forward_in_a_loss(size, remat):
    """A trace by forward mode, in a loss: a continuous flow."""
    unit = remat(lambda w, x: jnp.tanh(x @ w["up"]) @ w["down"])

    def loss(ws, x):
        e = jnp.sin(jnp.arange(size.width, dtype=x.dtype)) + jnp.zeros_like(x)
        total = 0.0
        for i in range(size.layers):
            dx, trace = jax.jvp(functools.partial(unit, layer(ws, i)), (x,), (e,))
            x, total = x + dx, total + jnp.sum(trace * e, -1)
        return mean_square(x) - jnp.mean(total)

    return trained(loss), (weights(size), rows(size))


@program(units=True)
def physics_informed(size, remat):
    """The residual of a differential equation: second derivatives by the input, in the loss."""
    unit = remat(block)

    def loss(ws, points):
        def u(point):
            return unrolled(unit, ws["body"], jnp.tanh(point @ ws["in"])).sum()

        def residual(point):
            along = jax.jvp(jax.grad(u), (point,), (jnp.ones_like(point),))[1]
            return along.sum() + jnp.sin(point.sum())

        return jnp.mean(jax.vmap(residual)(points) ** 2)

    ws = {"in": array(2, size.width), "body": weights(size)}
    return trained(loss), (ws, array(size.rows, 2))


@program(units=True)
def laplacian(size, remat):
    """All of the second derivatives by the input."""
    unit = remat(block)

    def loss(ws, points):
        u = lambda p: unrolled(unit, ws["body"], jnp.tanh(p @ ws["in"])).sum()  # noqa: E731
        return jnp.mean(jax.vmap(lambda p: jnp.trace(jax.hessian(u)(p)))(points) ** 2)

    ws = {"in": array(2, size.width), "body": weights(size)}
    return trained(loss), (ws, array(size.rows, 2))


@program(units=True)
def maml(size, remat):
    """The gradient through steps of gradient descent."""
    loss = loss_of(remat(block))

    def outer(ws, x, y):
        for _ in range(2):
            ws = jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x))
        return loss(ws, y)

    return trained(outer), (weights(size), rows(size), rows(size, seed=3))


@program(units=True)
def maml_over_tasks(size, remat):
    """The same for several tasks by vmap, the inner steps in a loop."""
    loss = loss_of(remat(block))

    def adapted(ws, x):
        body = lambda ws, _: (trained(loss)(ws, x)[0], None)  # noqa: E731
        return lax.scan(body, ws, None, length=2)[0]

    def outer(ws, xs):
        return jnp.mean(jax.vmap(lambda x: loss(adapted(ws, x), x))(xs))

    return trained(outer), (weights(size), rows(size).reshape(2, -1, size.width))


@program(units=True)
def reptile(size, remat):
    """First order only: no gradient goes through the inner steps."""
    step = trained(loss_of(remat(block)))

    def outer(ws, xs):
        inner, losses = lax.scan(step, ws, xs)
        return jax.tree.map(lambda w, v: w + 0.5 * (v - w), ws, inner), losses

    return outer, (weights(size), rows(size).reshape(2, -1, size.width))


@program(units=True)
def sharpness_aware(size, remat):
    """SAM: the gradient at the place that the gradient points to."""
    loss = loss_of(remat(block))

    def step(ws, x):
        g = jax.grad(loss)(ws, x)
        norm = jnp.sqrt(dot(g, g)) + 1e-6
        value, grads = jax.value_and_grad(loss)(
            jax.tree.map(lambda w, g: w + 0.05 * g / norm, ws, g), x
        )
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value

    return step, (weights(size), rows(size))


@program(units=True)
def equilibrium(size, remat):
    """DEQ: a fixed point, differentiated by the implicit function theorem."""
    unit = remat(lambda w, x, z: jnp.tanh(0.2 * z @ w["inner"] + x @ w["in"]))

    def fixed(f, z):
        return lax.fori_loop(0, 12, lambda _, z: f(z), z)

    @jax.custom_vjp
    def solve(w, x):
        return fixed(functools.partial(unit, w, x), jnp.zeros_like(x))

    def forward(w, x):
        z = solve(w, x)
        return z, (w, x, z)

    def backward(kept, g):
        w, x, z = kept
        _, pull = jax.vjp(functools.partial(unit, w, x), z)
        u = fixed(lambda u: g + pull(u)[0], g)
        return jax.vjp(lambda w, x: unit(w, x, z), w, x)[1](u)

    solve.defvjp(forward, backward)
    names = ("inner", "in")
    w = {n: array(size.width, size.width, scale=0.2, seed=i) for i, n in enumerate(names)}
    return trained(lambda w, x: mean_square(solve(w, x))), (w, rows(size))


@program(units=True)
def implicit_by_conjugate_gradients(size, remat):
    """A linear system in the loss, solved by a loop with a rule of its own."""
    unit = remat(block)

    def loss(ws, x):
        y = unrolled(unit, ws, x)
        operator = lambda v: v + 0.1 * y.T @ (y @ v) / size.rows  # noqa: E731
        solution, _ = jax.scipy.sparse.linalg.cg(operator, y.mean(0), maxiter=5)
        return mean_square(solution)

    return trained(loss), (weights(size), rows(size))


@program(units=True)
def unrolled_sinkhorn(size, remat):
    """Optimal transport by a loop that is differentiated through."""
    unit = remat(block)

    def loss(ws, x):
        cost = jnp.mean(unrolled(unit, ws, x).reshape(8, -1, size.width), 1)
        scores = -cost @ cost.T
        rounds = lambda s, _: (  # noqa: E731
            jax.nn.log_softmax(jax.nn.log_softmax(s, 0), 1),
            None,
        )
        plan, _ = lax.scan(rounds, scores, None, length=4)
        return jnp.sum(jnp.exp(plan) * scores)

    return trained(loss), (weights(size), rows(size))


@program(units=True)
def neural_ode(size, remat):
    """Runge-Kutta steps in a loop, differentiated through."""
    field = remat(lambda w, y: jnp.tanh(y @ w["up"]) @ w["down"])

    def loss(w, y):
        f = functools.partial(field, w)

        def step(y, _):
            a = f(y)
            b = f(y + 0.05 * a)
            return y + 0.1 * b, None

        return mean_square(lax.scan(step, y, None, length=4)[0])

    return trained(loss), (layer(weights(size), 0), rows(size))


@program(units=True)
def vjp_taken_apart(size, remat):
    """The pull-back is called twice, each time with another cotangent."""
    unit = remat(block)

    def step(ws, x):
        y, pull = jax.vjp(lambda ws: unrolled(unit, ws, x), ws)
        return pull(y), pull(jnp.cos(y))

    return step, (weights(size), rows(size))


@program(units=True)
def linearize(size, remat):
    unit = remat(block)

    def step(ws, x):
        y, push = jax.linearize(lambda ws: unrolled(unit, ws, x), ws)
        transposed = jax.linear_transpose(push, ws)
        return transposed(jnp.sin(y))

    return step, (weights(size), rows(size))


@program(units=True)
def forward_mode_only(size, remat):
    """Forward gradient: no backward pass at all."""
    loss = loss_of(remat(block))

    def step(ws, x):
        v = along(ws)
        value, slope = jax.jvp(lambda ws: loss(ws, x), (ws,), (v,))
        return jax.tree.map(lambda w, v: w - 0.1 * slope * v, ws, v), value

    return step, (weights(size), rows(size))


@program(units=True)
def third_derivative(size, remat):
    loss = loss_of(remat(block))

    def step(ws, x):
        first = lambda ws: dot(jax.grad(loss)(ws, x), along(ws))  # noqa: E731
        return jax.grad(lambda ws: dot(jax.grad(first)(ws), along(ws)))(ws)

    return step, (weights(size), rows(size))
