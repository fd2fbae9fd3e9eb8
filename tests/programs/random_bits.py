"""Random numbers that units draw: masks, noise, samples, keys of both kinds."""

import jax
import jax.numpy as jnp

from tests.programs.parts import (
    array,
    block,
    layer,
    mean_square,
    rows,
    scanned,
    trained,
    weights,
)
from tests.programs.table import program


def dropped(key, x, rate=0.25):
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0.0)


def with_keys(unit, size, stack, key):
    """Blocks that take a key each; unrolled or scanned."""

    def loss(ws, x, key):
        keys = jax.random.split(key, size.layers)
        if stack is scanned:
            return mean_square(scanned(lambda wk, x: unit(*wk, x), (ws, keys), x))
        for i in range(size.layers):
            x = unit(layer(ws, i), keys[i], x)
        return mean_square(x)

    return trained(loss), (weights(size), rows(size), key)


def dropout(w, key, x):
    h = dropped(key, jax.nn.gelu(x @ w["up"]))
    return x + jnp.tanh(h @ w["down"])


def noise(w, key, x):
    h = jax.nn.gelu(x @ w["up"])
    return x + jnp.tanh((h * (1 + 0.1 * jax.random.normal(key, h.shape))) @ w["down"])


@program(units=True)
def dropout_unrolled(size, remat):
    return with_keys(remat(dropout), size, None, jax.random.key(0))


@program(units=True)
def dropout_scanned(size, remat):
    return with_keys(remat(dropout), size, scanned, jax.random.key(0))


@program(units=True)
def dropout_with_raw_keys(size, remat):
    """Keys as two integers, as they were before they had a type."""
    return with_keys(remat(dropout), size, None, jax.random.PRNGKey(0))


@program(units=True)
def dropout_by_rbg(size, remat):
    """The generator that TPUs have in hardware."""
    return with_keys(remat(dropout), size, scanned, jax.random.key(0, impl="rbg"))


@program(units=True)
def noise_unrolled(size, remat):
    return with_keys(remat(noise), size, None, jax.random.key(0))


@program(units=True)
def noise_scanned(size, remat):
    return with_keys(remat(noise), size, scanned, jax.random.key(0))


@program(units=True)
def key_in_the_carry(size, remat):
    """The key is split anew by every layer of a loop."""
    unit = remat(dropout)

    def loss(ws, x, key):
        def body(carry, w):
            x, key = carry
            key, now = jax.random.split(key)
            return (unit(w, now, x), key), None

        (x, _), _ = jax.lax.scan(body, (x, key), ws)
        return mean_square(x)

    return trained(loss), (weights(size), rows(size), jax.random.key(1))


@program(units=True)
def key_folded_with_the_layer(size, remat):
    """Every unit makes its key itself, from one key and a number."""

    def unit(w, i, x, key):
        return dropout(w, jax.random.fold_in(key, i), x)

    marked = remat(unit)

    def loss(ws, x, key):
        for i in range(size.layers):
            x = marked(layer(ws, i), jnp.int32(i), x, key)
        return mean_square(x)

    return trained(loss), (weights(size), rows(size), jax.random.key(1))


@program(units=True)
def key_by_closure(size, remat):
    """A key that is no argument of the unit, nor of the step."""
    key = jax.random.key(3)

    def unit(w, x):
        return dropout(w, key, x)

    marked = remat(unit)
    loss = lambda ws, x: mean_square(scanned(marked, ws, x))  # noqa: E731
    return trained(loss), (weights(size), rows(size))


@program(units=True)
def key_kept_in_the_state(size, remat):
    """The step gives the next key beside the weights."""
    unit = remat(dropout)

    def step(state, x):
        ws, key = state
        key, now = jax.random.split(key)

        def loss(ws):
            y = x
            for i in range(size.layers):
                y = unit(layer(ws, i), jax.random.fold_in(now, i), y)
            return mean_square(y)

        value, grads = jax.value_and_grad(loss)(ws)
        return (jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), key), value

    return step, ((weights(size), jax.random.key(2)), rows(size))


@program(units=True)
def dropped_paths(size, remat):
    """Whole rows of the batch skip a block."""

    def unit(w, key, x):
        keep = jax.random.bernoulli(key, 0.8, (len(x), 1))
        return x + jnp.where(keep, block(w, x) - x, 0.0) / 0.8

    return with_keys(remat(unit), size, None, jax.random.key(0))


@program(units=True)
def variational_autoencoder(size, remat):
    """The reparameterised sample between two halves."""
    unit = remat(block)

    def loss(ws, x, key):
        mean = scanned(unit, ws["encoder"], x)
        deviation = jnp.exp(0.1 * mean)
        z = mean + deviation * jax.random.normal(key, mean.shape)
        y = scanned(unit, ws["decoder"], z)
        return mean_square(y - x) + jnp.mean(mean**2 + deviation**2 - 0.2 * mean - 1)

    ws = {"encoder": weights(size), "decoder": weights(size)}
    return trained(loss), (ws, rows(size), jax.random.key(0))


@program(units=True)
def gumbel_softmax(size, remat):
    def unit(w, key, x):
        scores = x @ w["up"] + jax.random.gumbel(key, (len(x), w["up"].shape[-1]))
        return x + jnp.tanh(jax.nn.softmax(scores / 0.5) @ w["down"])

    return with_keys(remat(unit), size, None, jax.random.key(0))


@program(units=True)
def masked_tokens(size, remat):
    """Positions drawn in the loss, shuffled by a permutation."""
    unit = remat(block)

    def loss(ws, x, key):
        a, b = jax.random.split(key)
        hidden = jax.random.permutation(a, len(x))[: len(x) // 4]
        y = scanned(unit, ws["body"], x.at[hidden].set(ws["mask"]))
        kept = jax.random.uniform(b, (len(hidden), 1)) < 0.9
        return mean_square(jnp.where(kept, y[hidden] - x[hidden], 0.0))

    ws = {"body": weights(size), "mask": array(size.width)}
    return trained(loss), (ws, rows(size), jax.random.key(0))


@program(units=True)
def samples_of_other_distributions(size, remat):
    """Gamma has a loop inside and a derivative by its parameter; integers have none."""

    def unit(w, key, x):
        a, b = jax.random.split(key)
        h = jax.nn.softplus(x @ w["up"]) + 0.5
        drawn = jax.random.gamma(a, h) + jax.random.randint(b, h.shape, 0, 2)
        return x + jnp.tanh(0.1 * drawn @ w["down"])

    return with_keys(remat(unit), size, None, jax.random.key(0))
