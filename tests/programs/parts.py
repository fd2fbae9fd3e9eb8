"""What steps are made of: random arrays, residual blocks, stacks of them, gradient descent."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

RATE = 0.1


def array(*shape, scale=1.0, seed=0, dtype=np.float32):
    """Random normal numbers, from numpy: nothing is compiled for them."""
    return jnp.asarray((scale * np.random.default_rng(seed).standard_normal(shape)).astype(dtype))


def integers(high, *shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, high, shape).astype(np.int32))


def weights(size, wide=2):
    """Two matrices for each block, stacked over the layers."""
    up = (size.layers, size.width, wide * size.width)
    down = (size.layers, wide * size.width, size.width)
    return {"up": array(*up, scale=0.2), "down": array(*down, scale=0.2, seed=1)}


def rows(size, seed=2):
    return array(size.rows, size.width, seed=seed)


def block(w, x):
    return x + jnp.tanh(jax.nn.gelu(x @ w["up"]) @ w["down"])


def layer(ws, i):
    """The weights of one block."""
    return jax.tree.map(lambda w: w[i], ws)


def depth(ws):
    return len(jax.tree.leaves(ws)[0])


def unrolled(unit, ws, x):
    for i in range(depth(ws)):
        x = unit(layer(ws, i), x)
    return x


def scanned(unit, ws, x, **options):
    return lax.scan(lambda x, w: (unit(w, x), None), x, ws, **options)[0]


def mean_square(y):
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


def descend(ws, grads):
    return jax.tree.map(lambda w, g: (w - RATE * g).astype(w.dtype), ws, grads)


def trained(loss):
    """The step that follows the gradient of a loss with regard to its first argument."""

    def step(ws, *args):
        value, grads = jax.value_and_grad(loss)(ws, *args)
        return descend(ws, grads), value

    return step


def stack_step(unit, size, stack=unrolled):
    """Equal blocks of `weights`, and rows through them."""
    return trained(lambda ws, x: mean_square(stack(unit, ws, x))), (weights(size), rows(size))
