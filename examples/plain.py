"""Plain JAX, nothing marked: a deep network in half the memory by one line.

python examples/plain.py
"""

import functools

import jax
import jax.numpy as jnp

import jdelta

LAYERS, WIDTH, ROWS = 12, 256, 4096


def network(weights, x):
    """Residual layers, scanned over their stacked weights."""

    def layer(x, w):
        up, down = w
        return x + jnp.tanh(jax.nn.gelu(x @ up) @ down), None

    return jax.lax.scan(layer, x, weights)[0]


def train_step(weights, x):
    """One step of gradient descent; this is all that jdelta gets to see."""
    loss, grads = jax.value_and_grad(lambda w: jnp.mean(network(w, x) ** 2))(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss


def main() -> None:
    x = jax.random.normal(jax.random.key(0), (ROWS, WIDTH))
    shape = LAYERS, WIDTH, WIDTH
    normal = functools.partial(jax.random.normal, shape=shape)
    keys = jax.random.split(jax.random.key(1))
    weights = tuple(normal(key) / WIDTH**0.5 for key in keys)

    step = jdelta.jit(train_step, budget="50%", donate_argnums=0)
    for _ in range(5):
        weights, loss = step(weights, x)
        print(f"loss {loss:.4f}")
    print(step.plans[0])


if __name__ == "__main__":
    main()
