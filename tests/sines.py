"""A step over scanned layers of one product and two functions of it, the smallest to be planned."""

import jax
import jax.numpy as jnp

import jdelta


@jdelta.remat
def layer(w, x):
    return x + jnp.sin(jnp.tanh(x @ w))


def step(ws, x):
    def loss(ws):
        return jnp.mean(jax.lax.scan(lambda y, w: (layer(w, y), None), x, ws)[0] ** 2)

    return ws - 0.1 * jax.grad(loss)(ws)


def unrolled(layer):
    """The step over layers one after the other: new weights, and the loss."""

    def step(ws, x):
        def loss(ws):
            y = x
            for w in ws:
                y = layer(w, y)
            return jnp.mean(y**2)

        value, grads = jax.value_and_grad(loss)(ws)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value

    return step


def shapes(layers, rows, width):
    """Weights and input of the step."""
    float32 = jnp.float32
    weights = jax.ShapeDtypeStruct((layers, width, width), float32)
    return weights, jax.ShapeDtypeStruct((rows, width), float32)
