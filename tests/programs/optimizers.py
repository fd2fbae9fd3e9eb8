"""What is done with gradients: states of optimisers, loops around them, averages, line searches."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tests.programs.parts import block, layer, mean_square, rows, scanned, unrolled, weights
from tests.programs.table import program


def optimised(size, remat, tx, stack=unrolled):
    """A step of an optimiser of Optax."""
    unit = remat(block)

    def step(state, x):
        ws, opt = state
        value, grads = jax.value_and_grad(lambda ws: mean_square(stack(unit, ws, x)))(ws)
        updates, opt = tx.update(grads, opt, ws)
        return (optax.apply_updates(ws, updates), opt), value

    ws = weights(size)
    return step, ((ws, tx.init(ws)), rows(size))


@program(units=True, options=(("donate_argnums", 0),))
def adam_with_donation(size, remat):
    return optimised(size, remat, optax.adamw(1e-3), scanned)


@program(units=True)
def clipped_by_norm(size, remat):
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))
    return optimised(size, remat, tx)


@program(units=True)
def multi_steps(size, remat):
    """Optax adds gradients up over calls; the update is in a branch."""
    return optimised(size, remat, optax.MultiSteps(optax.adam(1e-3), 2))


@program(units=True)
def masked_weight_decay(size, remat):
    """Some weights have an optimiser of their own, or none."""
    tx = optax.partition(
        {"train": optax.adam(1e-3), "freeze": optax.set_to_zero()},
        {"up": "train", "down": "freeze"},
    )
    return optimised(size, remat, tx)


@program(units=True)
def factored_second_moments(size, remat):
    return optimised(size, remat, optax.adafactor(1e-3, min_dim_size_to_factor=4))


@program(units=True)
def orthogonalised_updates(size, remat):
    """Muon: Newton-Schulz on every matrix."""

    def orthogonal(g):
        x = g / (jnp.sqrt(jnp.sum(g**2)) + 1e-6)
        for _ in range(2):
            a = x @ x.T
            x = 1.5 * x - 0.5 * a @ x
        return x

    unit = remat(block)

    def step(ws, x):
        grads = jax.grad(lambda ws: mean_square(unrolled(unit, ws, x)))(ws)
        return jax.tree.map(lambda w, g: w - 0.1 * jax.vmap(orthogonal)(g), ws, grads)

    return step, (weights(size), rows(size))


@program(units=True)
def lbfgs_with_line_search(size, remat):
    """The loss is called again in a loop of unknown length."""
    unit = remat(block)
    tx = optax.lbfgs(linesearch=optax.scale_by_zoom_linesearch(max_linesearch_steps=3))

    def step(state, x):
        ws, opt = state
        loss = lambda ws: mean_square(unrolled(unit, ws, x))  # noqa: E731
        value, grads = jax.value_and_grad(loss)(ws)
        updates, opt = tx.update(grads, opt, ws, value=value, grad=grads, value_fn=loss)
        return optax.apply_updates(ws, updates), value

    ws = layer_of(weights(size))
    return step, ((ws, tx.init(ws)), rows(size))


def layer_of(ws):
    """The first two layers, as a stack."""
    return jax.tree.map(lambda w: w[:2], ws)


@program(units=True)
def moving_average_of_weights(size, remat):
    unit = remat(block)

    def step(state, x):
        ws, average = state
        value, grads = jax.value_and_grad(lambda ws: mean_square(unrolled(unit, ws, x)))(ws)
        ws = jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads)
        return (ws, optax.incremental_update(ws, average, 0.1)), value

    return step, ((weights(size), weights(size)), rows(size))


@program(units=True)
def lookahead(size, remat):
    unit = remat(block)
    tx = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)

    def step(state, x):
        params, opt = state
        loss = lambda ws: mean_square(unrolled(unit, ws, x))  # noqa: E731
        updates, opt = tx.update(jax.grad(loss)(params.fast), opt, params)
        return optax.apply_updates(params, updates), opt

    params = optax.LookaheadParams.init_synced(weights(size))
    return step, ((params, tx.init(params)), rows(size))


@program(units=True)
def schedule_free(size, remat):
    unit = remat(block)
    tx = optax.contrib.schedule_free_sgd(0.1)

    def step(state, x):
        ws, opt = state
        grads = jax.grad(lambda ws: mean_square(unrolled(unit, ws, x)))(ws)
        updates, opt = tx.update(grads, opt, ws)
        return optax.apply_updates(ws, updates), opt

    ws = weights(size)
    return step, ((ws, tx.init(ws)), rows(size))


@program(units=True)
def skipped_when_not_finite(size, remat):
    return optimised(size, remat, optax.apply_if_finite(optax.sgd(0.1), 3))


@program(units=True)
def two_losses_in_turn(size, remat):
    """One loss or the other by the number of the step; each has a gradient of its own."""
    unit = remat(block)

    def step(ws, i, x):
        first = jax.grad(lambda ws: mean_square(unrolled(unit, ws, x)))
        second = jax.grad(lambda ws: mean_square(jnp.sin(unrolled(unit, ws, x))))
        grads = lax.cond(i % 2 == 0, first, second, ws)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), i + 1

    return step, (weights(size), jnp.int32(1), rows(size))


@program(units=True)
def gradients_projected_on_each_other(size, remat):
    """Two tasks share a body: what their gradients disagree in is taken out."""
    unit = remat(block)

    def step(ws, x):
        y, pull = jax.vjp(lambda ws: unrolled(unit, ws, x), ws)
        a, b = pull(jnp.sin(y))[0], pull(jnp.cos(y))[0]

        def projected(a, b):
            return a - jnp.minimum(jnp.sum(a * b), 0.0) / (jnp.sum(b * b) + 1e-6) * b

        return jax.tree.map(lambda w, a, b: w - 0.1 * projected(a, b), ws, a, b)

    return step, (weights(size), rows(size))


@program(units=True)
def layers_trained_alone(size, remat):
    """Every block has a loss of its own, and no gradient goes to those before it."""
    unit = remat(block)

    def loss(ws, x):
        total = 0.0
        for i in range(size.layers):
            x = unit(layer(ws, i), lax.stop_gradient(x))
            total += mean_square(jnp.sin(x))
        return total

    def step(ws, x):
        return jax.value_and_grad(loss)(ws, x)

    return step, (weights(size), rows(size))


@program(units=True)
def gradient_of_the_input_too(size, remat):
    unit = remat(block)

    def step(ws, x):
        loss = lambda ws, x: mean_square(scanned(unit, ws, x))  # noqa: E731
        return jax.value_and_grad(loss, argnums=(0, 1))(ws, x)

    return step, (weights(size), rows(size))
