"""A small training step and its arguments, as command lines name them."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

LAYERS, WIDTH = 4, 64


def layer(w, x):
    up, down = w
    h = checkpoint_name(jnp.tanh(x @ up), "mlpwi")
    return x + checkpoint_name(jnp.sin(h) @ down, "mlpwo")


def scanned(w, x):
    return jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]


def unrolled(w, x):
    for i in range(LAYERS):
        x = layer(jax.tree.map(lambda leaf, i=i: leaf[i], w), x)
    return x


def train(model, w, x):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean(model(w, x) ** 2))(w)
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads), loss


def step(w, x):
    return train(scanned, w, x)


def unrolled_step(w, x):
    return train(unrolled, w, x)


def make_args(rows=2048):
    up = jax.ShapeDtypeStruct((LAYERS, WIDTH, 4 * WIDTH), jnp.float32)
    down = jax.ShapeDtypeStruct((LAYERS, 4 * WIDTH, WIDTH), jnp.float32)
    return (up, down), jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)


def same_args(size):
    del size
    return make_args()


jitted_step = jax.jit(step, donate_argnums=0)


def deep_step(w, x, depth):
    def model(w, x):
        for _ in range(depth):
            x = scanned(w, x)
        return x

    return train(model, w, x)


def deep_args():
    return *make_args(), 2


NOT_A_FUNCTION = 1
