"""Flax NNX: the model object goes in and comes out updated, as under `nnx.jit`.

python examples/nnx_modules.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jdelta

LAYERS, WIDTH, ROWS = 6, 128, 2048


class Block(nnx.Module):
    """One residual block."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        """Transforms `x`, `[rows, width]`."""
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Stack(nnx.Module):
    """Blocks, scanned over their stacked parameters."""

    def __init__(self, rngs: nnx.Rngs):
        make = nnx.vmap(Block, in_axes=0, out_axes=0)
        self.blocks = nnx.split_rngs(splits=LAYERS)(make)(rngs)

    def __call__(self, x):
        """Transforms `x`, `[rows, width]`."""
        run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return run(x, self.blocks)


def train_step(model, optimizer, x):
    """One step; both objects are updated in place."""

    def loss_fn(model):
        return jnp.mean((model(x) - jnp.roll(x, 1, axis=0)) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def main() -> None:
    model = Stack(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(0), (ROWS, WIDTH))

    step = jdelta.jit(train_step, budget=0.5)
    for _ in range(5):
        print(f"loss {step(model, optimizer, x):.4f}")
    print(step.plans[0])


if __name__ == "__main__":
    main()
