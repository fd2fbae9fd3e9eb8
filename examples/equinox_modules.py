"""Equinox: arrays and static parts are split as usual; nothing is marked.

python examples/equinox_modules.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp

import jdelta

LAYERS, WIDTH, ROWS = 6, 128, 2048


class Block(eqx.Module):
    """One residual block."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=first)
        self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=second)

    def __call__(self, x):
        """Transforms one row `x`, `[width]`."""
        return x + self.down(jax.nn.gelu(self.up(x)))


def main() -> None:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    arrays, static = eqx.partition(eqx.filter_vmap(Block)(keys), eqx.is_array)

    def train_step(arrays, x):
        def loss_fn(arrays):
            def layer(x, a):
                return jax.vmap(eqx.combine(a, static))(x), None

            y = jax.lax.scan(layer, x, arrays)[0]
            return jnp.mean((y - jnp.roll(x, 1, axis=0)) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(arrays)
        return jax.tree.map(lambda w, g: w - 0.1 * g, arrays, grads), loss

    x = jax.random.normal(keys[0], (ROWS, WIDTH))
    step = jdelta.jit(train_step, budget=0.5, donate_argnums=0)
    for _ in range(5):
        arrays, loss = step(arrays, x)
        print(f"loss {loss:.4f}")
    print(step.plans[0])


if __name__ == "__main__":
    main()
