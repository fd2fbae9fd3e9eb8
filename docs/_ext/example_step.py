"""The step that the guides' examples plan: small, so that each example takes seconds."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

import jdelta

LAYERS, WIDTH, ROWS = 8, 128, 2048


@jdelta.remat
def block(x, w):
    hidden = jnp.tanh(x @ w["up"])
    return x + jnp.sin(hidden) @ w["down"]


def loss_fn(params, batch):
    out, _ = jax.lax.scan(lambda x, w: (block(x, w), None), batch, params)
    return jnp.mean(out**2)


def train_step(params, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


params = {
    "up": jnp.full((LAYERS, WIDTH, 4 * WIDTH), 0.01),
    "down": jnp.full((LAYERS, 4 * WIDTH, WIDTH), 0.01),
}
batch = jnp.ones((ROWS, WIDTH))
folder = Path(tempfile.mkdtemp())
